"""FP8 rows: where the value is exact, what is refused, and that the two tiers stay apart."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.canonical.layouts import refused
from tracekit.canonical.fp8 import ScaleFormat, Stored, ValueRule, decode, encode, narrow
from tracekit.canonical.fp8_ds_mla import LatentPages, LatentStorage, from_keys
from tracekit.canonical.fp8_mla_rows import ROW_BYTES, ScaledLatents, read_rows, write_rows
from tracekit.canonical.paged import page_slots
from tracekit.model import Bits, DType

E4M3 = [DType.FLOAT8_E4M3FN, DType.FLOAT8_E4M3FNUZ]
NAN_CODES = {DType.FLOAT8_E4M3FN: [0x7F, 0xFF], DType.FLOAT8_E4M3FNUZ: [0x80]}
INNER = {DType.FLOAT8_E4M3FN: 3, DType.FLOAT8_E4M3FNUZ: 4}
CODES = np.arange(256, dtype=np.uint8)


def stored(codes, scale, dtype=DType.FLOAT8_E4M3FN, group=None):
    """Codes under one UE8M0 scale a group."""
    return Stored(Bits(codes, dtype), np.asarray(scale, np.uint8), ScaleFormat.UE8M0, group)


def float32_scaled(codes, scale, **generations):
    bits = np.asarray(scale, np.float32).view(np.uint32)
    return Stored(Bits(codes, DType.FLOAT8_E4M3FN), bits, ScaleFormat.FLOAT32, **generations)


def e4m3(code: int, dtype: DType) -> Fraction:
    """OCP 8-bit floating point, section 5.3, in whole numbers; fnuz has a bias of 8."""
    bias = 7 if dtype is DType.FLOAT8_E4M3FN else 8
    exponent, mantissa = code >> 3 & 15, code & 7
    whole = mantissa + 8 if exponent else mantissa
    return (-1 if code >> 7 else 1) * whole * Fraction(2) ** (max(exponent, 1) - bias - 3)


def bfloat16(code: int) -> Fraction:
    exponent, mantissa = code >> 7 & 255, code & 127
    whole = mantissa + 128 if exponent else mantissa
    return (-1 if code >> 15 else 1) * whole * Fraction(2) ** (max(exponent, 1) - 127 - 7)


@pytest.mark.parametrize("dtype", E4M3)
def test_every_code_under_every_inner_scale_is_exact_in_bf16(dtype):
    """All 256 codes times all 244 inner scales, against fractions: the proof of fp8.py, by exhaustion."""
    scales = np.arange(244, dtype=np.uint8) + np.uint8(INNER[dtype])
    values = decode(stored(np.broadcast_to(CODES, (244, 256)), scales[:, None], dtype))

    assert values.rule is ValueRule.EXACT
    assert values.bits.dtype is DType.BFLOAT16
    numbers = [c for c in range(256) if c not in NAN_CODES[dtype]]
    table = {code: e4m3(code, dtype) for code in numbers}
    for row, scale in enumerate(scales.tolist()):
        for code in numbers:
            found = int(values.bits.data[row, code])
            assert bfloat16(found) == table[code] * Fraction(2) ** (scale - 127)
            assert found >> 15 == code >> 7
    assert (values.bits.data[:, NAN_CODES[dtype]] & 0x7FFF == 0x7FC0).all()


@pytest.mark.parametrize("dtype", E4M3)
@pytest.mark.parametrize("scale", [0, 2, 3, 246, 247, 248, 254])
def test_at_the_ends_of_the_range_the_inexact_codes_are_refused_and_no_others(scale, dtype):
    largest = bfloat16(0x7F7F)
    refusals = 0
    for code in set(range(256)) - set(NAN_CODES[dtype]):
        exact = e4m3(code, dtype) * Fraction(2) ** (scale - 127)
        fits = abs(exact) <= largest and (exact * 2**133).denominator == 1
        answer = refused(lambda code=code: decode(stored(np.array([code], np.uint8), scale, dtype)))
        assert answer == ("not refused" if fits else "C-FP8-RANGE")
        refusals += not fits
    assert (refusals == 0) is (INNER[dtype] <= scale < INNER[dtype] + 244)


@settings(deadline=None)
@given(st.integers(4, 246), st.sampled_from(E4M3), st.binary(min_size=1, max_size=20))
def test_values_come_back_to_their_codes_under_their_scale(scale, dtype, data):
    codes = np.array([c for c in data if c not in NAN_CODES[dtype]], np.uint8)
    values = decode(stored(codes, scale, dtype)).bits
    assert np.array_equal(encode(values, np.asarray(scale, np.uint8), dtype).codes.data, codes)


def test_no_codes_under_one_scale_are_no_values():
    """A request may have no row in a launch, and a per-tensor scale all the same."""
    nothing = stored(np.zeros(0, np.uint8), 127)
    assert decode(nothing).bits.shape == (0,)
    assert encode(decode(nothing).bits, nothing.scales, nothing.codes.dtype).codes.shape == (0,)


def test_equal_values_do_not_prove_equal_storage():
    """2 × 1 and 1 × 2: one value, two storages."""
    one, two = stored(np.array([0x40], np.uint8), 127), stored(np.array([0x38], np.uint8), 128)
    assert decode(one).bits.same(decode(two).bits)
    assert not np.array_equal(one.codes.data, two.codes.data)


def test_one_byte_is_another_number_in_each_format():
    """gfx942 may hold one cache in fnuz and another in the OCP format (vLLM `cache_utils.py`)."""
    ocp, fnuz = (
        decode(stored(np.array([0x48], np.uint8), 127, dtype)).bits.to_float32()[0] for dtype in E4M3
    )
    assert (ocp, fnuz) == (4.0, 2.0)


@settings(deadline=None)
@given(st.floats(2.0**-140, 2.0**120, width=32), st.binary(min_size=1, max_size=30))
def test_float32_scales_round_once_to_nearest_even(scale, data):
    codes = np.frombuffer(data, np.uint8).copy()
    codes[np.isin(codes, [0x7F, 0xFF])] = 0
    values = decode(float32_scaled(codes, scale))

    assert values.rule is ValueRule.NEAREST_FLOAT32
    for code, found in zip(codes.tolist(), values.bits.data.tolist(), strict=True):
        exact = e4m3(code, DType.FLOAT8_E4M3FN) * Fraction(scale)
        if abs(exact) >= 2**128:
            continue
        magnitude = found & 0x7FFFFFFF
        near = [
            abs(float32_fraction(m) - abs(exact)) for m in (max(magnitude - 1, 0), magnitude, magnitude + 1)
        ]
        assert near[1] == min(near)
        assert near[1] < near[2] or magnitude % 2 == 0
        assert magnitude == 0 or near[1] < near[0] or magnitude % 2 == 0


def float32_fraction(code: int) -> Fraction:
    exponent, mantissa = code >> 23, code & 0x7FFFFF
    whole = mantissa + 2**23 if exponent else mantissa
    return whole * Fraction(2) ** (max(exponent, 1) - 150)


def test_a_rounded_value_is_not_narrowed_and_an_exact_one_is():
    assert refused(lambda: narrow(decode(float32_scaled(CODES[:4], 0.03)), DType.BFLOAT16)) == "C-FP8-INEXACT"
    narrowed = narrow(decode(float32_scaled(CODES[:127], 0.5)), DType.BFLOAT16)
    assert narrowed.bits.same(decode(stored(CODES[:127], 126)).bits)
    assert narrowed.rule is ValueRule.NEAREST_FLOAT32


@pytest.mark.parametrize("scale", [0.0, -1.0, np.inf, np.nan])
def test_a_scale_that_was_reset_is_refused(scale):
    """vLLM#28783, SGLang#27131 and kin: after a wake-up or a weight sync the KV scale is 0."""
    assert refused(lambda: float32_scaled(CODES[:4], scale)) == "C-FP8-SCALE"


def test_a_scale_reset_to_one_gives_other_values_from_the_same_bytes():
    """vLLM#45617: rows written at .03 and read at 1.0 keep their codes, and are other rows."""
    written, reset = (decode(float32_scaled(CODES[1:100], scale)).bits for scale in (0.03, 1.0))
    assert not written.same(reset)


def test_scales_of_another_write_are_refused():
    assert refused(lambda: float32_scaled(CODES, 0.5, generation=3, scale_generation=4)) == "C-FP8-STALE"


@pytest.mark.parametrize(
    ("code", "call"),
    [
        ("C-FP8-SCALE", lambda: stored(CODES, 255)),
        (
            "C-FP8-SHAPE",
            lambda: Stored(Bits(CODES.astype(np.uint16), DType.BFLOAT16), CODES, ScaleFormat.UE8M0),
        ),
        ("C-FP8-SHAPE", lambda: Stored(Bits(CODES, E4M3[0]), CODES[:1], ScaleFormat.FLOAT32)),
        ("C-FP8-SHAPE", lambda: stored(CODES, [127, 127], group=64)),
        ("C-FP8-SHAPE", lambda: stored(CODES, [127], group=65)),
        ("C-FP8-SHAPE", lambda: stored(CODES, [[127]] * 2)),
        (
            "C-FP8-ENCODE",
            lambda: encode(Bits(np.array([0x3F81], np.uint16), DType.BFLOAT16), CODES[127], E4M3[0]),
        ),
        (
            "C-FP8-ENCODE",
            lambda: encode(Bits(np.array([0x7FC0], np.uint16), DType.BFLOAT16), CODES[127], E4M3[0]),
        ),
        (
            "C-FP8-ENCODE",
            lambda: encode(Bits(np.array([0x8000], np.uint16), DType.BFLOAT16), CODES[127], E4M3[1]),
        ),
        ("C-LAYOUT", lambda: LatentPages(64, DType.BFLOAT16)),
        ("C-PAGE-SHAPE", lambda: PAGES.read(np.zeros((2, PAGES.used_bytes - 1), np.uint8), [0])),
        ("C-PAGE-SHAPE", lambda: PAGES.read(np.zeros((2, 2 * PAGES.page_bytes), np.uint8)[:, ::2], [0])),
        ("C-PAGE-OUTSIDE", lambda: PAGES.read(PAGES.empty(2), [6])),
        ("C-PAGE-OUTSIDE", lambda: PAGES.read(PAGES.empty(2), [-1])),
        ("C-PAGE-TWICE", lambda: PAGES.write(PAGES.empty(2), [1, 1], rows(2, E4M3[0]))),
        ("C-ROW-SHAPE", lambda: PAGES.write(PAGES.empty(2), [1], rows(2, E4M3[0]))),
        ("C-ROW-SHAPE", lambda: PAGES.write(PAGES.empty(2), [1, 2], rows(2, E4M3[1]))),
        ("C-FP8-SHAPE", lambda: LatentStorage(rows(2, E4M3[0]).nope, rows(3, E4M3[0]).rope)),
        (
            "C-FP8-SHAPE",
            lambda: from_keys(Bits(np.zeros((1, 512), np.uint16), DType.BFLOAT16), CODES[:7], E4M3[0]),
        ),
    ],
)
def test_storage_that_cannot_be_right_is_refused(code, call):
    assert refused(call) == code


PAGES = LatentPages(3, DType.FLOAT8_E4M3FN)


def rows(count: int, dtype: DType, seed: int = 0) -> LatentStorage:
    numbers = np.random.default_rng(seed)
    codes = numbers.integers(0, 127, (count, 448), np.uint8) | (
        numbers.integers(0, 2, (count, 448), np.uint8) << 7
    )
    codes[np.isin(codes, NAN_CODES[dtype])] = 1
    scales = numbers.integers(100, 140, (count, 7), np.uint8)
    rope = numbers.integers(0, 2**16, (count, 64), np.uint16)
    return LatentStorage(
        Stored(Bits(codes, dtype), scales, ScaleFormat.UE8M0, 64), Bits(rope, DType.BFLOAT16)
    )


def test_a_page_of_64_rows_has_the_published_size():
    pages = LatentPages(64, DType.FLOAT8_E4M3FN)
    assert (pages.used_bytes, pages.page_bytes) == (37_376, 37_440)


@settings(deadline=None)
@given(st.integers(1, 5), st.integers(0, 9), st.sampled_from(E4M3), st.integers(0, 2**32 - 1))
def test_latent_rows_go_through_a_page_and_come_back(page_size, count, dtype, seed):
    pages, given_rows = LatentPages(page_size, dtype), rows(count, dtype, seed)
    order = np.random.default_rng(seed).permutation(10)[: -(-count // page_size)]
    slots = page_slots(order, range(count), page_size, pages=10)
    cache = pages.empty(10, fill=0xFF)

    pages.write(cache, slots, given_rows)
    got = pages.read(cache, slots)

    assert got.nope.codes.same(given_rows.nope.codes)
    assert np.array_equal(got.nope.scales, given_rows.nope.scales)
    assert got.rope.same(given_rows.rope)
    again = from_keys(got.keys(), got.nope.scales, dtype)
    assert again.nope.codes.same(got.nope.codes)
    assert again.rope.same(got.rope)
    untouched = (cache == 0xFF).sum() - sum((x == 0xFF).sum() for x in (got.nope.codes.data, got.nope.scales))
    assert untouched >= cache.size - count * 583


def test_a_latent_row_lies_where_a_kernel_looks_for_it():
    """By byte arithmetic: data of row r at r * 576, its scales at B * 576 + r * 8."""
    cache = PAGES.empty(2)
    given_rows = rows(1, DType.FLOAT8_E4M3FN)
    PAGES.write(cache, [4], given_rows)  # page 1, row 1

    page = cache[1].tobytes()
    assert page[576 : 576 + 448] == given_rows.nope.codes.data.tobytes()
    assert page[576 + 448 : 2 * 576] == given_rows.rope.data.astype("<u2").tobytes()
    assert page[3 * 576 + 8 : 3 * 576 + 15] == given_rows.nope.scales.tobytes()
    assert not cache[0].any()


def scaled_rows(count: int, seed: int = 0) -> ScaledLatents:
    numbers = np.random.default_rng(seed)
    codes = Bits(numbers.integers(0, 127, (count, 512), np.uint8), DType.FLOAT8_E4M3FN)
    scales = numbers.uniform(1e-4, 1.0, (count, 4)).astype(np.float32).view(np.uint32)
    rope = Bits(numbers.integers(0, 2**16, (count, 64), np.uint16), DType.BFLOAT16)
    return ScaledLatents(Stored(codes, scales, ScaleFormat.FLOAT32, 128), rope)


@settings(deadline=None)
@given(st.integers(1, 4), st.integers(0, 8), st.integers(0, 2**32 - 1))
def test_scaled_latent_rows_go_through_a_cache_and_come_back(page_size, count, seed):
    given_rows = scaled_rows(count, seed)
    table = np.random.default_rng(seed).permutation(9)[: -(-count // page_size)]
    slots = page_slots(table, range(count), page_size, pages=9)
    cache = np.full((9, page_size, ROW_BYTES), 0xA5, np.uint8)

    write_rows(cache, slots, given_rows)
    got = read_rows(cache.reshape(-1, ROW_BYTES), slots, DType.FLOAT8_E4M3FN)

    assert got.nope.codes.same(given_rows.nope.codes)
    assert np.array_equal(got.nope.scales, given_rows.nope.scales)
    assert got.rope.same(given_rows.rope)
    dead = np.ones(9 * page_size, np.bool_)
    dead[slots] = False
    assert (cache.reshape(-1, ROW_BYTES)[dead] == 0xA5).all()


def test_a_scaled_latent_row_is_656_bytes_in_its_published_order():
    given_rows = scaled_rows(1)
    cache = np.zeros((1, 656), np.uint8)
    write_rows(cache, [0], given_rows)
    raw = cache.tobytes()
    assert raw[:512] == given_rows.nope.codes.data.tobytes()
    assert raw[512:528] == given_rows.nope.scales.astype("<u4").tobytes()
    assert raw[528:] == given_rows.rope.data.astype("<u2").tobytes()


def test_the_value_of_a_scaled_row_is_float32_and_says_that_it_is_rounded():
    given_rows = scaled_rows(2)
    values = given_rows.keys()
    single = given_rows.nope.codes.to_float32() * given_rows.nope.scales.view(np.float32).repeat(128, axis=1)
    assert values.rule is ValueRule.NEAREST_FLOAT32
    assert np.array_equal(values.bits.data[:, 0, :512], single.view(np.uint32))
    assert np.array_equal(values.bits.data[:, 0, 512:] >> 16, given_rows.rope.data)


@pytest.mark.parametrize(
    ("code", "call"),
    [
        ("C-PAGE-SHAPE", lambda: read_rows(np.zeros((2, 584), np.uint8), [0], E4M3[0])),
        ("C-PAGE-OUTSIDE", lambda: read_rows(np.zeros((2, 656), np.uint8), [2], E4M3[0])),
        ("C-FP8-SCALE", lambda: read_rows(np.zeros((2, 656), np.uint8), [0], E4M3[0])),
        ("C-ROW-SHAPE", lambda: write_rows(np.zeros((2, 656), np.uint8), [0], scaled_rows(2))),
        ("C-PAGE-TWICE", lambda: write_rows(np.zeros((2, 656), np.uint8), [0, 0], scaled_rows(2))),
        ("C-FP8-SHAPE", lambda: ScaledLatents(scaled_rows(2).nope, scaled_rows(1).rope)),
        ("C-FP8-SHAPE", lambda: ScaledLatents(rows(2, E4M3[0]).nope, scaled_rows(2).rope)),
    ],
)
def test_scaled_rows_that_cannot_be_right_are_refused(code, call):
    assert refused(call) == code
