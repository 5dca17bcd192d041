"""Pages of index keys: codes first, then one binary32 scale a row."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tracekit.canonical import fp8
from tracekit.canonical.fp8_index_pages import page_bytes, read_keys, write_keys
from tracekit.errors import InvalidCall
from tracekit.model import Bits, DType

FP8 = DType.FLOAT8_E4M3FN
DIM = 8


def rows(count, seed):
    """Values of random finite codes under random power-of-two scales."""
    random = np.random.default_rng(seed)
    codes = random.integers(0, 0x7F, (count, DIM)).astype(np.uint8)
    codes |= random.integers(0, 2, codes.shape).astype(np.uint8) << 7
    scales = random.integers(100, 150, count).astype(np.uint8)
    stored = fp8.Stored(Bits(codes, FP8), scales[:, None], fp8.ScaleFormat.UE8M0, DIM)
    return codes, scales, fp8.decode(stored).bits


@given(st.integers(1, 5), st.integers(1, 4), st.integers(0, 1000))
def test_what_is_written_is_read_back_wherever_it_lies(page_size, pages, seed):
    slots = np.random.default_rng(seed).permutation(page_size * pages)[: page_size * pages // 2 + 1]
    _, scales, keys = rows(slots.size, seed)
    cache = np.full((pages, page_bytes(page_size, DIM)), 0x7F, np.uint8)
    write_keys(cache, slots, page_size, keys, scales, FP8)
    assert read_keys(cache, slots, page_size, DIM, FP8).same(keys)
    order = np.random.default_rng(seed + 1).permutation(slots.size)
    assert read_keys(cache, slots[order], page_size, DIM, FP8).same(keys.take(order))


def test_the_bytes_are_codes_and_then_scales():
    codes, scales, keys = rows(2, 3)
    cache = np.zeros((1, page_bytes(2, DIM)), np.uint8)
    write_keys(cache, [0, 1], 2, keys, scales, FP8)
    assert np.array_equal(cache[0, : 2 * DIM].reshape(2, DIM), codes)
    assert cache[0, 2 * DIM :].tobytes() == np.exp2(scales.astype(np.float32) - 127).astype("<f4").tobytes()


@pytest.mark.parametrize("scale", [0.75, 0.0, -1.0, np.inf, np.nan])
def test_a_scale_that_is_no_power_of_two_is_refused(scale):
    cache = np.zeros((1, page_bytes(1, DIM)), np.uint8)
    cache[0, DIM:] = np.frombuffer(np.float32(scale).tobytes(), np.uint8)
    with pytest.raises(InvalidCall) as caught:
        read_keys(cache, [0], 1, DIM, FP8)
    assert caught.value.rule == "C-FP8-SCALE"


@pytest.mark.parametrize(
    ("cache", "slots", "rule"),
    [
        (np.zeros((1, page_bytes(2, DIM) - 1), np.uint8), [0], "C-PAGE-SHAPE"),
        (np.zeros((1, page_bytes(2, DIM)), np.int16), [0], "C-BITS"),
        (np.zeros((1, page_bytes(2, DIM)), np.uint8), [2], "C-PAGE-OUTSIDE"),
        (np.zeros((1, page_bytes(2, DIM)), np.uint8), [-1], "C-PAGE-OUTSIDE"),
    ],
)
def test_what_is_no_such_cache_is_refused(cache, slots, rule):
    with pytest.raises(InvalidCall) as caught:
        read_keys(cache, slots, 2, DIM, FP8)
    assert caught.value.rule == rule
