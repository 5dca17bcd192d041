"""Launches for the tests: every selection kind, head layout and special value that docs/tka1.md speaks of."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from tracekit.model.bits import DType
from tracekit.providers.tka1 import FamilyInput, Inputs, Lists, Outputs, Partials, Ranges

Array = npt.NDArray[Any]
INF, NEG_INF, NAN_WITH_PAYLOAD = 0x7F800000, 0xFF800000, 0xFFC12345


def bf16(rng: np.random.Generator, shape: tuple[int, ...], scale: Array | float = 1.0) -> Array:
    """Normal numbers, rounded to bf16."""
    bits = (rng.standard_normal(shape) * scale).astype(np.float32).view(np.uint32)
    return ((bits.astype(np.uint64) + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def f32(*values: float) -> Array:
    """Bits of binary32 numbers."""
    return np.array(values, np.float32).view(np.uint32)


def scale(dim: int) -> int:
    return int(f32(dim**-0.5)[0])


def lists(rows: list[Array]) -> Lists:
    offsets = np.concatenate([[0], np.cumsum([len(r) for r in rows])]).astype(np.int64)
    return Lists(np.concatenate([*rows, np.zeros(0)]).astype(np.int64), offsets)


def causal(rows: int, length: int, window: int | None = None) -> Ranges:
    hi = length - rows + 1 + np.arange(rows, dtype=np.int64)
    return Ranges(np.zeros(rows, np.int64) if window is None else np.maximum(hi - window, 0), hi)


def gqa(
    rng: np.random.Generator,
    rows: int = 9,
    heads: int = 6,
    kv_heads: int = 3,
    dims: tuple[int, int] = (40, 24),
    length: int = 300,
    selection: Ranges | Lists | None = None,
) -> Inputs:
    """One request, one family, keys and values apart, a sink."""
    k, v = bf16(rng, (length, kv_heads, dims[0])), bf16(rng, (length, kv_heads, dims[1]))
    family = FamilyInput((k,), (v,), (0,), selection or causal(rows, length))
    sink = rng.standard_normal(heads).astype(np.float32).view(np.uint32)
    q = bf16(rng, (rows, heads, dims[0]), 2)
    return Inputs(q, np.zeros(rows, np.int32), (family,), sink, scale(dims[0]))


def shared(
    rng: np.random.Generator, rows: int = 3, heads: int = 10, dim: int = 80, far: int = 1500
) -> Inputs:
    """One kv head whose keys are its values: a list of compressed rows and a window of the recent ones."""
    compressed, recent = bf16(rng, (far, 1, dim)), bf16(rng, (200, 1, dim))
    chosen = lists([rng.choice(far, 90, replace=False) for _ in range(rows)])
    hi = 3100 + rng.integers(130, 200, rows)  # the window's start was dropped: 200 rows from id 3100 are left
    families = (
        FamilyInput((compressed,), (compressed,), (0,), chosen),
        FamilyInput((recent,), (recent,), (3100,), Ranges(hi - 128, hi)),
    )
    sink = rng.standard_normal(heads).astype(np.float32).view(np.uint32)
    return Inputs(bf16(rng, (rows, heads, dim), 2), np.zeros(rows, np.int32), families, sink, scale(dim))


def several_requests(rng: np.random.Generator) -> Inputs:
    """Rows of three requests, interleaved, of different lengths; one is a window from row id 130."""
    lengths, first = (20, 260, 150), (0, 0, 130)
    keys = tuple(bf16(rng, (n, 2, 24)) for n in lengths)
    values = tuple(bf16(rng, (n, 2, 24)) for n in lengths)
    request = np.array([2, 0, 1, 1, 1, 2, 0, 2], np.int32)
    hi = np.array([first[r] + rng.integers(1, lengths[r] + 1) for r in request], np.int64)
    lo = np.maximum(hi - 140, np.array(first)[request])
    family = FamilyInput(keys, values, first, Ranges(lo, hi))
    return Inputs(bf16(rng, (8, 4, 24)), request, (family,), None, scale(24))


def scattered(rng: np.random.Generator) -> Inputs:
    """Lists that touch up to 70 leaves, one to three keys each: the tree is deep and full of gaps."""
    rows = []
    for leaves in (1, 2, 3, 31, 64, 70):
        touched = rng.choice(70, leaves, replace=False)
        rows.append(
            np.concatenate([x * 128 + rng.choice(128, rng.integers(1, 4), replace=False) for x in touched])
        )
    return gqa(rng, rows=6, heads=4, kv_heads=2, dims=(16, 8), length=70 * 128, selection=lists(rows))


def wild(rng: np.random.Generator) -> Inputs:
    """Exponents from 2^-130 to 2^60, NaN and infinities in q, k and v, special sinks, a row without keys."""
    inputs = gqa(rng, rows=12, heads=6, kv_heads=2, dims=(32, 20), length=400)
    spread = np.exp2(rng.integers(-130, 60, (400, 1, 1)).astype(np.float64))
    k, v = bf16(rng, (400, 2, 32), spread**0.1), bf16(rng, (400, 2, 20), spread)
    v[:, :, 4] &= 0x807F  # subnormals in a whole column
    v[50, 0, 1], v[60, 1, 2], v[70, 0, 3] = 0x7F80, 0xFF80, 0x7FC1
    k[100, 0, 0], k[140, 1, 5], k[390, 0, 3] = 0xFF80, 0x7F80, 0x7FC1
    q = inputs.q.copy()
    q[1, 0] = 0x0001
    q[2, 1, 3] = 0x7F80
    q[3] = bf16(rng, (6, 32), 2.0**40)
    lo = np.array([0, 0, 0, 0, 10, 150, 150, 256, 255, 127, 128, 399], np.int64)
    hi = np.array([400, 128, 99, 129, 10, 390, 256, 257, 257, 129, 256, 400], np.int64)
    sink = np.concatenate([[INF, NEG_INF, NAN_WITH_PAYLOAD], f32(0.5, -1e30, 1e30)]).astype(np.uint32)
    return Inputs(
        q, inputs.request, (FamilyInput((k,), (v,), (0,), Ranges(lo, hi)),), sink, inputs.scale_bits
    )


def underflowing(rng: np.random.Generator) -> Inputs:
    """Values near the bottom of binary32, so that sums and outputs are subnormal."""
    inputs = gqa(rng)
    family = inputs.families[0]
    values = bf16(rng, family.values[0].shape, 2.0**-126)
    return replace(inputs, families=(replace(family, values=(values,)),))


def nothing(rng: np.random.Generator) -> Inputs:
    """No query row sees a key, in one family by lists and in the other by ranges."""
    inputs = shared(rng)
    zero = np.zeros(3, np.int64)
    far, near = inputs.families
    families = (replace(far, selection=lists([zero[:0]] * 3)), replace(near, selection=Ranges(zero, zero)))
    return replace(inputs, families=families)


def as_dtype(inputs: Inputs, dtype: DType) -> Inputs:
    """The same numbers in another dtype, as far as it holds them."""

    def convert(bits: Array) -> Array:
        wide = (bits.astype(np.uint32) << 16).view(np.float32)
        if dtype is DType.FLOAT32:  # and digits that bf16 does not have
            return (wide * np.float32(1.0009765)).view(np.uint32)
        with np.errstate(over="ignore"):
            return wide.astype(np.float16).view(np.uint16)

    def family(f: FamilyInput) -> FamilyInput:
        keys = tuple(convert(k) for k in f.keys)
        values = tuple(kk if v is k else convert(v) for k, v, kk in zip(f.keys, f.values, keys, strict=True))
        return replace(f, keys=keys, values=values)

    families = tuple(family(f) for f in inputs.families)
    return replace(inputs, q=convert(inputs.q), families=families, dtype=dtype)


def in_binary16(rng: np.random.Generator) -> Inputs:
    """Binary16 with values whose outputs are subnormal, and some that overflow it."""
    inputs = gqa(rng, rows=5, heads=4, kv_heads=2, dims=(32, 20))
    values = np.exp2(rng.integers(-26, 17, (300, 2, 20)).astype(np.float64))
    values *= rng.choice([-1.0, 1.0], values.shape)
    family = replace(inputs.families[0], values=(bf16(rng, values.shape, values),))
    lo = np.array([0, 0, 299, 17, 40], np.int64)
    seen = Ranges(lo, np.array([300, 1, 300, 18, 43], np.int64))
    return as_dtype(replace(inputs, families=(replace(family, selection=seen),)), DType.FLOAT16)


CASES: dict[str, Callable[[np.random.Generator], Inputs]] = {
    "causal": gqa,
    "causal, D 64": lambda r: gqa(r, rows=40, heads=4, kv_heads=2, dims=(64, 64), length=200),
    "MHA, odd dims": lambda r: gqa(r, rows=5, heads=3, kv_heads=3, dims=(33, 17), length=150),
    "one dim": lambda r: gqa(r, rows=4, heads=2, kv_heads=1, dims=(1, 1), length=140),
    "D 576, Dv 512": lambda r: gqa(r, rows=2, heads=8, kv_heads=1, dims=(576, 512), length=150),
    "sliding window": lambda r: gqa(r, rows=20, selection=causal(20, 300, 100)),
    "70 heads on one": lambda r: gqa(r, rows=3, heads=70, kv_heads=1, dims=(16, 16), length=260),
    "decode": lambda r: gqa(r, rows=1, heads=8, kv_heads=2, dims=(32, 32), length=700),
    "two families": shared,
    "two families, no sink": lambda r: replace(shared(r), sink=None),
    "several requests": several_requests,
    "scattered leaves": scattered,
    "wild": wild,
    "wild, no sink": lambda r: replace(wild(r), sink=None),
    "underflowing": underflowing,
    "binary16": in_binary16,
    "binary16, wild": lambda r: as_dtype(wild(r), DType.FLOAT16),
    "binary16, decode": lambda r: as_dtype(gqa(r, rows=1, heads=8, kv_heads=2, length=700), DType.FLOAT16),
    "binary32": lambda r: as_dtype(gqa(r), DType.FLOAT32),
    "binary32, wild": lambda r: as_dtype(wild(r), DType.FLOAT32),
    "binary32, two families": lambda r: as_dtype(shared(r), DType.FLOAT32),
    "no keys at all": nothing,
    "no rows": lambda r: gqa(r).take([]),
}


def case(name: str) -> Inputs:
    return CASES[name](np.random.default_rng(list(CASES).index(name)))


def difference(got: Outputs | Partials, want: Outputs | Partials) -> str:
    """Describe the first differing element, empty when every bit is equal."""
    for name, expected in vars(want).items():
        actual = getattr(got, name)
        assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
        bad = np.argwhere(actual != expected)
        if bad.size:
            at = tuple(int(i) for i in bad[0])
            bits = f"{int(actual[at]):#x}, wanted {int(expected[at]):#x}"
            return f"{name}{list(at)}: {bits}; {len(bad)} of {actual.size}"
    return ""
