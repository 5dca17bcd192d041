import numpy as np
import pytest

from tracekit.model import DType
from tracekit.recorder.kv_log import KVLog, RowChanged
from tracekit.recorder.observation import Borrowed, SeenKV

NAMES = list(enumerate(("keys", "values")))


def seen(rows, first=0, generation=0):
    """KV whose every element is its row's number; head-major, as engines keep it."""
    keys = np.broadcast_to(np.array(rows, np.uint16)[None, :, None], (2, len(rows), 4))
    return SeenKV(Borrowed(keys, DType.BFLOAT16), Borrowed(keys + 1000, DType.BFLOAT16), first, generation)


def content(extent):
    rows = extent.rows()
    assert np.array_equal(rows.values.data, rows.keys.data + 1000)
    return rows.first, rows.keys.data[:, 0, 0].tolist()


def test_a_growing_cache_is_one_log():
    log = KVLog()
    extents = [log.observe(seen(range(n))) for n in (3, 4, 200)]

    assert [content(e) for e in extents] == [(0, list(range(n))) for n in (3, 4, 200)]
    assert all(np.shares_memory(extents[-1].rows().keys.data, e.rows().keys.data) for e in extents)
    assert extents[-1].rows().generation == 0


def test_a_sliding_cache_continues_the_log():
    log = KVLog()
    first = log.observe(seen(range(20)))
    later = log.observe(seen(range(13, 24), first=13))

    assert content(first) == (0, list(range(20)))
    assert content(later) == (13, list(range(13, 24)))
    assert np.shares_memory(first.rows().keys.data, later.rows().keys.data)


def test_changed_rows_are_refused_and_the_log_stays():
    log = KVLog()
    before = log.observe(seen([0, 1, 2, 3]))
    with pytest.raises(RowChanged) as changed:
        log.observe(seen([0, 1, 9, 3, 4]))
    later = log.observe(seen([0, 1, 2, 3, 4]))

    assert changed.value.row == 2
    assert content(before) == (0, [0, 1, 2, 3])
    assert content(later) == (0, [0, 1, 2, 3, 4])


def test_a_new_generation_starts_a_new_log():
    log = KVLog()
    before = log.observe(seen([0, 1, 2, 3]))
    after = log.observe(seen([0, 1, 9, 3, 4], generation=1))

    assert content(before) == (0, [0, 1, 2, 3])
    assert content(after) == (0, [0, 1, 9, 3, 4])
    assert (before.rows().generation, after.rows().generation) == (0, 1)


def test_a_gap_starts_a_log_of_the_same_generation():
    log = KVLog()
    log.observe(seen(range(4)))
    later = log.observe(seen(range(30, 34), first=30))

    assert content(later) == (30, [30, 31, 32, 33])
    assert later.rows().generation == 0


def test_the_log_owns_its_rows():
    keys = np.zeros((1, 2, 4), np.uint16)
    extent = KVLog().observe(SeenKV(Borrowed(keys, DType.BFLOAT16), None))
    keys[:] = 7

    assert not extent.rows().keys.data.any()
    assert extent.rows().shared


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("head", [0, 2])
@pytest.mark.parametrize("row", [0, 68, 69])
@pytest.mark.parametrize("part", ["keys", "values"])
def test_one_bit_of_one_row_is_seen_in_any_layout(part, row, head, packed):
    """Packed rows are compared in one run a head, others element by element."""
    shape = (3, 70, 4) if packed else (70, 3, 4)
    data = {name: np.random.default_rng(number).integers(0, 9, shape, np.uint16) for number, name in NAMES}
    if not packed:
        data = {name: array.transpose(1, 0, 2) for name, array in data.items()}

    def rows():
        return SeenKV(Borrowed(data["keys"], DType.BFLOAT16), Borrowed(data["values"], DType.BFLOAT16))

    log = KVLog()
    log.observe(rows())
    log.observe(rows())
    data[part][head, row, 3] ^= 1 << 15
    with pytest.raises(RowChanged) as changed:
        log.observe(rows())
    assert changed.value.row == row
