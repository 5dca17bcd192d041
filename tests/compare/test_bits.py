"""Bytes against bytes."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tracekit.compare import Comparison, compare_bits, ulp
from tracekit.model import Bits, DType, RequestKey, Rows
from tracekit.testing.strategies import DTYPES, bits

REQUEST = RequestKey.of_prompt([1, 2, 3])


def rows_of(count: int, first: int = 0) -> Rows:
    positions = np.arange(first, first + count)
    return Rows((REQUEST,), np.zeros(count, np.int32), positions, np.full(count, -1))


def bf16(*values: float) -> Bits:
    return Bits.from_float32(np.array(values, np.float32), DType.BFLOAT16)


def out(*rows: list[float]) -> Bits:
    """One head a row."""
    return Bits.from_float32(np.array(rows, np.float32)[:, None, :], DType.BFLOAT16)


def test_the_first_place_is_named_with_both_patterns_and_values():
    expected, actual = out([1.0, 2.0], [1.0, 1.0]), out([1.0, 2.0], [1.0, 1.0078125])

    found = compare_bits({"out": (expected, actual)}, rows_of(2, first=5), layer=3)

    assert found.first is not None
    assert (found.first.request, found.first.position, found.first.layer) == (str(REQUEST), 6, 3)
    assert (found.first.head, found.first.element, found.first.tensor) == (0, 1, "out")
    assert (found.first.expected_bits, found.first.actual_bits) == ("0x3f80", "0x3f81")
    assert (found.first.expected, found.first.actual, found.first.ulps) == (1.0, 1.0078125, 1)
    assert (found.differences.elements, found.differences.rows, found.differences.max_ulps) == (1, 1, 1)
    assert found.differences.ulps == (("0", 3), ("1", 1))
    assert (found.compared.tensors, found.compared.elements, found.compared.rows) == (1, 4, 2)


def test_the_first_place_follows_the_rows_of_the_trace_not_of_the_answer():
    expected, actual = out([1.0], [2.0], [3.0]), out([1.5], [2.5], [3.5])

    found = compare_bits({"out": (expected, actual)}, rows_of(3), 0, np.array([2, 0, 1]))

    assert found.first is not None
    assert (found.first.position, found.first.expected) == (0, 2.0)


def test_an_earlier_row_of_the_lse_comes_before_a_later_row_of_o():
    lse = Bits(np.array([[7], [8]], np.uint32), DType.FLOAT32)
    other = Bits(np.array([[9], [8]], np.uint32), DType.FLOAT32)

    found = compare_bits({"out": (out([1.0], [1.0]), out([1.0], [2.0])), "lse": (lse, other)}, rows_of(2), 0)

    assert found.first is not None
    assert (found.first.tensor, found.first.position, found.first.element) == ("lse", 0, None)
    assert found.differences.rows == 2


def test_signs_of_zero_and_nan_payloads_are_differences_of_their_own():
    expected = Bits(np.array([[[0x0000, 0x7FC0, 0x7F80, 0x3F80]]], np.uint16), DType.BFLOAT16)
    actual = Bits(np.array([[[0x8000, 0x7FC1, 0x3F80, 0x3F80]]], np.uint16), DType.BFLOAT16)

    found = compare_bits({"out": (expected, actual)}, rows_of(1), 0)

    assert dict(found.differences.ulps) == {"0": 1, "sign of zero": 1, "inf": 1, "nan": 1}
    assert found.differences.max_ulps == 0


def test_ulps_cross_zero():
    steps, special = ulp.distances(bf16(-0.0), Bits(np.array([0x0001], np.uint16), DType.BFLOAT16))
    assert (steps.item(), special.item()) == (1, 0)


def test_the_nan_of_fnuz_is_no_negative_zero():
    left, right = (Bits(np.array([code], np.uint8), DType.FLOAT8_E4M3FNUZ) for code in (0x00, 0x80))
    assert ulp.distances(left, right)[1].item() == 3


def test_what_cannot_be_compared_is_refused():
    with pytest.raises(ValueError, match="cannot be compared"):
        compare_bits({"out": (out([1.0]), out([1.0, 2.0]))}, rows_of(1), 0)


def test_an_empty_comparison_compares_nothing():
    assert compare_bits({}, rows_of(1), 0).compared.elements == 0
    assert Comparison().compared.elements == 0


@given(st.data(), st.integers(1, 4), st.integers(1, 3), st.integers(1, 3))
def test_what_is_found_is_what_differs(data: st.DataObject, count: int, heads: int, width: int):
    left = data.draw(bits((count, heads, width)))
    right = data.draw(bits((count, heads, width), (left.dtype,)))

    found = compare_bits({"out": (left, right)}, rows_of(count), 0)

    different = left.data != right.data
    assert found.same == left.same(right)
    assert found.differences.elements == int(different.sum())
    assert found.differences.rows == int(different.any(axis=(1, 2)).sum())
    assert sum(number for _, number in found.differences.ulps) == left.size
    if found.first is not None:
        at = (found.first.position, found.first.head, found.first.element)
        assert at == tuple(int(i) for i in np.argwhere(different)[0])
        assert int(found.first.expected_bits, 16) == left.data[at]
        assert int(found.first.actual_bits, 16) == right.data[at]


@given(st.data(), st.sampled_from(DTYPES))
def test_neighbours_are_one_ulp_apart(data: st.DataObject, dtype: DType):
    largest = int(Bits.from_float32(np.array([np.inf], np.float32), dtype).data[0])
    code = data.draw(st.integers(0, largest - 2))
    left, right = (Bits(np.array([one], dtype.container), dtype) for one in (code, code + 1))

    steps, special = ulp.distances(left, right)

    assert (steps.item(), special.item()) == (1, 0)
    assert left.to_float32() < right.to_float32()


@given(st.data())
def test_comparisons_add_up(data: st.DataObject):
    left = data.draw(bits((4, 1, 2)))
    right = data.draw(bits((4, 1, 2), (left.dtype,)))
    rows = rows_of(4)
    whole = compare_bits({"out": (left, right)}, rows, 0)

    halves = Comparison()
    for part in (np.arange(2), np.arange(2, 4)):
        halves += compare_bits({"out": (left.take(part), right.take(part))}, rows, 0, part)

    assert halves.differences == whole.differences
    assert repr(halves.first) == repr(whole.first)  # a NaN is not equal to itself
    assert halves.compared.elements == whole.compared.elements
