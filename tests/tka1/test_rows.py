"""S6 to S10: leaves, the tree, families, sinks, rows without keys, NaN and infinities."""

from dataclasses import replace

import numpy as np
import pytest

from tests.tka1.cases import (
    INF,
    NAN_WITH_PAYLOAD,
    NEG_INF,
    bf16,
    difference,
    f32,
    gqa,
    lists,
    scattered,
    shared,
)
from tracekit.providers.tka1 import FamilyInput, Form, Inputs, Ranges, attention, partials

FORMS: tuple[Form, ...] = ("auto", "numpy")
NAN, BF16_NAN = 0x7FC00000, 0x7FC0
EMPTY = -(2**30)

pytestmark = pytest.mark.parametrize("form", FORMS)


def moved(inputs: Inputs, by: int) -> Inputs:
    """The same rows under row ids that are larger by a constant."""
    family = inputs.families[0]
    selection = family.selection
    if isinstance(selection, Ranges):
        selection = Ranges(selection.lo + by, selection.hi + by)
    else:
        selection = replace(selection, ids=selection.ids + by)
    first = tuple(x + by for x in family.first)
    return replace(inputs, families=(replace(family, first=first, selection=selection),))


def test_a_leaf_is_128_row_ids(form: Form):
    """S6, S8. Whole aligned subtrees may move; half a leaf may not, and that it shows is the control."""
    inputs = gqa(np.random.default_rng(0), length=500)
    stays = partials(inputs, form=form)

    assert difference(partials(moved(inputs, 128 * 4), form=form), stays) == ""
    assert difference(partials(moved(inputs, 128 * 2**20), form=form), stays) == ""
    assert difference(partials(moved(inputs, 64), form=form), stays) != ""
    assert difference(partials(moved(inputs, 128), form=form), stays) != ""  # another alignment in the tree


def test_leaves_without_keys_pass_the_other_side_through(form: Form):
    """S7, S8: three leaves far apart meet in the order of the tree, not of their distance."""
    rng = np.random.default_rng(1)
    near = gqa(rng, rows=1, length=500, selection=lists([np.array([5, 7, 133, 260, 261])]))
    family = near.families[0]
    far_ids = np.array([5, 7, 133, 260, 261]) + np.array([0, 0, 0, 1, 1]) * 128 * (2**10 - 2)
    length = int(far_ids.max()) + 1
    k, v = (np.zeros((length, *x[0].shape[1:]), np.uint16) for x in (family.keys, family.values))
    k[far_ids], v[far_ids] = family.keys[0][[5, 7, 133, 260, 261]], family.values[0][[5, 7, 133, 260, 261]]
    far = replace(near, families=(FamilyInput((k,), (v,), (0,), lists([far_ids])),))

    assert difference(partials(far, form=form), partials(near, form=form)) == ""


def test_the_families_meet_after_their_own_trees(form: Form):
    """S9: one family of two halves is not two families of a half each, except in value."""
    inputs = replace(gqa(np.random.default_rng(2), rows=4, length=400), sink=None)
    family = inputs.families[0]
    lo, hi = np.zeros(4, np.int64), np.full(4, 400)
    one = replace(inputs, families=(replace(family, selection=Ranges(lo, hi)),))
    halves = tuple(replace(family, selection=Ranges(a, b)) for a, b in ((lo, lo + 200), (lo + 200, hi)))
    two = replace(inputs, families=halves)

    assert difference(partials(two, form=form), partials(one, form=form)) != ""
    got, want = (attention(x, form=form).lse.view(np.float32) for x in (two, one))
    assert np.abs(got - want).max() < 2e-6


def test_a_family_without_keys_changes_nothing(form: Form):
    """S7, S9: the empty partial is an exact identity, on the left and on the right."""
    inputs = gqa(np.random.default_rng(3), rows=5)
    family, zero = inputs.families[0], np.zeros(5, np.int64)
    empty = replace(family, selection=Ranges(zero, zero))
    want = partials(inputs, form=form)

    for families in ((family, empty), (empty, family)):
        assert difference(partials(replace(inputs, families=families), form=form), want) == ""


def test_a_row_without_keys(form: Form):
    """S6.4, S10.3: the empty partial; O is +0, LSE is -inf, with the sink it is the sink's own bits."""
    zero = np.zeros(2, np.int64)
    inputs = gqa(np.random.default_rng(4), rows=2, heads=3, selection=Ranges(zero, zero))
    sink = np.array([*f32(3.25, -0.0), NEG_INF], np.uint32)
    got, part = attention(replace(inputs, sink=sink), form=form), partials(inputs, form=form)

    assert (got.out == 0).all()
    assert (got.lse == NEG_INF).all()
    assert (got.lse_with_sink == sink).all()
    assert (attention(replace(inputs, sink=None), form=form).lse_with_sink == NEG_INF).all()
    assert (part.acc == 0x80000000).all()
    assert (part.l == 0).all()
    assert (part.m == EMPTY).all()


def test_every_key_at_minus_infinity_is_a_row_without_keys(form: Form):
    """S5, S6.4: whatever the values are."""
    inputs = gqa(np.random.default_rng(5), rows=3, heads=2, kv_heads=1, dims=(1, 4))
    family = inputs.families[0]
    keys = np.full_like(family.keys[0], 0xFF80)
    values = np.full_like(family.values[0], 0x7F80)
    inputs = replace(inputs, q=np.full_like(inputs.q, 0x3F80), sink=None)
    got = attention(replace(inputs, families=(replace(family, keys=(keys,), values=(values,)),)), form=form)

    assert (got.out == 0).all()
    assert (got.lse == NEG_INF).all()


@pytest.mark.parametrize("key", [0x7F80, 0x7FC1])
def test_a_score_of_infinity_or_nan_poisons_the_row(form: Form, key: int):
    """S5, S10.1, S13, S14: everything is the one NaN; rows that do not see the key keep their bits."""
    inputs = gqa(np.random.default_rng(6), rows=2, heads=1, kv_heads=1, dims=(1, 4), length=400)
    inputs = replace(inputs, q=np.full_like(inputs.q, 0x3F80))
    family = inputs.families[0]
    lo, hi = np.array([0, 0], np.int64), np.array([400, 150], np.int64)
    clean = replace(inputs, families=(replace(family, selection=Ranges(lo, hi)),))
    keys = family.keys[0].copy()
    keys[200] = key
    bad = replace(clean, families=(replace(clean.families[0], keys=(keys,)),))

    got, want, part = attention(bad, form=form), attention(clean, form=form), partials(bad, form=form)
    assert (got.out[0] == BF16_NAN).all()
    assert got.lse[0] == got.lse_with_sink[0] == NAN
    assert (got.out[1] == want.out[1]).all()
    assert (got.lse[1] == want.lse[1]).all()
    assert (part.acc[0] == NAN).all()
    assert part.l[0] == NAN
    assert part.m[0] != EMPTY


def test_a_weight_of_zero_still_multiplies(form: Form):
    """S6.3: 0 * inf is NaN, so an infinite value behind a score of -inf shows in its column and no other."""
    inputs = gqa(np.random.default_rng(7), rows=1, heads=1, kv_heads=1, dims=(1, 3))
    inputs = replace(inputs, q=np.full_like(inputs.q, 0x3F80))
    family = inputs.families[0]
    keys, values = family.keys[0].copy(), family.values[0].copy()
    keys[9], values[9, 0, 1] = 0xFF80, 0x7F80
    got = attention(replace(inputs, families=(replace(family, keys=(keys,), values=(values,)),)), form=form)

    assert (got.out[0, 0] == BF16_NAN).tolist() == [False, True, False]
    assert np.isfinite(got.lse.view(np.float32)).all()


def test_special_sinks(form: Form):
    """S10: +inf takes everything, -inf nothing, NaN poisons; a finite one moves only the denominator."""
    inputs = gqa(np.random.default_rng(8), rows=4, heads=6, kv_heads=2)
    plain = attention(replace(inputs, sink=None), form=form)
    sink = np.array([INF, NEG_INF, NAN_WITH_PAYLOAD, *f32(0.5, 1e30, -1e30)], np.uint32)
    got = attention(replace(inputs, sink=sink), form=form)

    assert (got.lse[:, [0, 1, 3, 4, 5]] == plain.lse[:, [0, 1, 3, 4, 5]]).all()
    assert (got.out[:, 0] == 0).all()
    assert (got.lse_with_sink[:, 0] == INF).all()
    for ignored in (1, 5):
        assert (got.out[:, ignored] == plain.out[:, ignored]).all()
        assert (got.lse_with_sink[:, ignored] == plain.lse[:, ignored]).all()
    assert (got.out[:, 2] == BF16_NAN).all()
    assert (got.lse[:, 2] == NAN).all()
    assert (got.lse_with_sink[:, 2] == NAN).all()
    assert (got.lse_with_sink.view(np.float32)[:, 3] > got.lse.view(np.float32)[:, 3]).all()
    assert ((got.out[:, 4] & 0x7FFF) == 0).all()


def test_infinity_takes_precedence_over_missing_keys(form: Form):
    """S10.2 before S10.3: without keys a sink of +inf still gives LSE -inf and LSE with sink +inf."""
    zero = np.zeros(1, np.int64)
    inputs = gqa(np.random.default_rng(9), rows=1, heads=3, selection=Ranges(zero, zero))
    got = attention(replace(inputs, sink=np.full(3, INF, np.uint32)), form=form)
    assert (got.lse == NEG_INF).all()
    assert (got.lse_with_sink == INF).all()


def test_the_partials_do_not_know_the_sink(form: Form):
    """S10: the sink comes last."""
    inputs = shared(np.random.default_rng(10))
    assert difference(partials(replace(inputs, sink=None), form=form), partials(inputs, form=form)) == ""


def test_a_padded_list_is_its_row_alone(form: Form):
    """S3, S15: what other rows of the launch list changes nothing."""
    inputs = scattered(np.random.default_rng(11))
    whole = attention(inputs, form=form)
    for row in range(6):
        alone = attention(inputs.take([row]), form=form)
        np.testing.assert_array_equal(alone.out[0], whole.out[row])


def test_the_scale_is_bits(form: Form):
    """S2, S4: a scale one ulp apart is another launch."""
    inputs = gqa(np.random.default_rng(12))
    other = replace(inputs, scale_bits=inputs.scale_bits + 1)
    assert difference(partials(other, form=form), partials(inputs, form=form)) != ""


def test_a_huge_score_keeps_its_exponent(form: Form):
    """S5, S6: logits near 2^20 neither overflow nor lose their order."""
    rng = np.random.default_rng(13)
    inputs = gqa(rng, rows=2, heads=2, kv_heads=1, dims=(8, 4))
    q = bf16(rng, inputs.q.shape, 2.0**9)
    keys = bf16(rng, inputs.families[0].keys[0].shape, 2.0**9)
    inputs = replace(inputs, q=q, families=(replace(inputs.families[0], keys=(keys,)),), sink=None)
    lse = attention(inputs, form=form).lse.view(np.float32)
    assert np.isfinite(lse).all()
    assert (lse > 2**15).all()
