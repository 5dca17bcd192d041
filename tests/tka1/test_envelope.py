"""TKA-1 against float64: inside an error envelope, and a wrong answer is outside it."""

from dataclasses import replace

import numpy as np
import pytest

from tests.tka1.cases import Array, case, f32
from tracekit.providers.tka1 import Inputs, Outputs, Ranges, attention

UNIT = 2.0**-24
CASES = (
    "causal",
    "causal, D 64",
    "D 576, Dv 512",
    "two families",
    "several requests",
    "scattered leaves",
    "decode",
)


def wide(bits: Array) -> Array:
    return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def worst(inputs: Inputs, got: Outputs) -> float:
    """Return the largest error over its bound.

    With u = 2^-24: a score errs by at most D u sum |q k| * scale, so a weight by twice that, relative;
    sums over n keys, the merges and the division add (n + 40) u; the last rounding is half a bf16 ulp.
    """
    scale = float(np.uint32(inputs.scale_bits).view(np.float32))
    group = inputs.q.shape[1] // inputs.kv_heads
    ratio = 0.0
    for t, request in enumerate(inputs.request):
        keys, values = [], []
        for family in inputs.families:
            s = family.selection
            ids = (
                np.arange(s.lo[t], s.hi[t])
                if isinstance(s, Ranges)
                else s.ids[s.offsets[t] : s.offsets[t + 1]]
            )
            for to, array in ((keys, family.keys), (values, family.values)):
                to.append(wide(array[request][ids - family.first[request]]).repeat(group, 1))
        k, v, q = np.concatenate(keys), np.concatenate(values), wide(inputs.q[t])
        x = np.einsum("hd,khd->hk", q, k) * scale
        error = q.shape[1] * UNIT * (np.einsum("hd,khd->hk", abs(q), abs(k)) * abs(scale)).max(1)
        sink = np.full(len(q), -np.inf) if inputs.sink is None else inputs.sink.view(np.float32).astype(float)
        for terms, lse in ((x, got.lse), (np.concatenate([x, sink[:, None]], 1), got.lse_with_sink)):
            top = terms.max(1)
            exact = top + np.log(np.exp(terms - top[:, None]).sum(1))
            bound = error + (len(k) + 40) * UNIT * np.maximum(1, abs(exact))
            ratio = max(ratio, float((abs(lse[t].view(np.float32) - exact) / bound).max()))
        p = np.exp(x - exact[:, None])
        want, size = np.einsum("hk,khc->hc", p, v), np.einsum("hk,khc->hc", p, abs(v))
        bound = 2.0**-8 * abs(want) * (1 + 2.0**-8) + (2 * error[:, None] + (len(k) + 40) * UNIT) * size
        ratio = max(ratio, float((abs(wide(got.out[t]) - want) / bound).max()))
    return ratio


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("form", ["auto", "numpy"])
def test_every_value_is_inside_the_envelope(name: str, form: str):
    inputs = case(name)
    assert worst(inputs, attention(inputs, form=form)) <= 1


@pytest.mark.parametrize("name", CASES)
def test_a_wrong_scale_is_outside_the_envelope(name: str):
    """The control: an envelope that everything fits into would prove nothing."""
    inputs = case(name)
    scale = float(np.uint32(inputs.scale_bits).view(np.float32))
    other = replace(inputs, scale_bits=int(f32(scale * 1.02)[0]))
    assert worst(inputs, attention(other)) > 1


def test_a_sink_that_is_left_out_is_outside_the_envelope():
    inputs = case("two families")
    assert worst(inputs, attention(replace(inputs, sink=None))) > 1
