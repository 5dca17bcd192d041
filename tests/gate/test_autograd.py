"""The gate around a differentiable kernel: its own backward, any order of rows, no cost of failures."""

import numpy as np
import pytest
import torch

from tracekit.errors import GateRefused
from tracekit.gate import RequestGate
from tracekit.gate.autograd import EAGER, SDPA, Kernel, attend
from tracekit.model import Mode, RequestKey, Rows
from tracekit.model.events import Backward, NewWeights

LENGTHS, HEADS, KV_HEADS, DIM = (7, 5), 4, 2, 8
SCALE = DIM**-0.5
REQUESTS = tuple(RequestKey.of_prompt([number]) for number in range(len(LENGTHS)))


def rows_of(order=None):
    request = np.repeat(np.arange(len(LENGTHS)), LENGTHS)
    positions = np.concatenate([np.arange(length) for length in LENGTHS])
    rows = Rows(REQUESTS, request, positions, np.full(positions.shape, -1))
    return rows if order is None else rows.take(order)


def tensors(order=None):
    torch.manual_seed(0)
    total = sum(LENGTHS)
    made = [torch.randn(total, heads, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    if order is not None:
        made = [x[torch.from_numpy(order)] for x in made]
    return [x.clone().requires_grad_() for x in made]


def d_out(order=None):
    made = torch.randn(sum(LENGTHS), HEADS, DIM, generator=torch.Generator().manual_seed(1))
    return made if order is None else made[torch.from_numpy(order)]


@pytest.fixture
def gate():
    return RequestGate()


@pytest.mark.parametrize("kernel", [EAGER, SDPA], ids=lambda kernel: kernel.id)
def test_answer_and_gradients_are_those_of_the_kernel_alone(gate, kernel):
    from tracekit.gate.autograd import _mask

    q, k, v = tensors()
    out = attend(gate, kernel, q, k, v, rows_of(), layer=0, scale=SCALE)
    out.backward(d_out())
    p, r, s = tensors()
    plain = kernel.forward(p, r, s, _mask(rows_of()), np.float32(SCALE).item())
    plain.backward(d_out())

    assert torch.equal(out, plain)
    assert all(torch.equal(a.grad, b.grad) for a, b in zip((q, k, v), (p, r, s), strict=True))
    assert not gate.ledger.pending
    assert gate.ledger.epoch == 2


def in_order(rows, by_place=0.0):
    """Eager attention that first puts rows in the order of requests and positions: any order, the same bits.

    With `by_place` it adds something that depends on where a row stands: the broken twin.
    """
    index = torch.from_numpy(np.lexsort((rows.positions, rows.request)))

    def forward(q, k, v, mask, scale):
        out = EAGER.forward(q[index], k[index], v[index], mask[index][:, index], scale)
        return out[torch.argsort(index)] + by_place * torch.arange(len(q))[:, None, None]

    return Kernel("in order", forward)


@pytest.mark.parametrize("seed", range(3))
def test_reordered_rows_have_the_same_bits_forward_and_backward(seed):
    order = np.random.default_rng(seed).permutation(sum(LENGTHS))
    back = torch.from_numpy(np.argsort(order))
    gate = RequestGate(prove=True)
    base, moved = tensors(), tensors(order)
    out = attend(gate, in_order(rows_of()), *base, rows_of(), layer=0, scale=SCALE)
    out.backward(d_out())
    rows = rows_of(order)
    again = attend(gate, in_order(rows), *moved, rows, layer=0, scale=SCALE, mode=Mode.RECOMPUTE)
    again.backward(d_out(order))

    assert torch.equal(again[back], out)
    assert all(torch.equal(b.grad[back], a.grad) for a, b in zip(base, moved, strict=True))


def test_a_kernel_that_depends_on_the_place_of_a_row_is_refused():
    order = np.random.default_rng(1).permutation(sum(LENGTHS))
    gate = RequestGate(prove=True)
    attend(gate, in_order(rows_of(), 1e-3), *tensors(), rows_of(), layer=0, scale=SCALE)
    rows, before = rows_of(order), gate.digest
    with pytest.raises(GateRefused) as refused:
        attend(gate, in_order(rows, 1e-3), *tensors(order), rows, layer=0, scale=SCALE, mode=Mode.RECOMPUTE)
    assert (refused.value.rule, refused.value.fields["tensor"]) == ("G-BYTES", "out")
    assert gate.digest == before


class Fails(torch.autograd.Function):
    """The identity, whose backward fails as often as it is told to."""

    left = 0
    how = "raises"

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        if Fails.left:
            Fails.left -= 1
            if Fails.how == "raises":
                raise ArithmeticError("an illegal memory access was encountered")
            return torch.full_like(grad, torch.nan)
        return grad


@pytest.mark.parametrize(("how", "error"), [("raises", ArithmeticError), ("nan", GateRefused)])
def test_a_backward_that_fails_commits_nothing_and_runs_again(gate, how, error):
    kernel = Kernel("failing", lambda q, k, v, m, s: EAGER.forward(Fails.apply(q), k, v, m, s))
    q, k, v = tensors()
    out = attend(gate, kernel, q, k, v, rows_of(), layer=0, scale=SCALE)
    before = gate.digest
    Fails.left, Fails.how = 1, how

    with pytest.raises(error):
        out.backward(d_out(), retain_graph=True)
    assert gate.digest == before
    assert (q.grad, k.grad, v.grad) == (None, None, None)

    out.backward(d_out())
    assert gate.digest != before
    wanted = tensors()
    attend(RequestGate(), EAGER, *wanted, rows_of(), layer=0, scale=SCALE).backward(d_out())
    assert all(torch.equal(a.grad, b.grad) for a, b in zip((q, k, v), wanted, strict=True))


def test_a_gradient_that_comes_in_broken_is_refused(gate):
    out = attend(gate, EAGER, *tensors(), rows_of(), layer=3, scale=SCALE)
    before = gate.digest
    with pytest.raises(GateRefused) as refused:
        out.backward(torch.full_like(out, torch.inf))
    assert refused.value.rule == "G-NON-FINITE"
    assert refused.value.fields == {"layer": 3, "tensor": "d_out"}
    assert gate.digest == before


def test_a_backward_runs_once(gate):
    out = attend(gate, EAGER, *tensors(), rows_of(), layer=0, scale=SCALE)
    out.backward(d_out(), retain_graph=True)
    before = gate.digest
    with pytest.raises(GateRefused) as refused:
        out.backward(d_out())
    assert refused.value.rule == "G-BACKWARD"
    assert gate.digest == before


def test_a_forward_is_never_paired_with_another_backward(gate):
    attend(gate, EAGER, *tensors(), rows_of(), layer=0, scale=SCALE)
    with pytest.raises(GateRefused) as refused:
        gate.tell(Backward(gate.ledger.epoch, SDPA.id))
    assert refused.value.rule == "G-BACKWARD"
    assert "torch.sdpa" in str(refused.value)


def test_a_backward_after_a_weight_update_is_refused(gate):
    out = attend(gate, EAGER, *tensors(), rows_of(), layer=0, scale=SCALE)
    gate.tell(NewWeights(1))
    with pytest.raises(GateRefused) as refused:
        out.backward(d_out())
    assert refused.value.rule == "G-BACKWARD-STALE"


def test_an_answer_that_is_no_number_has_no_backward(gate):
    broken = Kernel("nan", lambda q, k, v, m, s: EAGER.forward(q, k, v, m, s) * torch.nan)
    before = gate.digest
    with pytest.raises(GateRefused) as refused:
        attend(gate, broken, *tensors(), rows_of(), layer=0, scale=SCALE)
    assert refused.value.rule == "G-NON-FINITE"
    assert gate.digest == before
    attend(gate, EAGER, *tensors(), rows_of(), layer=0, scale=SCALE)


def test_layers_and_activations_computed_again(gate):
    for layer in range(2):
        attend(gate, EAGER, *tensors(), rows_of(), layer=layer, scale=SCALE)
    for layer in (1, 0):
        out = attend(gate, EAGER, *tensors(), rows_of(), layer=layer, scale=SCALE, mode=Mode.RECOMPUTE)
        out.backward(d_out())
    assert len(gate.ledger.pending) == 2  # the forwards whose activations were dropped


def test_without_gradients_nothing_waits(gate):
    with torch.no_grad():
        attend(gate, EAGER, *tensors(), rows_of(), layer=0, scale=SCALE)
    assert gate.ledger.epoch == 1
