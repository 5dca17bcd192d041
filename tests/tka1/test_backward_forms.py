"""S16 in C++: the bytes of the numpy form, on every launch; threads and builds change none."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tka1 import cases
from tests.tka1.cases import CASES, bf16
from tests.tka1.gradients import backward, difference
from tracekit.model.bits import DType
from tracekit.providers import tka1
from tracekit.providers.tka1 import FamilyInput, Inputs, Lists, Ranges, native, numpy_backward
from tracekit.providers.tka1.gradients import Backward
from tracekit.providers.tka1.native import Library

SLOW = ("D 576, Dv 512",)


@pytest.mark.parametrize("name", [name for name in CASES if name not in SLOW])
def test_the_cpp_gives_the_bytes_of_the_numpy_form(build: Library, name: str):
    b = backward(name, DType.FLOAT32 if name == "causal" else DType.BFLOAT16)
    want = numpy_backward.run(b)
    for threads in (1, 3):
        assert difference(build.backward(b, threads), want) == ""
    rows = build.partials(b.inputs)
    assert difference(build.backward(replace(b, rows=rows)), want) == ""


@st.composite
def launches(draw: st.DrawFn) -> Backward:
    """Small launches of every shape: requests, lists with holes, windows, sinks, dtypes, wild numbers."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    kv_heads, group = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    dim, width = draw(st.integers(1, 20)), draw(st.integers(1, 20))
    requests, rows = draw(st.integers(1, 3)), draw(st.integers(1, 6))
    wild = 2.0 ** rng.integers(-140, 100, width) if draw(st.booleans()) else 1.0
    shared = draw(st.booleans())
    request = rng.integers(0, requests, rows).astype(np.int32)
    families = []
    for _ in range(draw(st.integers(1, 2))):
        first = rng.integers(0, 200, requests)
        counts = rng.integers(1, 300, requests)
        keys = tuple(bf16(rng, (n, kv_heads, dim)) for n in counts)
        values = keys if shared else tuple(bf16(rng, (n, kv_heads, width), wild) for n in counts)
        if draw(st.booleans()):
            chosen = [rng.choice(counts[r], rng.integers(0, counts[r] + 1), replace=False) for r in request]
            selection: Lists | Ranges = cases.lists(
                [np.append(x + first[r], -1) for x, r in zip(chosen, request, strict=True)]
            )
        else:
            ends = np.sort(rng.integers(0, counts[request][:, None] + 1, (rows, 2)), axis=1)
            selection = Ranges(*(ends[:, i] + first[request] for i in (0, 1)))
        families.append(FamilyInput(keys, values, tuple(int(x) for x in first), selection))
    sink = None
    if draw(st.booleans()):
        sink = rng.standard_normal(kv_heads * group).astype(np.float32).view(np.uint32)
        sink[0] = draw(st.sampled_from([sink[0], 0x7F800000, 0xFF800000, 0x7FC00001]))
    inputs = Inputs(
        bf16(rng, (rows, kv_heads * group, dim), 2), request, tuple(families), sink, cases.scale(dim)
    )
    positions = rng.choice(1000, rows, replace=False)
    return Backward(inputs, positions, bf16(rng, (rows, kv_heads * group, inputs.value_dim)))


@settings(max_examples=60, deadline=None)
@given(launches())
def test_any_launch_gives_equal_bytes(b: Backward):
    want = numpy_backward.run(b)
    for isa in native.available():
        assert difference(native.load(isa).backward(b, 2), want) == ""


def test_the_training_forward_gives_the_bits_of_the_forward(build: Library):
    for name in ("causal", "two families", "wild", "decode"):
        inputs = cases.case(name)
        out, rows = build.training(inputs, 2)
        assert cases.difference(out, build.run(inputs)) == ""
        assert cases.difference(rows, build.partials(inputs)) == ""


@pytest.mark.parametrize("form", ["auto", "numpy"])
def test_owners_of_some_queries_and_keys_merge_to_the_unsplit_gradients(form: tka1.Form):
    """Two ranks, each with its leaves of positions and keys; what is exchanged is unfinished sums."""
    b = backward("causal")
    positions = np.array([3, 100, 127, 128, 200, 255, 256, 300, 384])
    b = replace(b, positions=positions)
    want = tka1.backward(b, form=form)
    rows = tka1.partials(b.inputs, form=form)
    key_runs = [run for owned in ({0, 2}, {1}) for run in tka1.fewest_runs(0, owned)]
    query_runs = [run for owned in ({0, 3}, {1, 2}) for run in tka1.fewest_runs(0, owned)]
    whole = replace(b, rows=rows, unfinished=True)

    d_q = []
    for run in sorted(key_runs, key=lambda run: run.key):
        some = replace(whole, inputs=tka1.within(b.inputs, run))
        d_q.append((run.key, tka1.backward(some, form=form).d_q))
    assert np.array_equal(tka1.merge_sums(d_q), want.d_q)

    parts = []
    for run in sorted(query_runs):
        low, high = run.rows
        mine = np.flatnonzero((positions >= low) & (positions < high))
        parts.append((run.first, tka1.backward(whole.take(mine), form=form)))
    for what in ("keys", "values"):
        merged = tka1.merge_sums([(at, getattr(part.families[0], what)[0]) for at, part in parts])
        assert np.array_equal(merged, getattr(want.families[0], what)[0])
    assert np.array_equal(tka1.merge_sums([(at, part.d_sink) for at, part in parts]), want.d_sink)

    arrival = [(i, part.families[0].keys[0]) for i, (_, part) in enumerate(parts[1:] + parts[:1])]
    assert not np.array_equal(tka1.merge_sums(arrival), want.families[0].keys[0])  # the control
