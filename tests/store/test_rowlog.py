"""KV rows are stored once, and never lost."""

from dataclasses import replace

import numpy as np
import pytest

from tests.store.calls import KEYS, bits, decode_steps, prefill
from tests.store.same import differences
from tracekit.model import Bits, KVFamily, KVRows, Ranges, Recording, Selection
from tracekit.store import open_trace, write_trace


def _log_rows(trace) -> int:
    return int(trace.head.tables["logs"]["rows"].sum())


def test_decode_stores_each_row_once(tmp_path):
    """64 steps on 16 rows read 16+1 .. 16+64 rows: 3,104 of them, of which 80 are distinct, a layer."""
    calls = decode_steps(64, start=16, layers=2)
    write_trace(tmp_path / "x.h5", Recording(), calls)

    with open_trace(tmp_path / "x.h5") as trace:
        assert sum(call.kv[KEYS[0]][KVFamily.DENSE].count for call in calls) == 2 * 3104
        assert _log_rows(trace) == 2 * 80
        assert len(trace.head.tables["extents"]) == len(calls)
        assert all(differences(a, b) == [] for a, b in zip(calls, trace, strict=True))


def _with_kv(call, rows):
    return replace(call, kv={**call.kv, KEYS[0]: {KVFamily.DENSE: rows}})


def test_a_changed_row_is_a_new_run_and_the_old_one_stays(tmp_path):
    first = prefill(0, (6,))
    held = first.kv[KEYS[0]][KVFamily.DENSE]
    changed = held.keys.data.copy()
    changed[2, 0, 0] ^= 1
    second = _with_kv(first, KVRows(Bits(changed, held.keys.dtype), held.values))
    calls = [first, second, first, second]
    write_trace(tmp_path / "x.h5", Recording(), calls)

    with open_trace(tmp_path / "x.h5") as trace:
        assert _log_rows(trace) == 7
        assert trace.head.tables["kv"]["extent_count"].tolist() == [1, 3, 1, 3]
        assert all(differences(a, b) == [] for a, b in zip(calls, trace, strict=True))


def test_sign_of_zero_and_nan_payloads_are_other_bytes(tmp_path):
    first = prefill(0, (4,), dims=(1, 1), heads=(1, 1))
    values = [
        np.array([0, 0x8000, 0x7FC0, 0x7FC1], np.uint16),
        np.array([0x8000, 0, 0x7FC1, 0x7FC0], np.uint16),
    ]
    dtype = first.dtype
    calls = [
        _with_kv(first, KVRows(Bits(v.reshape(4, 1, 1), dtype), first.kv[KEYS[0]][KVFamily.DENSE].values))
        for v in values
    ]
    write_trace(tmp_path / "x.h5", Recording(), calls)

    with open_trace(tmp_path / "x.h5") as trace:
        assert _log_rows(trace) == 8
        assert all(differences(a, b) == [] for a, b in zip(calls, trace, strict=True))


@pytest.mark.parametrize("field", ["layer", "rank"])
def test_layers_and_ranks_share_no_rows(tmp_path, field):
    first = prefill(0, (4,))
    write_trace(tmp_path / "x.h5", Recording(), [first, replace(first, **{field: 1})])

    with open_trace(tmp_path / "x.h5") as trace:
        assert _log_rows(trace) == 8


def test_a_sliding_window_keeps_the_rows_it_shares(tmp_path):
    rng = np.random.default_rng(0)
    keys, values = bits(rng, (40, 2, 8)), bits(rng, (40, 2, 8))
    template = prefill(0, (1,))
    calls = []
    for first in (0, 5, 30, 10):
        part = slice(first, first + 10)
        rows = KVRows(keys.part(part), values.part(part), first)
        nothing = Selection({KVFamily.DENSE: Ranges(np.zeros(1), np.zeros(1))})
        calls.append(replace(template, kv={KEYS[0]: {KVFamily.DENSE: rows}}, selection=nothing))
    write_trace(tmp_path / "x.h5", Recording(), calls)

    with open_trace(tmp_path / "x.h5") as trace:
        assert _log_rows(trace) == 30
        assert all(differences(a, b) == [] for a, b in zip(calls, trace, strict=True))
