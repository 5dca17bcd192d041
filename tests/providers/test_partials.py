"""Partials of any kernel, merged by a declared reduction; and any legal split of a launch, in bits."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tracekit.canonical.owners import Owner, check_owners
from tracekit.compare import Roundings, compare_envelope, envelope
from tracekit.errors import InvalidCall
from tracekit.model import (
    TKA1_REDUCTION,
    Bits,
    Downcast,
    DType,
    LseBase,
    MergeOrder,
    PartialState,
    ReductionSpec,
    SinkPlace,
    Tree,
)
from tracekit.providers import tka1
from tracekit.providers.partials import merge_blocks, merge_lse_blocks, of_lse, to_lse
from tracekit.providers.portable import inputs
from tracekit.providers.ranks import attention_of_ranks
from tracekit.providers.split import Sequence, Split
from tracekit.testing import dense_call

CALL = dense_call(dtype=DType.FLOAT32, lengths=(620, 260), new=(2, 2), sink=True, seed=4)
WHOLE = tka1.attention(inputs(CALL))
PARTS = {i: tka1.partials(inputs(CALL), run=tka1.Run(0, i, 0)) for i in range(5)}
FOREIGN = {i: to_lse(part) for i, part in PARTS.items()}
LSE = ReductionSpec(Tree.LEFT_FOLD, 128)


def same(one: tka1.Outputs, two: tka1.Outputs) -> bool:
    return all(np.array_equal(x, y) for x, y in zip(vars(one).values(), vars(two).values(), strict=True))


@st.composite
def splits(draw: st.DrawFn) -> Split:
    return Split(
        tensor=draw(st.sampled_from([1, 2, 4])),
        context=draw(st.integers(1, 8)),
        sequence=draw(st.sampled_from(Sequence)),
        rows=draw(st.sampled_from([0, 128, 256, 640])),
        arrival=draw(st.integers(0, 100)),
    )


@settings(max_examples=40, deadline=None)
@given(splits())
def test_any_legal_split_gives_the_bits_of_the_unsplit_call(split: Split):
    """Eight ranks over five leaves leave some empty; four tensor ranks hold copies of two KV heads."""
    assert same(attention_of_ranks(inputs(CALL), CALL.rows.positions, split), WHOLE)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 3), min_size=5, max_size=5), st.randoms())
def test_any_owners_of_whole_leaves_give_the_bits_of_the_unsplit_call(owner: list[int], random):
    """Not only layouts with a name: each leaf goes to any of four ranks, and partials arrive in any order."""
    sent = []
    for rank in range(4):
        leaves = [leaf for leaf, one in enumerate(owner) if one == rank]
        for run in tka1.fewest_runs(0, leaves):
            sent.append((run, tka1.partials(inputs(CALL), run=run)))
    random.shuffle(sent)
    assert same(tka1.merge(dict(sent), inputs(CALL).sink, DType.FLOAT32), WHOLE)


def test_a_cut_inside_a_leaf_is_refused_by_name_before_anything_runs():
    for split in (Split(rows=64), Split(context=2, rows=192)):
        with pytest.raises(InvalidCall) as error:
            attention_of_ranks(inputs(CALL), CALL.rows.positions, split)
        assert error.value.rule == "C-OWN-ALIGNED"
    with pytest.raises(InvalidCall) as error:
        check_owners([Owner(((0, 310),)), Owner(((310, 620),))], 0, 620, TKA1_REDUCTION.leaf)
    assert error.value.rule == "C-OWN-ALIGNED"
    with pytest.raises(InvalidCall) as error:
        attention_of_ranks(inputs(CALL), CALL.rows.positions, Split(tensor=3))
    assert error.value.rule == "C-TP-UNEVEN"


def test_rows_without_any_kv_are_answered_by_ranks_too():
    blind = replace(inputs(CALL), families=(replace(inputs(CALL).families[0], selection=_nothing()),))
    got = attention_of_ranks(blind, CALL.rows.positions, Split(context=3))
    assert same(got, tka1.attention(blind))
    assert not got.out.any()


def _nothing() -> tka1.Ranges:
    return tka1.Ranges(np.zeros(4, np.int64), np.zeros(4, np.int64))


def test_blocks_of_tka1_merge_in_its_tree_and_in_no_other():
    sink = inputs(CALL).sink
    assert same(merge_blocks(PARTS, TKA1_REDUCTION, sink, DType.FLOAT32), WHOLE)
    left = merge_blocks(PARTS, replace(TKA1_REDUCTION, tree=Tree.LEFT_FOLD), sink, DType.FLOAT32)
    assert not same(left, WHOLE)
    assert TKA1_REDUCTION.differences(replace(TKA1_REDUCTION, tree=Tree.LEFT_FOLD))


@settings(deadline=None)
@given(st.permutations(range(5)))
def test_blocks_merge_by_their_index_in_any_order_of_arrival(order: list[int]):
    for spec in (LSE, replace(LSE, tree=Tree.ALIGNED_BINARY)):
        want = merge_lse_blocks(FOREIGN, spec, None, DType.FLOAT32)
        assert same(merge_lse_blocks({i: FOREIGN[i] for i in order}, spec, None, DType.FLOAT32), want)


@pytest.mark.parametrize("tree", Tree)
@pytest.mark.parametrize("base", LseBase)
def test_merged_partials_of_a_foreign_kernel_lie_in_the_envelope(tree: Tree, base: LseBase):
    """(O, LSE) partials, natural or in base 2, against float64; a base that is not declared lies outside."""
    sent = {
        i: (out, lse / np.float32(np.log(2)) if base is LseBase.TWO else lse)
        for i, (out, lse) in FOREIGN.items()
    }
    sink = inputs(CALL).sink
    bound = envelope(CALL, Roundings())

    def inside(spec: ReductionSpec, sink) -> bool:
        got = merge_lse_blocks(sent, spec, sink, DType.FLOAT32)
        out, lse = (Bits(x, DType.FLOAT32) for x in (got.out, got.lse))
        return compare_envelope(CALL, bound, out, lse).outside.first is None

    spec = replace(LSE, tree=tree, lse_base=base)
    assert inside(spec, sink)
    other = LseBase.NATURAL if base is LseBase.TWO else LseBase.TWO
    assert not inside(replace(spec, lse_base=other), sink)
    assert not inside(spec, None)


def test_two_shards_of_base_two_have_the_weights_of_the_report():
    """Z = [2, 8]: weights .2 and .8 by the declared base, .277 and .723 where nats are taken for base 2."""
    out = {0: np.ones((1, 1, 1), np.float32), 1: np.zeros((1, 1, 1), np.float32)}
    shards = {i: (out[i], np.full((1, 1), z, np.float32)) for i, z in enumerate(np.log2([2.0, 8.0]))}
    for base, weight in ((LseBase.TWO, 0.2), (LseBase.NATURAL, 0.119)):
        got = merge_lse_blocks(shards, replace(LSE, lse_base=base), None, DType.FLOAT32)
        assert float(got.out.view(np.float32).item()) == pytest.approx(weight, abs=1e-3)


def test_an_empty_partial_changes_nothing_and_all_of_them_give_zero():
    empty = (np.zeros((4, 4, 16), np.float32), np.full((4, 4), -np.inf, np.float32))
    want = merge_lse_blocks(FOREIGN, LSE, None, DType.FLOAT32)
    assert same(merge_lse_blocks(FOREIGN | {9: empty}, LSE, None, DType.FLOAT32), want)
    nothing = merge_lse_blocks({0: empty, 1: empty}, LSE, None, DType.FLOAT32)
    assert not nothing.out.any()
    assert np.isneginf(nothing.lse.view(np.float32)).all()


def test_a_nan_in_a_partial_poisons_its_row():
    out, lse = FOREIGN[1]
    bad = lse.copy()
    bad[0, 0] = np.nan
    got = merge_lse_blocks(FOREIGN | {1: (out, bad)}, LSE, None, DType.FLOAT32)
    assert np.isnan(got.out.view(np.float32)[0, 0]).all()
    assert np.isfinite(got.out.view(np.float32)[1:]).all()
    assert (of_lse(out, bad).l.view(np.float32)[0, 0] != of_lse(out, bad).l.view(np.float32)[0, 0]).all()


def test_the_sink_joins_once():
    sink = inputs(CALL).sink
    with_sink = {0: to_lse(_with_sink(0)), **{i: FOREIGN[i] for i in range(1, 5)}}
    once = merge_lse_blocks(with_sink, replace(LSE, sink=SinkPlace.FIRST_PARTIAL), sink, DType.FLOAT32)
    after = merge_lse_blocks(FOREIGN, LSE, sink, DType.FLOAT32)
    one, two = (x.out.view(np.float32) for x in (once, after))
    assert np.allclose(one, two, rtol=0, atol=1e-6)
    assert not np.allclose(one, merge_lse_blocks(FOREIGN, LSE, None, DType.FLOAT32).out.view(np.float32))


def _with_sink(block: int) -> tka1.Partials:
    """A partial whose denominator counts the sink, as a kernel with the sink in its first block sends it."""
    part = PARTS[block]
    whole = tka1.merge({tka1.Run(0, block, 0): part}, inputs(CALL).sink, DType.FLOAT32)
    return of_lse(whole.out.view(np.float32), whole.lse_with_sink.view(np.float32))


@pytest.mark.parametrize(
    "change",
    [
        {"order": MergeOrder.ARRIVAL},
        {"accumulate": DType.BFLOAT16},
        {"downcast": Downcast.PER_BLOCK},
        {"sink": SinkPlace.EVERY_PARTIAL},
    ],
)
def test_a_reduction_outside_the_mandate_is_never_coerced(change):
    with pytest.raises(InvalidCall) as error:
        merge_lse_blocks(FOREIGN, replace(LSE, **change), None, DType.FLOAT32)
    assert error.value.rule == "P-REDUCTION"


def test_states_of_another_kind_and_nothing_at_all_are_refused():
    with pytest.raises(InvalidCall) as error:
        merge_lse_blocks(FOREIGN, replace(LSE, partial=PartialState.ACC_L_M), None, DType.FLOAT32)
    assert error.value.rule == "P-REDUCTION"
    with pytest.raises(InvalidCall) as error:
        merge_blocks({}, TKA1_REDUCTION, None, DType.FLOAT32)
    assert error.value.rule == "P-BLOCKS"
