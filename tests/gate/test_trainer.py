"""A trainer of a few lines with the gate in it and no recording: the bits are those without it."""

import numpy as np
import pytest
import torch

import tracekit
from tests.gate.test_autograd import Fails, in_order
from tracekit.errors import GateRefused
from tracekit.gate.autograd import EAGER, SDPA, Kernel, attend
from tracekit.model import RequestKey, Rows
from tracekit.model.events import NewWeights

VOCABULARY, WIDTH, HEADS, DIM, STEPS = 31, 32, 4, 8, 3
SCALE = DIM**-0.5


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = torch.nn.Linear(WIDTH, 3 * WIDTH)
        self.out = torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden, attention):
        q, k, v = self.qkv(hidden).unflatten(-1, (3, HEADS, DIM)).unbind(1)
        return hidden + self.out(attention(q, k, v).flatten(1))


class Model(torch.nn.Module):
    """Packed rows `[T]` of tokens to logits `[T, V]`; attention is given, layer by layer."""

    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(VOCABULARY, WIDTH)
        self.layers = torch.nn.ModuleList([Layer(), Layer()])
        self.head = torch.nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens, attention):
        hidden = self.embedding(tokens)
        for number, layer in enumerate(self.layers):
            hidden = layer(hidden, attention(number))
        return self.head(hidden)


def batch(step, lengths=(7, 4, 5)):
    """The packed rows of one step: every step has sequences of its own."""
    tokens = [np.random.default_rng(100 * step + n).integers(0, VOCABULARY, n) for n in lengths]
    return Rows(
        tuple(RequestKey.of_prompt(sequence) for sequence in tokens),
        np.repeat(np.arange(len(lengths)), lengths),
        np.concatenate([np.arange(n) for n in lengths]),
        np.concatenate(tokens),
    )


def plain(kernel):
    """Attention without a gate."""

    def of(rows):
        same = rows.request[:, None] == rows.request[None, :]
        mask = torch.from_numpy(same & (rows.positions[None, :] <= rows.positions[:, None]))
        return lambda layer: lambda q, k, v: kernel(rows).forward(q, k, v, mask, np.float32(SCALE).item())

    return of


def gated(gate, kernel):
    """Attention through a gate."""

    def of(rows):
        return lambda layer: (
            lambda q, k, v: attend(gate, kernel(rows), q, k, v, rows, layer=layer, scale=SCALE)
        )

    return of


def loss_of(model, rows, attention):
    return model(torch.from_numpy(rows.token_ids.copy()), attention(rows)).square().mean()


def train(attention, stepped=lambda: None):
    """Return the model and the losses of some steps."""
    torch.manual_seed(0)
    model, losses = Model(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(model, batch(step), attention)
        loss.backward()
        optimizer.step()
        stepped()
        losses.append(loss.item())
    return model, losses


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


@pytest.fixture
def gate():
    return tracekit.RequestGate()


def step_told(gate):
    return lambda: gate.tell(NewWeights(gate.ledger.model_version + 1))


@pytest.mark.parametrize("kernel", [EAGER, SDPA], ids=lambda kernel: kernel.id)
def test_training_has_the_same_bits_with_a_gate_and_without(gate, kernel):
    model, losses = train(gated(gate, lambda _: kernel), step_told(gate))
    wanted, without = train(plain(lambda _: kernel))
    assert losses == without
    assert len(set(losses)) == STEPS
    assert same(model, wanted)
    # Each step: two launches and two backwards; every launch had the backward of its own forward.
    assert (gate.ledger.epoch, gate.ledger.model_version) == (4 * STEPS, STEPS)
    assert not gate.ledger.pending
    assert {request.phase for request in gate.ledger.requests.values()} == {"training"}


def reordered(gate, order):
    """The rows of the kernel in another order, as another packing brings them."""
    there = torch.from_numpy(order)
    back = torch.argsort(there)

    def of(rows):
        mixed = rows.take(order)
        return lambda layer: (
            lambda q, k, v: attend(
                gate, in_order(mixed), q[there], k[there], v[there], mixed, layer=layer, scale=SCALE
            )[back]
        )

    return of


@pytest.mark.parametrize("seed", range(3))
def test_reordered_rows_train_to_the_same_bits(gate, seed):
    order = np.random.default_rng(seed).permutation(batch(0).count)
    model, losses = train(reordered(gate, order), step_told(gate))
    wanted, without = train(plain(lambda _: EAGER))
    assert losses == without
    assert same(model, wanted)
    assert not gate.ledger.pending


@pytest.mark.parametrize("how", ["raises", "nan"])
def test_a_backward_that_fails_in_one_layer_commits_none_and_runs_again(gate, how):
    """Layer 1 has its gradients, layer 0 fails: in a transaction neither is committed."""
    failing = Kernel("failing", lambda q, k, v, m, s: EAGER.forward(Fails.apply(q), k, v, m, s))
    torch.manual_seed(0)
    model, rows, calls = Model(), batch(0), []
    Fails.how = how

    def reaches_layer_0(*_):
        Fails.left = 1 - len(calls)  # the first time only
        calls.append(1)

    model.layers[0].out.register_full_backward_hook(reaches_layer_0)
    loss = loss_of(model, rows, gated(gate, lambda _: failing))
    before = gate.digest

    with pytest.raises((ArithmeticError, GateRefused)), gate.transaction():
        loss.backward(retain_graph=True)
    assert len(calls) == 1
    assert gate.digest == before
    assert len(gate.ledger.pending) == 2

    model.zero_grad()
    with gate.transaction():
        loss.backward()
    assert not gate.ledger.pending
    torch.manual_seed(0)
    wanted = Model()
    loss_of(wanted, rows, plain(lambda _: EAGER)).backward()
    grads = [[p.grad for p in one.parameters()] for one in (model, wanted)]
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_a_step_before_the_backward_is_refused_and_no_gradient_arrives(gate):
    torch.manual_seed(0)
    model, rows = Model(), batch(0)
    loss = loss_of(model, rows, gated(gate, lambda _: EAGER))
    step_told(gate)()
    before = gate.digest
    with pytest.raises(GateRefused) as refused:
        loss.backward()
    assert refused.value.rule == "G-BACKWARD-STALE"
    assert gate.digest == before
    assert all(parameter.grad is None for parameter in model.embedding.parameters())


def test_rows_out_of_turn_are_refused_before_the_kernel_runs(gate):
    """A trainer that packs the middle of a sequence, or forgets a row of it."""
    ran = []
    counting = Kernel("counting", lambda *given: ran.append(1) or EAGER.forward(*given))
    torch.manual_seed(0)
    model, rows = Model(), batch(0)
    for wrong, code in (
        (rows.take(np.arange(1, 7)), "G-TRAINING-START"),
        (rows.take([0, 2, 3]), "G-ROWS-GAP"),
    ):
        before = gate.digest
        with pytest.raises(GateRefused) as refused:
            loss_of(model, wrong, gated(gate, lambda _: counting))
        assert refused.value.rule == code
        assert (gate.digest, ran) == (before, [])
