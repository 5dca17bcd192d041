"""What an engine that nobody has tested must show before its launches are kept."""

from dataclasses import replace

import numpy as np
import pytest

from tracekit.errors import ConventionContradicted
from tracekit.model import Bits, DType, KVFamily, Origin, Ranges, Selection
from tracekit.providers.oracle import Oracle
from tracekit.recorder.first_launch import FirstLaunches
from tracekit.recorder.observation import Borrowed, Observation, SeenKV
from tracekit.testing import dense_call, record, sparse_call


def observed(call):
    """A call as a hook describes it."""
    handles = {key: handle for handle, key in enumerate(call.rows.requests)}

    def rows(held):
        parts = (held.keys, held.values)
        keys, values = (p and Borrowed(p.data.transpose(1, 0, 2), p.dtype) for p in parts)
        return SeenKV(keys, values, held.first)

    return Observation(
        layer=call.layer,
        requests=tuple(handles.values()),
        request=call.rows.request,
        positions=call.rows.positions,
        q=call.q,
        kv={handles[key]: {f: rows(held) for f, held in call.kv[key].items()} for key in handles},
        sink=call.sink,
        selection=call.selection,
        out=call.out,
        lse=call.lse,
        conventions=call.conventions,
        provenance=call.provenance,
    )


def launched(**options):
    call = dense_call(**options)
    return observed(record(call, Oracle()))


def windowed(seen, window):
    """The launch as if another window had been read; rows that are not held cannot be told."""
    hi = seen.positions + 1
    part = Ranges(np.maximum(hi - window, 0), hi)
    conventions = replace(seen.conventions, window=window)
    return replace(seen, selection=Selection({KVFamily.DENSE: part}), conventions=conventions)


@pytest.mark.parametrize("dtype", [DType.BFLOAT16, DType.FLOAT16, DType.FLOAT32])
def test_what_fits_is_kept(dtype):
    FirstLaunches().check(launched(lengths=(20, 9), window=8, sink=True, dtype=dtype))
    FirstLaunches().check(observed(record(sparse_call(lengths=(40, 25)), Oracle())))


@pytest.mark.parametrize("off", [-1, 1])
def test_a_window_off_by_one_is_refused_with_the_one_that_fits(off):
    seen = launched(lengths=(40, 9), window=16)
    with pytest.raises(ConventionContradicted, match="it fits a window of 16") as caught:
        FirstLaunches().check(windowed(seen, 16 + off))
    assert caught.value.rule == "R-CONVENTION"


def test_a_layer_is_asked_until_its_window_was_seen():
    """Rows before the window say the same under any."""
    early, late = launched(lengths=(9,), window=16), launched(lengths=(40,), window=16)
    first = FirstLaunches()
    first.check(windowed(early, 15))
    with pytest.raises(ConventionContradicted):
        first.check(windowed(late, 15))
    first.check(late)
    first.check(windowed(late, 15))  # shown once is shown


def test_each_kernel_of_a_layer_is_asked():
    seen = launched(lengths=(20,))
    first = FirstLaunches()
    first.check(seen)
    executed = replace(seen.provenance.executed, kernel="another")
    other = replace(seen, provenance=replace(seen.provenance, executed=executed))
    wrong = replace(other.conventions, scale_bits=0x3F800000)
    with pytest.raises(ConventionContradicted, match="no other reading fits"):
        first.check(replace(other, conventions=wrong))


def test_what_no_kernel_made_or_no_bound_covers_shows_nothing():
    seen = launched(lengths=(20,))
    derived = replace(seen, out=replace(seen.out, origin=Origin.DERIVED), lse=None)
    wild = replace(seen, q=Bits(np.full_like(seen.q.data, 0x7F80), seen.q.dtype))
    for one in (derived, wild, replace(seen, out=None, lse=None)):
        with pytest.raises(ConventionContradicted) as caught:
            FirstLaunches().check(one)
        assert caught.value.rule == "R-UNSHOWN"
