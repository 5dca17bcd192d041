"""MLA latents: one row is key and, in its first part, value."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.canonical.layouts import refused
from tracekit.canonical.mla import join_latent, latent_rows, split_latent
from tracekit.model import Bits, DType, KVRows

ROWS = np.arange(24, dtype=np.uint16).reshape(4, 6)


@settings(deadline=None)
@given(st.integers(0, 5), st.integers(1, 9), st.integers(0, 5), st.integers(0, 2**32 - 1))
def test_latents_become_keys_and_values_and_come_back(rows, kv_lora, rope, seed):
    numbers = np.random.default_rng(seed)
    parts = [numbers.integers(0, 2**16, (rows, width), np.uint16) for width in (kv_lora, rope)]

    keys, values = latent_rows(join_latent(*parts), kv_lora)
    latent, rotary = split_latent(keys, values)

    assert keys.shape == (rows, 1, kv_lora + rope)
    assert np.array_equal(values, keys[..., :kv_lora])
    assert np.array_equal(latent, parts[0])
    assert np.array_equal(rotary, parts[1])


def test_the_model_holds_values_narrower_than_keys():
    keys, values = latent_rows(ROWS, 4)
    held = KVRows(Bits(keys, DType.BFLOAT16), Bits(values, DType.BFLOAT16))
    assert (held.keys.shape, held.value_bits.shape) == ((4, 1, 6), (4, 1, 4))
    assert np.shares_memory(values, ROWS)


@pytest.mark.parametrize(
    ("code", "call"),
    [
        ("C-BITS", lambda: latent_rows(ROWS.astype(np.float32), 4)),
        ("C-MLA-SHAPE", lambda: latent_rows(ROWS, 7)),
        ("C-MLA-SHAPE", lambda: latent_rows(ROWS.reshape(2, 2, 6), 4)),
        ("C-MLA-SHAPE", lambda: join_latent(ROWS, ROWS[:3])),
        ("C-MLA-SHAPE", lambda: join_latent(ROWS, ROWS.astype(np.uint8))),
        ("C-MLA-SHAPE", lambda: split_latent(ROWS, ROWS)),
        ("C-MLA-PREFIX", lambda: split_latent(ROWS[:, None], ROWS[:, None, 1:5])),
    ],
)
def test_rows_that_are_no_latents_are_refused(code, call):
    assert refused(call) == code
