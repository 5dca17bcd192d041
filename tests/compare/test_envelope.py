"""The envelope: sound kernels lie inside, errors of twice the bound lie outside, one ULP is shown."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.compare.kernels import attention
from tracekit.compare import Roundings, compare_envelope, diagnose, envelope
from tracekit.model import Bits, Conventions, DType, EmptyLse, KVFamily, LseBase, Ranges, Selection
from tracekit.providers.oracle import reference
from tracekit.testing import dense_call, sparse_call
from tracekit.testing.strategies import DTYPES, calls, scaled

NATURAL = Conventions(0x3F800000)


@settings(deadline=None, max_examples=60)
@given(
    calls(dtypes=DTYPES),
    st.sampled_from([0.1, 1.0, 4.0]),
    st.sampled_from([DType.FLOAT32, DType.BFLOAT16]),
    st.sampled_from([DType.FLOAT32, DType.BFLOAT16, DType.FLOAT16]),
    st.sampled_from([None, 1, 5]),
)
def test_sound_kernels_lie_inside(call, size, score, probability, tile):
    call = scaled(call, size)
    score = score if tile is None else DType.FLOAT32
    answer = attention(call, score=score, probability=probability, tile=tile)

    found = compare_envelope(call, envelope(call, Roundings(score, probability)), answer.out, answer.lse)

    assert found.outside.first is None, found.outside.first


@settings(deadline=None, max_examples=30)
@given(calls(dtypes=DTYPES), st.data())
def test_an_error_of_twice_the_bound_is_outside(call, data):
    bound = envelope(call, Roundings(probability=DType.BFLOAT16))
    where = tuple(data.draw(st.integers(0, n - 1)) for n in bound.out.shape)
    sign = data.draw(st.sampled_from([-1.0, 1.0]))
    planted = reference(call).out.astype(np.float32)
    planted[where] = bound.out[where] + sign * 2 * bound.out_radius[where]
    # Rounding to the dtype of O may bring the planted error nearer, so round away from the exact value.
    out = _away(Bits.from_float32(planted, call.dtype), bound.out, where, 2 * bound.out_radius[where], sign)

    found = compare_envelope(call, bound, out, None)

    assert found.outside.differences.elements == 1
    assert found.outside.first is not None
    assert found.outside.first.head == where[1]
    assert found.outside.first.element == where[2]


def _away(out, exact, where, error, sign):
    data = out.data.copy()
    while sign * (Bits(data, out.dtype).to_float64()[where] - exact[where]) < error:
        up = (sign > 0) == (Bits(data, out.dtype).to_float64()[where] >= 0)
        data[where] = data[where] + 1 if up else data[where] - 1
    return Bits(data, out.dtype)


@settings(deadline=None, max_examples=20)
@given(calls(), st.data())
def test_an_lse_error_of_twice_the_bound_is_outside(call, data):
    bound = envelope(call, Roundings())
    where = tuple(data.draw(st.integers(0, n - 1)) for n in bound.lse.shape)
    lse = bound.lse.copy()
    assume(bound.lse_radius[where] > 0)  # a row without keys has none
    lse[where] += 2.5 * bound.lse_radius[where]

    found = compare_envelope(call, bound, None, Bits.from_float32(lse.astype(np.float32), DType.FLOAT32))

    assert found.outside.differences.elements == 1


def test_each_rescaling_may_carry_an_exponential_of_its_own_error():
    """Scores that rise by little: every key is a new maximum, and each factor is 8 units too large."""
    call = scaled(dense_call(lengths=(400,), new=(1,), heads=2, seed=1), 0.001)
    bound = envelope(call, Roundings())
    keys = next(iter(call.kv.values()))[KVFamily.DENSE].keys.to_float64()  # [N, Hkv, D]
    x = np.sort(call.conventions.scale * np.einsum("hd,nhd->hn", call.q.to_float64()[0], keys), axis=1)
    rescaled = (1 + 8 * 2.0**-24) ** np.arange(400)[::-1]
    lse = np.log((np.exp(x) * rescaled).sum(axis=1))[None]

    found = compare_envelope(call, bound, None, Bits.from_float32(lse.astype(np.float32), DType.FLOAT32))

    assert found.outside.first is None


def _one_key_under_a_sink(sink):
    call = scaled(dense_call(lengths=(1,), sink=True, seed=1), 0.1)
    return replace(call, sink=Bits.from_float32(np.full(call.num_heads, sink, np.float32), DType.FLOAT32))


def test_an_lse_that_counts_a_large_sink_may_be_off_by_roundings_of_the_sink():
    call = _one_key_under_a_sink(80.0)
    counted = replace(NATURAL, sink_in_lse=True)
    data = Bits.from_float32(np.full((1, 4), 80.0, np.float32), DType.FLOAT32).data + 3  # 3 ULP

    found = compare_envelope(call, envelope(call, Roundings()), None, Bits(data, DType.FLOAT32), counted)

    assert found.inside.compared.elements == 4
    assert found.outside.first is None
    far = Bits(data + 20, DType.FLOAT32)
    assert compare_envelope(call, envelope(call, Roundings()), None, far, counted).outside.first is not None


def test_weights_that_underflow_below_the_sink_are_not_judged():
    """A kernel whose maximum counts the sink may lose every key: its LSE is -inf."""
    call = _one_key_under_a_sink(100.0)
    lse = Bits.from_float32(np.full((1, 4), -np.inf, np.float32), DType.FLOAT32)

    found = compare_envelope(call, envelope(call, Roundings()), None, lse)

    assert found.outside.first is None
    assert found.skipped == 1


def test_one_ulp_of_bf16_is_inside_and_shown():
    call = dense_call(lengths=(9,), seed=3)
    bound = envelope(call, Roundings(probability=DType.BFLOAT16))
    data = bound.rounded.data.copy()
    at = np.unravel_index(np.argmax(np.abs(bound.rounded.to_float32()[4:])), data[4:].shape)
    data[4:][at] += 1

    found = compare_envelope(call, bound, Bits(data, call.dtype), None)

    assert found.outside.first is None
    assert dict(found.inside.differences.ulps) == {"0": data.size - 1, "1": 1}
    assert found.inside.differences.max_ulps == 1


@settings(deadline=None, max_examples=20)
@given(calls(dtypes=DTYPES))
def test_the_envelope_is_centred_on_the_oracle(call):
    bound, exact = envelope(call, Roundings()), reference(call)

    assert np.abs(bound.out - exact.out).max() <= 1e-13 * max(1.0, exact.weight.max())
    assert (np.isneginf(bound.lse) == np.isneginf(exact.lse)).all()
    known = np.isfinite(exact.lse)
    assert np.abs(bound.lse - exact.lse)[known].max(initial=0) < 1e-12
    # The simple form of docs/verdicts.md: R is at least the rounding of P, and of its order.
    assert (bound.out_radius <= exact.weight + np.abs(exact.out) + 2.0**-20).all()


def test_a_row_without_keys_is_exactly_zero():
    call = dense_call(lengths=(4,))
    part = call.selection.families[KVFamily.DENSE]
    blind = replace(call, selection=Selection({KVFamily.DENSE: Ranges(part.lo, np.array([0, 2, 3, 4]))}))
    bound = envelope(blind, Roundings())
    answer = attention(blind)

    assert compare_envelope(blind, bound, answer.out, answer.lse).outside.first is None
    data = answer.out.data.copy()
    data[0, 1, 2] = 1  # the smallest subnormal
    wrong = compare_envelope(blind, bound, Bits(data, call.dtype), None).outside
    assert wrong.first is not None
    assert (wrong.first.position, wrong.first.head, wrong.first.element) == (0, 1, 2)


def test_nan_is_never_inside():
    call = dense_call(lengths=(3,))
    answer = attention(call)
    data = answer.out.data.copy()
    data[2, 0, 0] = 0x7FC0

    found = compare_envelope(call, envelope(call, Roundings()), Bits(data, call.dtype), None)

    assert found.outside.differences.elements == 1
    assert dict(found.outside.differences.ulps) == {"nan": 1}


def test_rows_with_infinite_inputs_are_not_judged():
    call = dense_call(lengths=(3,), heads=2, kv_heads=2)
    data = call.q.data.copy()
    data[1, 0, 0] = 0x7F80
    wild = replace(call, q=Bits(data, call.dtype))

    bound = envelope(wild, Roundings())

    assert not bound.usable[1, 0]
    assert bound.usable[[0, 1, 2], [0, 1, 1]].all()
    found = compare_envelope(wild, bound, attention(call).out, None)
    assert found.skipped == 1
    assert found.inside.compared.elements == call.num_rows * 2 * call.value_dim - call.value_dim


def test_scores_too_large_for_their_dtype_have_no_bound():
    call = scaled(dense_call(lengths=(6,)), 200.0)
    assert not envelope(call, Roundings(DType.BFLOAT16, DType.BFLOAT16)).usable.all()
    assert envelope(call, Roundings()).usable.all()


class TestDiagnosis:
    call = sparse_call(lengths=(20,), seed=2)
    bound = envelope(call, Roundings())
    lse = reference(call).lse
    with_sink = reference(call).lse_with_sink

    def named(self, lse, out=None, declared=NATURAL):
        bits = Bits.from_float32(lse.astype(np.float32), DType.FLOAT32)
        return diagnose(self.bound, out, bits, declared)

    def test_as_declared(self):
        assert self.named(self.lse) is None

    def test_base_two(self):
        assert self.named(self.lse / np.log(2)) == "the LSE fits base 2 (×1/ln 2), the sink not counted"

    def test_natural_where_base_two_is_declared(self):
        declared = replace(NATURAL, lse_base=LseBase.TWO)
        assert self.named(self.lse, declared=declared) == "the LSE fits base e (×ln 2), the sink not counted"

    def test_sink_counted(self):
        assert self.named(self.with_sink) == "the LSE fits the sink counted"

    def test_sink_counted_twice(self):
        twice = np.logaddexp(self.with_sink, self.call.sink.to_float64()[None])
        assert self.named(twice) == "the LSE fits the sink counted twice"

    def test_noise_has_no_name(self):
        noise = self.lse + np.random.default_rng(0).standard_normal(self.lse.shape)
        assert self.named(noise) is None

    @pytest.mark.parametrize(
        ("shift", "name"),
        [
            (-np.inf, "O fits no sink in the denominator"),
            (np.log(2.0), "O fits the sink twice in the denominator"),
        ],
    )
    def test_sink_in_o(self, shift, name):
        sink = Bits.from_float32((self.call.sink.to_float32() + np.float32(shift)), DType.FLOAT32)
        out = attention(replace(self.call, sink=sink)).out
        assert diagnose(self.bound, out, None, NATURAL) == name

    def test_value_of_rows_without_keys(self):
        call = dense_call(lengths=(4,))
        part = call.selection.families[KVFamily.DENSE]
        blind = replace(call, selection=Selection({KVFamily.DENSE: Ranges(part.lo, np.array([0, 2, 3, 4]))}))
        bound = envelope(blind, Roundings())
        lse = np.where(np.isneginf(bound.lse), np.inf, bound.lse).astype(np.float32)
        bits = Bits.from_float32(lse, DType.FLOAT32)
        assert diagnose(bound, None, bits, NATURAL) == "the LSE fits +inf for rows without keys"
        declared = replace(NATURAL, empty_lse=EmptyLse.POSITIVE_INFINITY)
        assert diagnose(bound, None, bits, declared) is None
