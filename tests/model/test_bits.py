"""`Bits`: exact patterns, decoded and encoded without losing one."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tracekit.errors import InvalidCall
from tracekit.model import Bits, DType
from tracekit.recorder.tensors import as_bits

SMALL = [DType.FLOAT8_E4M3FN, DType.FLOAT8_E4M3FNUZ, DType.FLOAT8_E5M2]


def all_patterns(dtype: DType) -> Bits:
    container = dtype.container
    return Bits(np.arange(2 ** (8 * container.itemsize), dtype=np.uint32).astype(container), dtype)


@pytest.mark.parametrize("dtype", [DType.BFLOAT16, DType.FLOAT16])
def test_every_number_survives_decoding_and_encoding(dtype):
    bits = all_patterns(dtype)
    values = bits.to_float32()
    back = Bits.from_float32(values, dtype)

    numbers = ~np.isnan(values)
    assert np.array_equal(back.data[numbers], bits.data[numbers])


def test_bfloat16_rounds_to_nearest_even_like_the_definition():
    # halfway cases: 1 + 2^-8 is between 1 and 1 + 2^-7, and 1 has the even significand
    values = np.array([1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20, np.inf, -0.0, np.nan], np.float32)
    assert Bits.from_float32(values, DType.BFLOAT16).data.tolist() == [
        0x3F80, 0x3F82, 0x3F81, 0x7F80, 0x8000, 0x7FC0,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("dtype", "code", "value"),
    [
        (DType.FLOAT8_E4M3FN, 0x7E, 448.0),
        (DType.FLOAT8_E4M3FN, 0x01, 2.0**-9),
        (DType.FLOAT8_E4M3FN, 0x38, 1.0),
        (DType.FLOAT8_E4M3FNUZ, 0x7F, 240.0),
        (DType.FLOAT8_E4M3FNUZ, 0x38, 0.5),
        (DType.FLOAT8_E5M2, 0x7B, 57344.0),
        (DType.FLOAT8_E5M2, 0xFC, -np.inf),
    ],
)
def test_float8_values_follow_the_ocp_tables(dtype, code, value):
    assert Bits(np.array([code], np.uint8), dtype).to_float32()[0] == value


def test_float8_not_a_number_codes():
    assert np.isnan(Bits(np.array([0x7F, 0xFF], np.uint8), DType.FLOAT8_E4M3FN).to_float32()).all()
    nan = np.isnan(all_patterns(DType.FLOAT8_E4M3FNUZ).to_float32())
    assert nan.nonzero()[0].tolist() == [0x80]
    assert int(np.isnan(all_patterns(DType.FLOAT8_E5M2).to_float32()).sum()) == 6


@pytest.mark.parametrize("dtype", SMALL)
def test_float8_decoding_agrees_with_torch(dtype):
    torch = pytest.importorskip("torch")
    codes = np.arange(256, dtype=np.uint8)
    theirs = torch.from_numpy(codes).view(getattr(torch, dtype.value)).float().numpy()
    ours = Bits(codes, dtype).to_float32()
    number = ~np.isnan(ours)
    assert np.array_equal(number, ~np.isnan(theirs))
    assert np.array_equal(ours[number].view(np.uint32), theirs[number].view(np.uint32))


def test_float8_is_never_rounded_here():
    with pytest.raises(InvalidCall) as caught:
        Bits.from_float32(np.ones(2), DType.FLOAT8_E4M3FN)
    assert caught.value.rule == "M-BITS-ENCODE"


def test_floats_are_refused_as_bits():
    with pytest.raises(InvalidCall) as caught:
        Bits(np.ones(3, np.float32), DType.FLOAT32)
    assert caught.value.rule == "M-BITS-CONTAINER"


def test_the_two_zeros_differ_and_a_nan_equals_itself():
    zero = Bits(np.array([0x0000], np.uint16), DType.BFLOAT16)
    minus = Bits(np.array([0x8000], np.uint16), DType.BFLOAT16)
    nan = Bits(np.array([0x7FC1], np.uint16), DType.BFLOAT16)
    assert not zero.same(minus)
    assert nan.same(nan)
    assert not nan.same(Bits(np.array([0x7FC0], np.uint16), DType.BFLOAT16))


def test_bits_are_a_read_only_view_and_so_are_their_parts():
    source = np.zeros(3, np.uint16)
    bits = Bits(source, DType.BFLOAT16)
    for view in (bits, bits.part(slice(1))):
        assert np.shares_memory(view.data, source)
        with pytest.raises(ValueError, match="read-only"):
            view.data[0] = 1


@pytest.mark.parametrize("kind", [np.asarray, lambda array: Bits(array.view(np.uint32), DType.FLOAT32)])
def test_arrays_of_others_are_copied_where_they_come_in(kind):
    source = np.zeros(3, np.float32)
    bits = as_bits(kind(source), "q")
    source[:] = 7
    assert not bits.data.any()


@given(st.lists(st.integers(0, 2**32 - 1), max_size=20), st.randoms())
def test_take_moves_patterns_and_nothing_else(patterns, random):
    order = list(range(len(patterns)))
    random.shuffle(order)
    bits = Bits(np.array(patterns, np.uint32), DType.FLOAT32)
    assert bits.take(np.array(order, np.int64)).data.tolist() == [patterns[i] for i in order]
