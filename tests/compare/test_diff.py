"""`diff`: requests by content, tensors in the order of the data, the first divergence with its place."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tracekit.compare.alignment import align, common_prefix, related
from tracekit.compare.diff import Diff, compare_traces
from tracekit.model import (
    AttentionCall,
    Bits,
    DType,
    KVFamily,
    KVRows,
    Lists,
    Origin,
    Recording,
    Request,
    RequestKey,
    Rows,
    Selection,
    StepRecord,
)
from tracekit.providers.oracle import Oracle
from tracekit.testing.build import dense_call, record, sparse_call
from tracekit.verdict import Exit


@dataclass(frozen=True, eq=False)
class Memory:
    calls: tuple[AttentionCall, ...]
    recording: Recording

    def __iter__(self) -> Iterator[AttentionCall]:
        return iter(self.calls)


def request(tokens: list[int], prompt: int | None = None, ordinal: int = 0) -> Request:
    prompt = len(tokens) if prompt is None else prompt
    return Request(RequestKey.of_prompt(tokens[:prompt], ordinal), np.array(tokens), prompt)


def trace(*calls: AttentionCall) -> Memory:
    """A trace of calls of one prefill each, every request named by its own tokens."""
    named = [_named(call) for call in calls]
    requests = {
        key: Request(key, tokens, tokens.size) for call in named for key, tokens in _tokens(call).items()
    }
    return Memory(tuple(named), Recording(requests=tuple(requests.values())))


def _tokens(call: AttentionCall) -> dict[RequestKey, np.ndarray]:
    """Each request's tokens by position: the order of rows in the launch is not the order of the prompt."""
    by_position = np.argsort(call.rows.positions, kind="stable")
    request, tokens = call.rows.request[by_position], call.rows.token_ids[by_position]
    return {key: tokens[request == index] for index, key in enumerate(call.rows.requests)}


def _named(call: AttentionCall) -> AttentionCall:
    """Name each request of a prefill by its prompt."""
    keys = [RequestKey.of_prompt(tokens) for tokens in _tokens(call).values()]
    rows = Rows(tuple(keys), call.rows.request, call.rows.positions, call.rows.token_ids)
    return replace(call, rows=rows, kv=dict(zip(keys, call.kv.values(), strict=True)))


def flipped(bits: Bits, where: tuple[int, ...]) -> Bits:
    data = np.array(bits.data)
    data[where] ^= 1
    return Bits(data, bits.dtype)


@pytest.fixture(scope="module")
def call() -> AttentionCall:
    return _named(record(dense_call(lengths=(5, 3)), Oracle()))


def found(base: AttentionCall, target: AttentionCall) -> Diff:
    return compare_traces(trace(base), trace(target))


def test_a_trace_equals_itself(call):
    diff = found(call, call)
    assert (diff.exit_code, diff.first) == (Exit.OK, None)
    assert {part.tensor: part.verdict for part in diff.parts if part.verdict != "equal"} == {"sink": "absent"}


def test_rows_in_another_order_are_the_same_trace(call):
    assert found(call, call.take(np.arange(call.num_rows)[::-1])).exit_code == Exit.OK


def test_one_bit_of_q_is_found_with_its_place(call):
    diff = found(call, replace(call, q=flipped(call.q, (6, 2, 9))))
    assert diff.exit_code == Exit.REFUTED
    assert diff.first is not None
    place = diff.first.place
    row = call.rows.ids[6]
    assert (diff.first.tensor, place.request, place.position, place.head, place.element) == (
        "q",
        str(row.request),
        row.position,
        2,
        9,
    )


@pytest.mark.parametrize("tensor", ["keys", "values"])
def test_one_bit_of_the_cache_is_found(call, tensor):
    key = call.rows.requests[0]
    rows = call.kv[key][KVFamily.DENSE]
    changed = {
        "keys": KVRows(flipped(rows.keys, (1, 0, 3)), rows.values),
        "values": KVRows(rows.keys, flipped(rows.value_bits, (1, 0, 3))),
    }[tensor]
    diff = found(call, call.with_kv({**call.kv, key: {KVFamily.DENSE: changed}}))
    assert diff.first is not None
    assert (diff.first.tensor, diff.first.place.position) == (tensor, 1)


def test_a_cache_row_overwritten_between_two_steps_is_named(call):
    """ROCm/ATOM #1417: the row was right when it was first read and another request's later."""
    later = replace(
        call, step=1, rows=shifted(call.rows, 5), conventions=replace(call.conventions, causal=False)
    )
    key = call.rows.requests[0]
    rows = later.kv[key][KVFamily.DENSE]
    spoiled = later.with_kv(
        {**later.kv, key: {KVFamily.DENSE: KVRows(flipped(rows.keys, (2, 1, 0)), rows.values)}}
    )
    base = trace(call)
    sides = [
        Memory((*base.calls, _named_as(base.calls[0], step)), _longer(base.recording))
        for step in (later, spoiled)
    ]
    diff = compare_traces(*sides)
    assert diff.first is not None
    assert (diff.first.tensor, diff.first.place.position) == ("keys", 2)


def shifted(rows: Rows, by: int) -> Rows:
    return Rows(rows.requests, rows.request, rows.positions + by, rows.token_ids)


def _named_as(first: AttentionCall, later: AttentionCall) -> AttentionCall:
    rows = Rows(first.rows.requests, later.rows.request, later.rows.positions, later.rows.token_ids)
    return replace(later, rows=rows, kv=dict(zip(first.rows.requests, later.kv.values(), strict=True)))


def _longer(recording: Recording) -> Recording:
    """The same requests, five generated tokens longer."""
    return Recording(
        requests=tuple(
            Request(r.key, np.concatenate([r.token_ids, np.zeros(10, np.int64)]), r.prompt_length)
            for r in recording.requests
        )
    )


def test_an_output_of_one_request_only_does_not_hide_what_differs(call):
    other = replace(call, out=replace(call.out, bits=flipped(call.out.bits, (0, 0, 0))))
    assert found(call, other).exit_code == Exit.REFUTED


def test_a_derived_row_does_not_hide_an_executed_one(call):
    """Layer 0 has two calls; one is derived, the other differs in one bit."""
    first, second = (call.take(np.flatnonzero(call.rows.request == r)) for r in (0, 1))
    derived = replace(second, out=replace(second.out, origin=Origin.DERIVED))
    changed = replace(first, out=replace(first.out, bits=flipped(first.out.bits, (1, 1, 1))))
    recording = trace(call).recording
    base, target = (Memory((one, derived), recording) for one in (first, changed))
    diff = compare_traces(base, target)
    assert (diff.exit_code, diff.first.tensor) == (Exit.REFUTED, "out")
    assert compare_traces(base, base).exit_code == Exit.INCONCLUSIVE


def test_every_launch_is_asked_for_its_conventions_and_sink(call):
    first, second = (call.take(np.flatnonzero(call.rows.request == r)) for r in (0, 1))
    recording = trace(call).recording
    base = Memory((first, second), recording)
    scaled = replace(second, conventions=replace(second.conventions, scale_bits=0x3F800000))
    sunk = replace(second, sink=Bits(np.zeros(4, np.uint32), DType.FLOAT32))
    for other, tensor in ((scaled, "conventions"), (sunk, "sink")):
        diff = compare_traces(base, Memory((first, other), recording))
        assert (diff.exit_code, diff.first.tensor) == (Exit.REFUTED, tensor)


def test_a_recompute_with_other_bits_is_a_difference(call):
    again = replace(call, step=1, out=replace(call.out, bits=flipped(call.out.bits, (4, 0, 2))))
    recording = trace(call).recording
    diff = compare_traces(Memory((call,), recording), Memory((call, again), recording))
    assert (diff.exit_code, diff.first.tensor) == (Exit.REFUTED, "out")
    assert compare_traces(Memory((call,), recording), Memory((call, call), recording)).exit_code == Exit.OK


def test_another_dtype_is_a_difference_not_a_gap(call):
    half = _named(dense_call(lengths=(5, 3), dtype=DType.FLOAT16))
    diff = found(call, record(half, Oracle()))
    assert diff.first is not None
    assert diff.first.tensor == "q"
    assert "float16" in diff.first.reason


def test_a_layer_without_an_output_is_not_equal(call):
    """One layer equal, one not comparable: the traces are not equal."""
    bare = replace(call, layer=1, out=None)
    diff = compare_traces(trace(call, bare), trace(call, bare))
    assert diff.exit_code == Exit.INCONCLUSIVE


def test_the_first_divergence_follows_the_data_not_the_size(call):
    """O differs everywhere, Q in one bit: Q comes first."""
    out = Bits(call.out.bits.data ^ 1, call.out.bits.dtype)
    diff = found(call, replace(call, q=flipped(call.q, (7, 0, 0)), out=replace(call.out, bits=out)))
    assert [part.tensor for part in diff.parts if part.verdict == "differs"] == ["q", "out"]


def test_selection_as_a_set_and_as_an_order():
    call = _named(record(sparse_call(lengths=(24,)), Oracle()))
    part = call.selection.families[KVFamily.C4]
    backwards = Lists.of([part.row(t)[::-1] for t in range(part.rows)])
    other = replace(call, selection=Selection({**call.selection.families, KVFamily.C4: backwards}))
    verdicts = {part.tensor: part.verdict for part in found(call, other).parts}
    assert (verdicts["selection set"], verdicts["selection order"]) == ("equal", "differs")


def test_another_set_is_seen_in_both():
    call = _named(record(sparse_call(lengths=(24,)), Oracle()))
    part = call.selection.families[KVFamily.C4]
    fewer = Lists.of([part.row(t)[:-1] for t in range(part.rows)])
    other = replace(call, selection=Selection({**call.selection.families, KVFamily.C4: fewer}))
    diff = found(call, other)
    assert diff.first is not None
    assert diff.first.tensor == "selection set"


@pytest.mark.parametrize("which", ["out", "lse"])
def test_a_derived_output_is_not_compared(call, which):
    derived = replace(getattr(call, which), origin=Origin.DERIVED)
    diff = found(call, replace(call, **{which: derived}))
    (part,) = [part for part in diff.parts if part.tensor == which]
    assert part.verdict == "not compared"
    assert diff.exit_code == (Exit.INCONCLUSIVE if which == "out" else Exit.OK)


def test_another_scale_is_a_divergence_before_any_tensor(call):
    other = replace(call, conventions=replace(call.conventions, scale_bits=call.conventions.scale_bits + 1))
    diff = found(call, other)
    assert diff.first is not None
    assert diff.first.tensor == "conventions"
    assert diff.exit_code == Exit.REFUTED


def test_no_common_request_is_inconclusive():
    diff = found(dense_call(seed=1), dense_call(seed=2))
    assert diff.exit_code == Exit.INCONCLUSIVE
    assert len(diff.notes) == 2


def test_a_layer_of_one_trace_only_is_noted(call):
    both = compare_traces(trace(call, replace(call, layer=3)), trace(call))
    assert both.exit_code == Exit.INCONCLUSIVE
    assert both.notes == ("only in base: layers 3",)
    assert both.summary.startswith("no answer: equal where both have rows (8 a layer)")


@pytest.mark.parametrize("swap", [False, True])
def test_rows_of_one_trace_only_are_told_and_nothing_is_equal(call, swap):
    """One trace ends earlier: what it has is equal, and that is not all."""
    sides = [trace(call), Memory((call.take(np.arange(6)),), trace(call).recording)]
    diff = compare_traces(*(sides[::-1] if swap else sides))
    assert (diff.exit_code, diff.first) == (Exit.INCONCLUSIVE, None)
    key, position = call.rows.ids[6].request, call.rows.ids[6].position
    name = "target" if swap else "base"
    assert diff.notes == (
        f"only in {name}: 2 rows, the first at position {position} of {key} in layer 0; the other trace has "
        "none there over the same tokens",
    )


def test_a_request_of_one_trace_only_is_told_and_nothing_is_equal(call):
    one = call.take(np.flatnonzero(call.rows.request == 0))
    diff = found(call, one)
    assert (diff.exit_code, diff.first) == (Exit.INCONCLUSIVE, None)
    assert diff.notes == (f"only in base: requests {call.rows.requests[1]}",)


def test_what_both_traces_lost_was_not_compared(call):
    ledger = (StepRecord(0, 2, 2, 1, 0, "layer 1: T-WRITTEN"),)
    cut = Memory((call,), replace(trace(call).recording, ledger=ledger))
    diff = compare_traces(cut, cut)
    assert (diff.exit_code, diff.first) == (Exit.INCONCLUSIVE, None)
    assert diff.notes[0] == "base lacks calls of step 0: layer 1: T-WRITTEN"


def test_only_the_common_prefix_counts():
    base = [request([1, 2, 3, 4])]
    target = [request([1, 2, 9, 9]), request([1, 2, 3, 9])]
    (pair,) = align(base, target)
    assert (pair.tokens, pair.target) == (3, target[1].key)


TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=6)


@given(st.lists(TOKENS, max_size=5), st.lists(TOKENS, max_size=5))
def test_alignment_is_one_to_one_and_by_content(base, target):
    ours = [request(tokens, ordinal=base[:i].count(tokens)) for i, tokens in enumerate(base)]
    theirs = [request(tokens, ordinal=target[:i].count(tokens)) for i, tokens in enumerate(target)]
    pairs = align(ours, theirs)
    assert len({pair.base for pair in pairs}) == len({pair.target for pair in pairs}) == len(pairs)
    by_key = {r.key: r for r in ours}, {r.key: r for r in theirs}
    for pair in pairs:
        assert pair.tokens == common_prefix(by_key[0][pair.base], by_key[1][pair.target]) > 0
    lone = [r for r in ours if r.key not in {pair.base for pair in pairs}]
    free = [r for r in theirs if r.key not in {pair.target for pair in pairs}]
    assert not any(related(a, b) for a in lone for b in free)


def test_a_common_first_token_relates_nobody():
    assert align([request([1, 2, 3, 4])], [request([1, 9, 9, 9])]) == []
