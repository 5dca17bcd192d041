"""TKA-1 in torch: its own backward, rounded once; whether gradients are wanted changes no bit."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from tracekit.errors import Unsupported
from tracekit.model import Bits, DType, scale_to_bits
from tracekit.providers import tka1
from tracekit.providers.tka1_autograd import attention, packed
from tracekit.providers.torch_tensors import from_torch

SCALE = 0.25


def tensors(rows, dtype=torch.bfloat16, heads=4, kv_heads=2, dim=16, seed=0):
    random = torch.Generator().manual_seed(seed)
    return [
        torch.randn(rows, h, dim, generator=random).to(dtype).requires_grad_()
        for h in (heads, kv_heads, kv_heads)
    ]


def sinks(heads=4, dtype=torch.float32):
    return torch.tensor([0.5, -1.0, 2.0, 0.0], dtype=dtype)[:heads].requires_grad_()


def bits(tensor):
    return from_torch(tensor, "")[0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_gradients_are_those_of_the_kernel_rounded_once(dtype):
    q, k, v = tensors(12, dtype)
    sink = sinks()
    out, lse = attention(q, k, v, packed((7, 5), SCALE), sink)
    d_out = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    out.backward(d_out)

    kind = from_torch(q, "")[1]
    parts = [tuple(np.ascontiguousarray(bits(x)[a:b]) for a, b in ((0, 7), (7, 12))) for x in (k, v)]
    at = np.concatenate([np.arange(7), np.arange(5)])
    inputs = tka1.Inputs(
        q=np.ascontiguousarray(bits(q)),
        request=np.repeat([0, 1], [7, 5]).astype(np.int32),
        families=(tka1.FamilyInput(*parts, (0, 0), tka1.Ranges(np.zeros(12, np.int64), at + 1)),),
        sink=bits(sink).copy(),
        scale_bits=scale_to_bits(SCALE),
        dtype=kind,
    )
    answer = tka1.attention(inputs)
    assert np.array_equal(bits(out), answer.out)
    assert np.array_equal(bits(lse), answer.lse)
    grads = tka1.backward(tka1.Backward(inputs, at, np.ascontiguousarray(bits(d_out)), kind))

    def rounded(words, dtype):
        return Bits.from_float32(Bits(words, DType.FLOAT32).to_float32(), dtype).data

    assert np.array_equal(bits(q.grad), rounded(grads.d_q, kind))
    for tensor, found in ((k, grads.families[0].keys), (v, grads.families[0].values)):
        assert np.array_equal(bits(tensor.grad), rounded(np.concatenate(found), kind))
    total = grads.d_sink[0].view(np.float32) + grads.d_sink[1].view(np.float32)
    assert np.array_equal(bits(sink.grad).view(np.float32), total)
    assert not lse.requires_grad


def test_the_forward_gives_the_same_bits_with_and_without_gradients():
    q, k, v = tensors(40)
    wanted = attention(q, k, v, packed((40,), SCALE), sinks())
    with torch.no_grad():
        unwanted = attention(q, k, v, packed((40,), SCALE), sinks())
    plain = attention(q.detach(), k.detach(), v.detach(), packed((40,), SCALE), sinks().detach())
    for one, two, three in zip(wanted, unwanted, plain, strict=True):
        assert np.array_equal(bits(one), bits(two))
        assert np.array_equal(bits(one), bits(three))


def test_autograd_in_float64_is_near():
    q, k, v = tensors(9, torch.float32)
    sink = sinks()
    out, _ = attention(q, k, v, packed((9,), SCALE, window=4), sink)
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(2))
    (out * weight).sum().backward()

    wide = [x.detach().double().requires_grad_() for x in (q, k, v, sink)]
    keys, values = (x.repeat_interleave(2, 1) for x in wide[1:3])
    x = torch.einsum("thd,shd->hts", wide[0], keys) * SCALE
    seen = torch.ones(9, 9, dtype=torch.bool).tril().triu(-3)
    x = torch.cat([x.masked_fill(~seen, -torch.inf), wide[3][:, None, None].expand(4, 9, 1)], 2)
    want = torch.einsum("hts,shd->thd", x.softmax(2)[:, :, :9], values)
    (want * weight).sum().backward()
    for got, exact in zip((q, k, v, sink), wide, strict=True):
        assert torch.allclose(got.grad.double(), exact.grad, rtol=0, atol=1e-5)


def test_one_tensor_for_keys_and_values_gets_the_sum():
    q, k, _ = tensors(9, torch.float32)
    out, _ = attention(q, k, None, packed((9,), SCALE))
    out.sum().backward()
    apart = [x.detach().clone().requires_grad_() for x in (q, k, k)]
    other, _ = attention(*apart, packed((9,), SCALE))
    other.sum().backward()
    assert torch.equal(out, other)
    assert torch.equal(k.grad, apart[1].grad + apart[2].grad)


def test_what_stands_beside_a_sequence_changes_no_bit_of_its_gradients():
    q, k, v = tensors(20)
    d_out = torch.randn(q.shape, generator=torch.Generator().manual_seed(3)).bfloat16()
    out, _ = attention(q, k, v, packed((8, 12), SCALE))
    out.backward(d_out)
    alone = [x.detach()[8:].clone().requires_grad_() for x in (q, k, v)]
    one, _ = attention(*alone, packed((12,), SCALE))
    one.backward(d_out[8:])
    for whole, part in zip((q, k, v), alone, strict=True):
        assert np.array_equal(bits(whole.grad)[8:], bits(part.grad))


def test_rows_of_padding_take_no_part():
    q, k, v = tensors(9)
    layout = packed((9,), SCALE)
    fewer = replace(
        layout,
        rows=layout.rows[:6],
        request=layout.request[:6],
        positions=layout.positions[:6],
        held=(layout.held[0][:6],),
        selection=tka1.Ranges(layout.selection.lo[:6], layout.selection.hi[:6]),
    )
    out, lse = attention(q, k, v, fewer)
    out.backward(torch.full_like(out, torch.nan).index_fill(0, torch.arange(6), 1.0))
    assert not out[6:].any()
    assert not lse[6:].any()
    for tensor in (q, k, v):
        assert not tensor.grad[6:].any()
        assert tensor.grad[:6].isfinite().all()
        assert tensor.grad[:6].any()


def test_a_second_backward_through_the_graph_is_refused_and_so_is_a_changed_tensor():
    q, k, v = tensors(4)
    out, _ = attention(q, k, v, packed((4,), SCALE))
    with torch.no_grad():
        k.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()
    double = [x.detach().double().requires_grad_() for x in (q, k, v)]
    with pytest.raises(Unsupported):
        attention(*double, packed((4,), SCALE))
