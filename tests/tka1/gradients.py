"""Backward launches for the tests, and the float64 backward of the same numbers with a bound on each."""

from dataclasses import dataclass, replace

import numpy as np
import torch

from tests.tka1.cases import Array, bf16, case
from tracekit.model.bits import DType
from tracekit.providers.tka1 import Ranges
from tracekit.providers.tka1.arithmetic import widen
from tracekit.providers.tka1.gradients import Backward, Gradients

UNIT = 2.0**-24


def backward(name: str, dtype: DType = DType.BFLOAT16) -> Backward:
    """A case with positions that are not the order of its rows, and dO."""
    inputs = case(name)
    rng = np.random.default_rng(len(name))
    rows, heads, _ = inputs.q.shape
    positions = np.zeros(rows, np.int64)
    for request in np.unique(inputs.request):
        mine = np.flatnonzero(inputs.request == request)
        positions[mine] = rng.choice(400, mine.size, replace=False)
    d_out = bf16(rng, (rows, heads, inputs.value_dim))
    if dtype is DType.FLOAT32:
        d_out = (d_out.astype(np.uint32) << 16) | 0x1234
    return Backward(inputs, positions, d_out, dtype)


def difference(got: Gradients, want: Gradients) -> str:
    """Describe the first differing element, empty when every bit is equal."""
    for name, actual, expected in zip(_names(want), _arrays(got), _arrays(want), strict=True):
        assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape) == (np.uint32, actual.shape)
        bad = np.argwhere(actual != expected)
        if bad.size:
            at = tuple(int(i) for i in bad[0])
            bits = f"{int(actual[at]):#x}, wanted {int(expected[at]):#x}"
            return f"{name}{list(at)}: {bits}; {len(bad)} of {actual.size}"
    return ""


def _arrays(grads: Gradients) -> list[Array]:
    kv = [x for f in grads.families for pair in zip(f.keys, f.values, strict=True) for x in pair]
    return [grads.d_q, *kv, *([] if grads.d_sink is None else [grads.d_sink])]


def _names(grads: Gradients) -> list[str]:
    kv = [
        f"{what} of family {i}, request {r} "
        for i, f in enumerate(grads.families)
        for r in range(len(f.keys))
        for what in ("dK", "dV")
    ]
    return ["dQ", *kv, *([] if grads.d_sink is None else ["dsink"])]


@dataclass
class Row:
    """One query row in float64: what it reads, and the error that each of its parts may have."""

    p: Array  # [H, K]
    g: Array
    p_error: Array
    g_error: Array
    q: Array  # [H, D]
    d_out: Array
    keys: list[tuple[int, int, Array]]  # (family, request, places)
    k: Array  # [K, H, D]
    sink: tuple[Array, Array]  # dsink terms [H] and their errors


def rows(b: Backward) -> list[Row]:
    """The float64 backward by its closed form, with u = 2^-24.

    A score errs by D u sum |q k| |scale|, so P by ep = twice that + (K + 40) u, relative. dP and delta are
    sums of Dv terms of the sizes A = sum |dO v| and B = sum |dO| sum P |v|; delta has the error of P too.
    """
    inputs = b.inputs
    scale = float(np.uint32(inputs.scale_bits).view(np.float32))
    group, found = inputs.q.shape[1] // inputs.kv_heads, []
    q_all, d_all = widen(inputs.q, inputs.dtype).astype(float), widen(b.d_out, b.dtype).astype(float)
    for t, request in enumerate(inputs.request):
        k, v, where = [], [], []
        for number, f in enumerate(inputs.families):
            s = f.selection
            ids = (
                np.arange(s.lo[t], s.hi[t])
                if isinstance(s, Ranges)
                else s.ids[s.offsets[t] : s.offsets[t + 1]]
            )
            at = ids - f.first[request]
            where.append((number, int(request), at))
            k.append(widen(f.keys[request][at], inputs.dtype).astype(float).repeat(group, 1))
            v.append(widen(f.values[request][at], inputs.dtype).astype(float).repeat(group, 1))
        keys, values, q, d_out = np.concatenate(k), np.concatenate(v), q_all[t], d_all[t]
        x = np.einsum("hd,khd->hk", q, keys) * scale
        ep = 2 * q.shape[1] * UNIT * (np.einsum("hd,khd->hk", abs(q), abs(keys)) * abs(scale)).max(1)
        ep += (len(keys) + 40) * UNIT
        sink = np.full(len(q), -np.inf) if inputs.sink is None else inputs.sink.view(np.float32).astype(float)
        top = np.maximum(x.max(1), sink)
        weights, weight_of_sink = np.exp(x - top[:, None]), np.exp(sink - top)
        total = weights.sum(1) + weight_of_sink
        p, p_sink = weights / total[:, None], weight_of_sink / total
        d_p, size = np.einsum("hc,khc->hk", d_out, values), np.einsum("hc,khc->hk", abs(d_out), abs(values))
        delta, size_of_delta = (p * d_p).sum(1), (p * size).sum(1)
        width = values.shape[2] + 4
        delta_error = (ep + width * UNIT) * size_of_delta
        g = p * (d_p - delta[:, None]) * scale
        g_error = p * abs(scale) * (ep[:, None] + 8 * UNIT) * (size + size_of_delta[:, None])
        g_error += p * abs(scale) * (width * UNIT * size + delta_error[:, None])
        sink_error = p_sink * (ep * abs(delta) + delta_error)
        found.append(
            Row(p, g, p * ep[:, None], g_error, q, d_out, where, keys, (-p_sink * delta, sink_error))
        )
    return found


def worst(b: Backward, got: Gradients) -> dict[str, float]:
    """Return the largest error over its bound of each kind of gradient; a sum of n terms adds (n + 8) u."""
    inputs = b.inputs
    group = inputs.q.shape[1] // inputs.kv_heads
    ratio = {"dQ": 0.0, "dK": 0.0, "dV": 0.0, "dsink": 0.0}
    want = {}
    for t, row in enumerate(rows(b)):
        count = row.p.shape[1] + 8
        d_q = np.einsum("hk,khd->hd", row.g, row.k)
        bound = np.einsum("hk,khd->hd", row.g_error + count * UNIT * abs(row.g), abs(row.k))
        ratio["dQ"] = max(ratio["dQ"], _ratio(got.d_q[t], d_q, bound))
        start = 0
        for number, request, at in row.keys:
            part = slice(start, start + len(at))
            start += len(at)
            for name, terms, error, of in (
                ("dK", row.g, row.g_error, row.q),
                ("dV", row.p, row.p_error, row.d_out),
            ):
                arrays = getattr(inputs.families[number], "keys" if name == "dK" else "values")[request]
                key = (name, number, request)
                exact, size, slack = want.setdefault(key, tuple(np.zeros(arrays.shape) for _ in range(3)))
                for to, factor in ((exact, terms), (size, abs(terms)), (slack, error)):
                    each = np.einsum("hk,hd->khd", factor[:, part], of if to is exact else abs(of))
                    to[at] += each.reshape(len(at), -1, group, each.shape[2]).sum(2)
        if inputs.sink is not None:
            key = ("dsink", 0, int(inputs.request[t]))
            exact, size, slack = want.setdefault(key, tuple(np.zeros(len(row.q)) for _ in range(3)))
            exact += row.sink[0]
            size += abs(row.sink[0])
            slack += row.sink[1]
    terms = len(inputs.q) * group + 8
    for (name, number, request), (exact, size, slack) in want.items():
        if name == "dsink":
            found = got.d_sink[request]
        else:
            found = getattr(got.families[number], "keys" if name == "dK" else "values")[request]
        f = inputs.families[number]
        if name != "dsink" and f.keys[request] is f.values[request]:
            if name == "dV":
                continue
            other = want["dV", number, request]
            exact, size, slack = exact + other[0], size + other[1], slack + other[2]
        ratio[name] = max(ratio[name], _ratio(found, exact, slack + terms * UNIT * size))
    return ratio


def _ratio(bits: Array, exact: Array, bound: Array) -> float:
    error = abs(bits.view(np.float32).astype(float) - exact)
    return float((error / np.maximum(bound, 2.0**-149)).max(initial=0.0))


def autograd(b: Backward) -> Gradients:
    """The gradients of torch in float64, rounded to binary32; for launches whose numbers are all finite."""
    inputs = b.inputs
    group = inputs.q.shape[1] // inputs.kv_heads
    scale = float(np.uint32(inputs.scale_bits).view(np.float32))

    def leaf(bits: Array, dtype: DType) -> torch.Tensor:
        return torch.tensor(widen(bits, dtype).astype(float)).requires_grad_()

    q = leaf(inputs.q, inputs.dtype)
    kv = [
        [
            (leaf(k, inputs.dtype), None if v is k else leaf(v, inputs.dtype))
            for k, v in zip(f.keys, f.values, strict=True)
        ]
        for f in inputs.families
    ]
    sinks = [
        None if inputs.sink is None else leaf(inputs.sink, DType.FLOAT32) for _ in inputs.families[0].keys
    ]
    loss = torch.zeros((), dtype=torch.float64)
    for t, request in enumerate(inputs.request):
        keys, values = [], []
        for number, f in enumerate(inputs.families):
            s = f.selection
            ids = (
                np.arange(s.lo[t], s.hi[t])
                if isinstance(s, Ranges)
                else s.ids[s.offsets[t] : s.offsets[t + 1]]
            )
            k, v = kv[number][request]
            keys.append(k[ids - f.first[request]])
            values.append((k if v is None else v)[ids - f.first[request]])
        k, v = (torch.cat(x).repeat_interleave(group, 1) for x in (keys, values))
        x = torch.einsum("hd,khd->hk", q[t], k) * scale
        sink = sinks[request]
        if sink is not None:
            x = torch.cat([x, sink[:, None]], 1)
        p = x.softmax(1)[:, : len(k)]
        loss = loss + (torch.einsum("hk,khc->hc", p, v) * torch.tensor(widen(b.d_out[t], b.dtype))).sum()
    loss.backward()

    def bits(x: torch.Tensor) -> Array:
        grad = torch.zeros_like(x) if x.grad is None else x.grad
        return grad.numpy().astype(np.float32).view(np.uint32)

    from tracekit.providers.tka1.gradients import FamilyGradients

    families = tuple(
        FamilyGradients(
            tuple(bits(k) for k, _ in pairs), tuple(bits(k if v is None else v) for k, v in pairs)
        )
        for pairs in kv
    )
    d_sink = None if inputs.sink is None else np.stack([bits(s) for s in sinks])
    return Gradients(bits(q), families, d_sink)


def without_keys(b: Backward) -> Backward:
    """The launch with no key in any row."""
    families = tuple(
        replace(f, selection=Ranges(np.zeros(len(b.inputs.q), np.int64), np.zeros(len(b.inputs.q), np.int64)))
        for f in b.inputs.families
    )
    return replace(b, inputs=replace(b.inputs, families=families))
