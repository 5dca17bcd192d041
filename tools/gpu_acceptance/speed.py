"""Speed of the launches alone, against torch's SDPA, a binary32 matmul and a copy, in interleaved turns."""

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own idiom
from torch.nn.attention.bias import causal_lower_right

from tools.gpu_acceptance.run import Run
from tracekit.providers import tka1
from tracekit.providers.tka1 import Inputs

ROUNDS = 9
_BUSY = 2_000_000
"""Cycles: about a millisecond, in which the host enqueues some dozens of kernels."""
_SHAPES = (
    ("Qwen3 prefill T=512", 512, 512),
    ("Qwen3 T=512 R=4096", 512, 4096),
    ("decode T=1 R=8192", 1, 8192),
)


class Clock(Protocol):
    """Says how many seconds a function takes where it runs."""

    def __call__(self, work: Callable[[], object]) -> float:
        """Run it once, timed."""
        ...


def host_clock(work: Callable[[], object]) -> float:
    """By the clock of this process."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def device_clock(work: Callable[[], object]) -> float:
    """By events on the current stream.

    The device is kept busy while the work is enqueued: else it would wait for the host between two short
    kernels, and the host's time would be measured.
    """
    make: Any = torch.cuda.Event
    busy: Any = torch.cuda._sleep
    start, end = make(enable_timing=True), make(enable_timing=True)
    busy(_BUSY)
    start.record()
    work()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1000


def interleaved(works: Mapping[str, Callable[[], object]], clock: Clock, rounds: int) -> dict[str, float]:
    """Return the median seconds of each; every function takes its turn in every round, after two untimed."""
    for work in works.values():
        work()
        work()
    taken: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(rounds):
        for name, work in works.items():
            taken[name].append(clock(work))
    return {name: statistics.median(times) for name, times in taken.items()}


def speed(run: Run) -> None:
    """Measure the shapes; a stand-in measures the smallest one once, to show that this runs."""
    torch.backends.cuda.matmul.allow_tf32 = False
    where = "cpu" if run.stand_in else "cuda"
    shapes = [("stand-in T=8 R=64", 8, 64)] if run.stand_in else _SHAPES
    for name, rows, length in shapes:
        if run.left < 30:
            run.add("speed", name, "not run", "no time was left", provider=run.subject)
            continue
        with run.failures("speed", name, run.subject):
            inputs = causal(rows, length)
            size = 256 if run.stand_in else 4096
            works = {"ours": _ours(run, inputs), **_peers(inputs, length, where, size)}
            clock = host_clock if run.stand_in else device_clock
            medians = interleaved(works, clock, 1 if run.stand_in else ROUNDS)
            seen = int((inputs.families[0].selection.hi).sum())  # type: ignore[union-attr]
            data = {f"{key} seconds": value for key, value in medians.items()}
            data |= _derived(medians, 4 * 32 * 128 * seen, 2 * length * 8 * 128 * 2, size)
            reason = ", ".join(f"{key} {value:.3g}" for key, value in data.items())
            run.add("speed", name, "measured", reason, provider=run.subject, data=data)


def causal(rows: int, length: int) -> Inputs:
    """32 heads on 8 KV heads of 128, bf16; row t sees the first `length - rows + 1 + t`."""
    rng = np.random.default_rng(0)

    def numbers(count: int, heads: int) -> "np.ndarray[tuple[int, ...], np.dtype[np.uint16]]":
        bits = rng.standard_normal((count, heads, 128)).astype(np.float32).view(np.uint32)
        return (bits >> 16).astype(np.uint16)

    hi = length - rows + 1 + np.arange(rows, dtype=np.int64)
    k, v = numbers(length, 8), numbers(length, 8)
    family = tka1.FamilyInput((k,), (v,), (0,), tka1.Ranges(np.zeros(rows, np.int64), hi))
    scale = int(np.float32(128**-0.5).view(np.uint32))
    return Inputs(numbers(rows, 32), np.zeros(rows, np.int32), (family,), None, scale)


def _ours(run: Run, inputs: Inputs) -> Callable[[], object]:
    if run.stand_in:
        return lambda: tka1.attention(inputs)
    from tracekit.providers.tka1_gpu import verified

    launch = verified("hip" if run.subject == "tka1-hip" else "cuda").launch([inputs])
    launch.load(inputs)
    return launch.enqueue


def _peers(inputs: Inputs, length: int, where: str, size: int) -> dict[str, Callable[[], object]]:
    rows, family = len(inputs.q), inputs.families[0]

    def tensor(bits: "np.ndarray[tuple[int, ...], np.dtype[np.uint16]]", dtype: torch.dtype) -> torch.Tensor:
        words = torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)
        return words.to(where, dtype).transpose(0, 1)[None].contiguous()

    def peer(dtype: torch.dtype) -> Callable[[], object]:
        q, k, v = (tensor(x, dtype) for x in (inputs.q, family.keys[0], family.values[0]))
        mask: torch.Tensor | None = None
        if rows not in (1, length):
            # flash attention, the better peer, takes no mask, but knows this one by its name
            mask = causal_lower_right(rows, length)
            if dtype is torch.float32 or where == "cpu":
                mask = torch.ones(rows, length, dtype=torch.bool, device=where).tril(length - rows)
        return lambda: F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=rows == length, enable_gqa=True
        )

    a, b = (torch.rand(size, size, device=where) for _ in range(2))
    to = torch.empty_like(a)
    return {
        "torch bf16": peer(torch.bfloat16),
        "torch fp32": peer(torch.float32),
        "fp32 matmul": lambda: a @ b,
        "copy": lambda: to.copy_(a),
    }


def _derived(medians: Mapping[str, float], operations: int, kv_bytes: int, size: int) -> dict[str, float]:
    """Ratios: above 1 is faster than the better torch; shares of a measured matmul and of a measured copy."""
    matmul = 2 * size**3 / medians["fp32 matmul"]
    copied = 2 * 4 * size**2 / medians["copy"]
    return {
        "ratio to the better torch": min(medians["torch bf16"], medians["torch fp32"]) / medians["ours"],
        "share of fp32 matmul": operations / medians["ours"] / matmul,
        "share of copy bandwidth": kv_bytes / medians["ours"] / copied,
    }
