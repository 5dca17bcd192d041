"""Damage is found: every flipped bit, every cut, and nothing but tracekit's own errors comes out."""

import pytest

from tests.store.calls import decode_steps, plan, prefill, recording, two_families
from tests.store.same import differences
from tracekit.errors import TraceCorrupt, TraceMissing, TraceTooNew, UsageError
from tracekit.store import open_trace, verify_trace, write_trace

CALLS = [
    prefill(launch=plan(8), grads=True),
    prefill(2, (300,), dims=(16, 16)),
    two_families(),
    *decode_steps(3),
]
STRIDE = 397


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    path = tmp_path_factory.mktemp("good") / "x.h5"
    write_trace(path, recording(), CALLS)
    return path.read_bytes()


def _read_all(path) -> list:
    with open_trace(path, threads=1) as trace:
        _ = trace.recording
        return list(trace)


def test_every_flipped_bit_is_found(good, tmp_path):
    """Bits all over the file; the user block and the first bytes of the head one by one."""
    path = tmp_path / "x.h5"
    places = sorted({*range(0, 640, 3), *range(640, len(good), STRIDE), len(good) - 1})
    assert len(places) > 350
    silent = []
    for at in places:
        damaged = bytearray(good)
        damaged[at] ^= 1 << at % 8
        path.write_bytes(damaged)
        try:
            read = _read_all(path)
        except (TraceCorrupt, TraceTooNew):
            continue
        silent += [at] if verify_trace(path) == [] or any(map(differences, CALLS, read)) else []
    assert silent == []


def test_every_flipped_bit_of_the_payload_is_found_by_reading_alone(good, tmp_path):
    path = tmp_path / "x.h5"
    path.write_bytes(good)
    with open_trace(path) as trace:
        start = 512 + trace.head.block.head
    for at in range(start, len(good), 5 * STRIDE):
        damaged = bytearray(good)
        damaged[at] ^= 0x10
        path.write_bytes(damaged)
        with pytest.raises(TraceCorrupt) as refused:
            _read_all(path)
        assert refused.value.rule == "E-19"
        assert {violation.rule for violation in verify_trace(path)} == {"E-19", "E-22"}


def test_every_cut_is_found(good, tmp_path):
    path = tmp_path / "x.h5"
    for length in [*range(0, 600, 40), *range(600, len(good), 4001), len(good) - 1]:
        path.write_bytes(good[:length])
        with pytest.raises(TraceCorrupt) as refused:
            open_trace(path)
        assert refused.value.rule == ("E-01" if length < 512 else "E-04")
    path.write_bytes(good + b"\0")
    assert [violation.rule for violation in verify_trace(path)] == ["E-04"]


def test_a_file_that_is_cut_while_it_is_open(good, tmp_path):
    path = tmp_path / "x.h5"
    path.write_bytes(good)
    with open_trace(path) as trace:
        path.write_bytes(good[: 512 + trace.head.block.head])
        with pytest.raises(TraceCorrupt) as refused:
            trace.call(0)
    assert refused.value.rule == "E-04"


def test_a_missing_trace_names_its_neighbours(tmp_path):
    write_trace(tmp_path / "prefill.h5", recording(), [prefill()])
    with pytest.raises(TraceMissing, match=r"did you mean prefill\.h5\?") as refused:
        open_trace(tmp_path / "prefil.h5")
    assert refused.value.fields["close"] == ["prefill.h5"]
    with pytest.raises(TraceMissing):
        verify_trace(tmp_path / "no" / "x.h5")


def test_other_hdf5_files_are_no_traces(tmp_path):
    import h5py

    with h5py.File(tmp_path / "x.h5", "w", userblock_size=512) as file:
        file["a"] = 1
    with pytest.raises(TraceCorrupt) as refused:
        open_trace(tmp_path / "x.h5")
    assert refused.value.rule == "E-01"
    assert refused.value.fields["path"] == str(tmp_path / "x.h5")


def test_calls_outside_the_trace_and_closed_traces(good, tmp_path):
    (tmp_path / "x.h5").write_bytes(good)
    trace = open_trace(tmp_path / "x.h5")
    for index in (-1, len(CALLS)):
        with pytest.raises(UsageError) as refused:
            trace.call(index)
        assert refused.value.rule == "V-CALL"
    trace.close()
    with pytest.raises(ValueError, match="is closed"):
        trace.call(0)


def test_a_damaged_chunk_is_told_once(tmp_path):
    path = tmp_path / "x.h5"
    write_trace(path, recording(), decode_steps(6))
    data = bytearray(path.read_bytes())
    data[-40] ^= 1
    path.write_bytes(data)
    told = [(violation.rule, violation.message) for violation in verify_trace(path)]
    assert [rule for rule, _ in told] == ["E-22", "E-19"]
