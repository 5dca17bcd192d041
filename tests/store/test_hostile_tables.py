"""Any number in any table, under right digests: a rule refuses it, or the trace is still readable."""

import h5py
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.malformed.tamper import block, good, reseal
from tests.store.calls import indexer_call, recording, two_families
from tracekit.errors import TraceCorrupt
from tracekit.store import open_trace, verify_trace, write_trace
from tracekit.store.schema import TABLES

CELLS = [(name, field) for name, dtype in TABLES.items() for field in dtype.names or ("",)]
NUMBERS = st.one_of(
    st.integers(0, 20),
    st.sampled_from([2**k + d for k in (8, 16, 31, 32, 62, 63, 64) for d in (-2, -1, 0)]),
    st.integers(0, 2**64 - 1),
)


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sound")
    good(folder / "a.h5")
    indexers = [indexer_call(), indexer_call(1, start=10)]
    write_trace(folder / "b.h5", recording(), [two_families()], indexer_calls=indexers)
    return folder


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(("a.h5", "b.h5")), st.sampled_from(CELLS), st.integers(0, 1000), NUMBERS)
def test_any_number_in_any_table(tmp_path, sound, which, cell, row, number):
    path = tmp_path / "x.h5"
    path.write_bytes((sound / which).read_bytes())
    before = block(path)
    table, field = cell
    with h5py.File(path, "r+", libver=("v110", "v110")) as file:
        if table not in file["index"]:
            return
        dataset = file[f"index/{table}"]
        values = dataset[()]
        if not values.size:
            return
        column = values[field] if field else values
        if column.dtype.kind == "S":
            column[row % len(column)] = number.to_bytes(9, "little")
        else:
            column[row % len(column)] = np.uint64(number % 2**64).astype(column.dtype)
        dataset[...] = values
    reseal(path, before)

    broken = _broken_rule(path)
    if broken:
        assert broken.startswith("E-")
        assert verify_trace(path) != []


def _broken_rule(path) -> str:
    """Read all there is; any error but `TraceCorrupt` goes through and fails the test."""
    try:
        with open_trace(path, threads=1) as trace:
            _ = trace.recording, trace.heads, list(trace), trace.summary()
            _ = trace.indexer_heads, list(trace.indexer_calls())
    except TraceCorrupt as error:
        return error.rule
    return ""
