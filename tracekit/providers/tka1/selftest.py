"""The load-time self-test: fixed wild launches, hashed, against a stored hash.

What is hashed is the binary32 *partials* first: O is rounded to bf16 and LSE hides small errors in its sum,
so an exp that is a few ulp off can leave both unchanged (docs/tka1.md, "The self-test").
"""

import hashlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from tracekit.errors import ProviderFailed
from tracekit.model.bits import DType
from tracekit.providers.tka1.gradients import Backward, Gradients
from tracekit.providers.tka1.inputs import FamilyInput, Inputs, Lists, Outputs, Partials, Ranges

EXPECTED = "944c440bda279eed6132445cfcf352a2f61854419a4e5b6ed075ac2d9b5bcd91"
"""SHA-256 over all launches; `python -m tools.tka1_digest` prints that of the numpy form."""

EXPECTED_WIDE = "6d80dbc5d98c24db10aa67798d72f2fbbceacf26b53df779b21ae7fc22d6b064"
"""The same for `wide_launches`."""

EXPECTED_BACKWARD = "8e3449214df9e6bea4032c73360a45642093a97bc5c40df9d17cb43f066bebb3"
"""The same for the gradients of `backwards`."""

Run = Callable[[Inputs, int], Outputs]
RunBackward = Callable[[Backward, int], Gradients]
RunPartials = Callable[[Inputs, int], Partials]


def _mix(seed: int, count: int) -> npt.NDArray[np.uint64]:
    """Pseudo-random words by integers alone (splitmix64 of a counter), so that no library can change them."""
    x = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(seed << 32)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _bf16(seed: int, shape: tuple[int, ...], low: int = -3, high: int = 1) -> npt.NDArray[np.uint16]:
    """bf16 bits with either sign, any fraction and exponents in [low, high)."""
    word = _mix(seed, int(np.prod(shape)))
    sign, fraction = (word >> np.uint64(63)) << np.uint64(15), word & np.uint64(0x7F)
    exponent = (word >> np.uint64(20)) % np.uint64(high - low) + np.uint64(127 + low)
    bits = sign | exponent << np.uint64(7) | fraction
    return np.asarray(bits, np.uint16).reshape(shape)


def launches() -> Iterator[Inputs]:
    """Yield the launches: lists and ranges, one and two families, sinks, no keys, NaN, inf, subnormals."""
    quarter = 0x3E800000
    sink = np.array([0x3F000000, 0x7F800000, 0xFF800000, 0xFFC12345], np.uint32)  # 0.5, inf, -inf, a NaN
    # GQA, two requests, one of them a window whose start was dropped; row 2 sees nothing.
    keys = (_bf16(1, (300, 2, 40)), _bf16(2, (150, 2, 40), -40, 3))
    values = (_bf16(3, (300, 2, 24)), _bf16(4, (150, 2, 24), -120, -60))
    values[1][:, :, 7] &= 0x807F  # a column of subnormal values has subnormal sums
    lo, hi = np.array([0, 17, 9, 100, 101], np.int64), np.array([300, 290, 9, 250, 240], np.int64)
    request = np.array([0, 0, 0, 1, 1], np.int32)
    ranges = FamilyInput(keys, values, (0, 100), Ranges(lo, hi))
    yield Inputs(_bf16(5, (5, 4, 40)), request, (ranges,), sink, quarter)
    # MQA with shared KV, a list and a range; some keys score -inf, +inf and NaN.
    far = _bf16(6, (700, 1, 33), -6, 4)
    far[[40, 300], 0, 5] = 0xFF80, 0x7F80
    far[650, 0, 2] = 0x7FC1
    ids = np.concatenate([(_mix(7 + t, 700) % np.uint64(8) == 0).nonzero()[0] for t in range(3)] + [[650]])
    cuts = np.flatnonzero(np.diff(ids) < 0) + 1
    offsets = np.array([0, *cuts[:2], ids.size - 1, ids.size], np.int64)
    near = _bf16(11, (60, 1, 33))
    two = (
        FamilyInput((far,), (far,), (0,), Lists(ids.astype(np.int64), offsets)),
        FamilyInput((near,), (near,), (90,), Ranges(np.full(4, 100), np.array([150, 128, 129, 100]))),
    )
    yield Inputs(_bf16(12, (4, 6, 33)), np.zeros(4, np.int32), two, None, quarter)


def _any_bits(seed: int, shape: tuple[int, ...], dtype: DType, mask: int) -> npt.NDArray[Any]:
    """Bits of a dtype, any pattern under a mask."""
    wide = dtype is DType.FLOAT32
    word = _mix(seed, int(np.prod(shape))) >> np.uint64(32 if wide else 48)
    return (word & np.uint64(mask)).astype(dtype.container).reshape(shape)


def wide_launches() -> Iterator[Inputs]:
    """Yield launches in binary16 and binary32: q and k below 2 in size, v any bits, so NaN and subnormals."""
    seen = Ranges(np.array([0, 17, 120, 3], np.int64), np.array([200, 150, 140, 3], np.int64))
    for seed, dtype, below_two, every in (
        (20, DType.FLOAT16, 0xBFFF, 0xFFFF),
        (30, DType.FLOAT32, 0xBFFFFFFF, 0xFFFFFFFF),
    ):
        q = _any_bits(seed, (4, 4, 12), dtype, below_two)
        k = _any_bits(seed + 1, (200, 2, 12), dtype, below_two)
        v = _any_bits(seed + 2, (200, 2, 9), dtype, every)
        family = FamilyInput((k,), (v,), (0,), seen)
        yield Inputs(q, np.zeros(4, np.int32), (family,), None, 0x3F000000, dtype)


def digest(run: Run, partials: RunPartials, of: Callable[[], Iterator[Inputs]] = launches) -> str:
    """Return the SHA-256 of the partials, O and both LSE of every launch."""
    sha = hashlib.sha256()
    for inputs in of():
        part, out = partials(inputs, 1), run(inputs, 2)
        for array in (part.acc, part.l, part.m, out.out, out.lse, out.lse_with_sink):
            sha.update(array.astype(array.dtype.newbyteorder("<")).tobytes())
    return sha.hexdigest()


def backwards() -> Iterator[Backward]:
    """Yield the launches with dO, at positions in two leaves and against their order."""
    for seed, inputs in enumerate(launches()):
        rows, heads, _ = inputs.q.shape
        d_out = _bf16(40 + seed, (rows, heads, inputs.value_dim))
        yield Backward(inputs, np.arange(130, 130 - rows, -1), d_out)


def digest_backward(run: RunBackward) -> str:
    """Return the SHA-256 of the gradients of every launch."""
    sha = hashlib.sha256()
    for launch in backwards():
        grads = run(launch, 2)
        arrays = [grads.d_q, *(x for f in grads.families for x in (*f.keys, *f.values))]
        for array in (*arrays, *(() if grads.d_sink is None else (grads.d_sink,))):
            sha.update(array.astype(array.dtype.newbyteorder("<")).tobytes())
    return sha.hexdigest()


OTHER_FORM = "Set TRACEKIT_ISA to another build (v4, v3, v1), or use the numpy form"
"""What a user of a CPU can do about wrong bits."""


def check(
    run: Run,
    partials: RunPartials,
    name: str,
    advice: str = OTHER_FORM,
    backward: RunBackward | None = None,
) -> None:
    """Compare a form of the kernel with the stored hash.

    Args:
        run: the form.
        partials: the same, before S10.
        name: of the form, for the message.
        advice: what to do about wrong bits.
        backward: its backward, where it has one.

    Raises:
        ProviderFailed: `K-SELFTEST`; nothing that the form computes may be called TKA-1.
    """
    found = [(digest(run, partials), EXPECTED), (digest(run, partials, wide_launches), EXPECTED_WIDE)]
    if backward is not None:
        found.append((digest_backward(backward), EXPECTED_BACKWARD))
    for got, expected in found:
        if got == expected:
            continue
        raise ProviderFailed(
            f"{name} does not give the bits of TKA-1 on this machine (self-test {got[:16]}, wanted "
            f"{expected[:16]}). {advice}; please report the processor and the compiler.",
            rule="K-SELFTEST",
            library=name,
            digest=got,
            expected=expected,
        )
