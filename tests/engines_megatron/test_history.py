"""Histories of training on Megatron: legal as they are; each planted violation has its code and place."""

from dataclasses import replace

import pytest
import torch

import tracekit
from tests.engines_megatron.conftest import WHOLE, backward, documents, padded, plain, run_ranks, train_steps
from tracekit.cli.main import run
from tracekit.engines import megatron_tiny as tiny
from tracekit.gate.recorded import Legality, judge
from tracekit.model.events import Finish, GateMode, Migrate, NewWeights, Preempt, ResetCache, Rollback, Sleep
from tracekit.model.history import Pass, PassBackward
from tracekit.recorder.api import CaptureIncomplete
from tracekit.store import write_trace

FIRST = {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1}
SELECTIVE = {"recompute_granularity": "selective", "recompute_modules": ("core_attn",)}
KERNEL = "megatron.dot_product"


@pytest.fixture
def trained(recorded):
    def train(action=train_steps, options=None, **filters):
        return recorded(tiny.gpt(**(options or {})), action, **filters)

    return train


def kinds(got):
    return [type(entry) for entry in got.recording.history]


@pytest.mark.parametrize(
    ("options", "recomputed"), [({}, ()), (WHOLE, (0, 1)), (SELECTIVE, (0, 1)), (FIRST, (0,))]
)
def test_training_over_two_optimizer_steps_is_legal(trained, options, recomputed):
    """Which layers were made again, and that each launch had its gradients once, under its own weights."""
    got = trained(options=options)
    judgement = judge(got.recording, got.calls)
    assert judgement.status is Legality.LEGAL
    assert judgement.calls == len(got.calls) == 4 * (2 + len(recomputed))
    assert kinds(got).count(NewWeights) == 2

    passes = [entry for entry in got.recording.history if isinstance(entry, Pass)]
    again = [entry for entry in passes if entry.rows[0].mode is GateMode.RECOMPUTE]
    assert [entry.layers for entry in again] == [recomputed] * (4 if recomputed else 0)
    assert {rows.mode for entry in passes if not entry.layers for rows in entry.rows} == {GateMode.TRAINING}
    half = len(passes) // 2
    assert [entry.model_version for entry in passes] == [0] * half + [1] * half

    gave = [entry for entry in got.recording.history if isinstance(entry, PassBackward)]
    owing = {(entry.step, layer) for entry in passes for layer in entry.owing}
    assert sorted((entry.step, layer) for entry in gave for layer in entry.layers) == sorted(owing)
    assert len(owing) == 8
    assert {entry.kernel for entry in gave} == {KERNEL}


@pytest.mark.parametrize(
    ("make", "lengths"), [(documents, (5, 3, 1)), (padded, (9, 4))], ids=["packed", "padded"]
)
def test_packed_and_padded_batches_are_legal(trained, make, lengths):
    got = trained(lambda model: train_steps(model, make, lengths), WHOLE)
    judgement = judge(got.recording, got.calls)
    assert (judgement.status, judgement.calls) == (Legality.LEGAL, 16)
    assert [rows.end for rows in got.recording.history[0].rows] == list(lengths)


def test_filters_leave_a_history_that_can_be_proved(trained):
    got = trained(options=FIRST, layers=[0])
    judgement = judge(got.recording, got.calls)
    assert (judgement.status, judgement.calls) == (Legality.LEGAL, 8)
    got = trained(options=WHOLE, steps=[0, 1, 4])
    judgement = judge(got.recording, got.calls)
    assert (judgement.status, judgement.calls, judgement.assumed) == (Legality.LEGAL, 6, 10)


# what changes the weights


class Main(torch.optim.Optimizer):
    """As Megatron's mixed-precision optimizers: steps FP32 copies, and writes the model through `.data`."""

    def __init__(self, model):
        self.model = list(model.parameters())
        for parameter in self.model:
            parameter.main_param = parameter.detach().clone().float()
        super().__init__([parameter.main_param for parameter in self.model], {})

    @torch.no_grad()
    def step(self, closure=None):
        for parameter in self.model:
            parameter.main_param += 0.01
            parameter.data.copy_(parameter.main_param)


def marks(model):
    return [(parameter.data_ptr(), parameter._version) for parameter in model.parameters()]


def test_a_step_that_writes_through_data_is_new_weights(trained):
    def train(model):
        model.train()
        optimizer = Main(model)
        for seed in range(2):
            backward(plain(8, seed=seed), model)
            before = marks(model)
            optimizer.step()
            assert marks(model) == before  # nothing in torch says so

    got = trained(train)
    assert judge(got.recording, got.calls).status is Legality.LEGAL
    assert kinds(got) == [Pass, PassBackward, NewWeights] * 2


def test_a_step_of_another_model_is_none(trained):
    other = torch.nn.Linear(2, 2)
    stranger = torch.optim.SGD(other.parameters(), lr=0.1)

    def train(model):
        loss = plain(8).forward(model.train()).float().pow(2).mean()
        other(torch.ones(2)).sum().backward()
        stranger.step()
        loss.backward()

    got = trained(train)
    assert judge(got.recording, got.calls).status is Legality.LEGAL
    assert kinds(got) == [Pass, PassBackward]


def test_the_optimizers_of_one_step_make_one_version(trained):
    """Dense and expert parameters have an optimizer each; nothing runs between their steps."""

    def train(model):
        model.train()
        parts = [list(layer.parameters()) for layer in model.decoder.layers]
        optimizers = [torch.optim.SGD(part, lr=0.01) for part in parts]
        for seed in range(2):
            backward(plain(8, seed=seed), model)
            for optimizer in optimizers:
                optimizer.step()

    got = trained(train)
    assert [e for e in got.recording.history if isinstance(e, NewWeights)] == [NewWeights(1), NewWeights(2)]


def test_weights_that_are_loaded_are_new(trained):
    def train(model):
        backward(plain(8), model.train())
        model.load_state_dict(model.state_dict())
        backward(plain(8, seed=1), model)

    got = trained(train)
    assert judge(got.recording, got.calls).status is Legality.LEGAL
    assert kinds(got) == [Pass, PassBackward, NewWeights, Pass, PassBackward]


@pytest.mark.parametrize(
    ("options", "code", "step"), [({}, "G-BACKWARD-STALE", 0), (WHOLE, "G-RECOMPUTE-VERSION", 1)]
)
def test_a_step_between_a_forward_and_its_backward_is_not_legal(trained, options, code, step):
    """Seen, not planted: torch does not notice where the weights are written through `.data`."""

    def train(model):
        loss = plain(8).forward(model.train()).float().pow(2).mean()
        Main(model).step()
        loss.backward()

    got = trained(train, options)
    judgement = judge(got.recording, got.calls)
    assert (judgement.status, judgement.code) == (Legality.ILLEGAL, code)
    assert (judgement.place["step"], judgement.place["entry"]) == (step, 2)
    assert judgement.place["layer"] in (0, 1)


# graphs that are kept, and what fails


@pytest.mark.parametrize("options", [{}, WHOLE], ids=["plain", "recompute"])
@pytest.mark.filterwarnings("ignore::tracekit.recorder.api.CaptureIncomplete")
def test_gradients_of_a_graph_that_was_kept_may_come_again(trained, options):
    def train(model):
        loss = plain(8).forward(model.train()).float().pow(2).mean()
        loss.backward(retain_graph=True)
        loss.backward()

    got = trained(train, options)
    judgement = judge(got.recording, got.calls)
    assert judgement.status is Legality.LEGAL, judgement.reason
    gave = [entry for entry in got.recording.history if isinstance(entry, PassBackward)]
    assert [entry.layers for entry in gave] == [(1, 0), (1, 0)]
    # Of a checkpointed layer each backward has a launch of its own, and that graph is not kept.
    assert [entry.retained for entry in gave] == [not options, False]


def test_a_forward_that_fails_drops_its_rows(trained):
    def train(model):
        backward(plain(8), model.train())
        hook = model.decoder.layers[1].register_forward_pre_hook(fails)
        with pytest.raises(ArithmeticError):
            backward(plain(8, seed=1), model)
        hook.remove()
        backward(plain(8, seed=2), model)

    def fails(*_):
        raise ArithmeticError("planted")

    with pytest.warns(CaptureIncomplete, match="step 1"):
        got = trained(train)
    passes = [entry for entry in got.recording.history if isinstance(entry, Pass)]
    assert [entry.failed for entry in passes] == [False, True, False]
    judgement = judge(got.recording, got.calls)
    assert judgement.status is Legality.UNKNOWN
    assert "step 1 lost calls" in judgement.reason


def test_a_recompute_that_fails_gives_no_gradients(trained):
    def train(model):
        loss = plain(8).forward(model.train()).float().pow(2).mean()
        hook = model.decoder.layers[0].mlp.register_forward_pre_hook(fails)
        with pytest.raises(ArithmeticError):
            loss.backward()
        hook.remove()

    def fails(*_):
        raise ArithmeticError("planted")

    with pytest.warns(CaptureIncomplete):
        got = trained(train, WHOLE)
    assert [entry.failed for entry in got.recording.history if isinstance(entry, Pass)] == [False, True]
    # Layer 1 was made again and had its gradients; layer 0 failed behind its attention, and had none.
    gave = [entry for entry in got.recording.history if isinstance(entry, PassBackward)]
    assert [(entry.step, entry.layers) for entry in gave] == [(1, (1,))]
    assert judge(got.recording, got.calls).status is Legality.LEGAL


def test_each_of_two_ranks_has_a_history_that_is_legal(tmp_path):
    """Tensor parallel over gloo: each process trains on its heads, and proves what it did itself."""
    torch.save(dict(tiny.gpt(softmax_type="learnable").named_parameters()), tmp_path / "weights.pt")
    paths = run_ranks(tmp_path, "whole")
    told = []
    for path in paths:
        judgement = tracekit.history(path)
        assert (judgement.status, judgement.calls) == (Legality.LEGAL, 16)
        with tracekit.open(path) as trace:
            assert trace.recording.share.tensor_size == 2
            told.append(trace.recording.history)
    assert told[0] == told[1]


# planted violations: what is changed, the code, the entry that is refused (None: the end)


@pytest.fixture(scope="module")
def whole(recorded):
    """Layer 0 is checkpointed: entries 0 to 3 are a forward, gradients of layer 1, recompute, those of 0."""
    return recorded(tiny.gpt(**FIRST), train_steps)


def insert(at, *events):
    return lambda history, calls: ((*history[:at], *events, *history[at:]), calls)


def change(at, **fields):
    return lambda history, calls: ((*history[:at], replace(history[at], **fields), *history[at + 1 :]), calls)


def without(at, *steps):
    return lambda history, calls: (
        (*history[:at], *history[at + 1 :]),
        [call for call in calls if call.step not in steps],
    )


def twice(at):
    return lambda history, calls: ((*history[: at + 1], *history[at:]), calls)


def both(*changes):
    def changed(history, calls):
        for one in changes:
            history, calls = one(history, calls)
        return history, calls

    return changed


def first_request(event, *fields):
    return lambda history, calls: insert(1, event(history[0].rows[0].request, *fields))(history, calls)


def recompute_first(history, calls):
    return (history[2], *history[:2], *history[3:]), calls


def a_launch_is_missing(history, calls):
    return history, [call for call in calls if (call.step, call.layer) != (1, 0)]


PLANTED = {
    "gradients without a forward": (without(0, 0), "G-BACKWARD", 0),
    "gradients of a launch that was to be made again": (change(1, layers=(1, 0)), "G-BACKWARD", 1),
    "gradients twice": (twice(1), "G-BACKWARD-TWICE", 2),
    "gradients of another kernel": (change(1, kernel="torch.flash"), "G-BACKWARD", 1),
    "a backward behind the optimizer's step": (insert(5, NewWeights(1)), "G-BACKWARD-STALE", 6),
    "a backward that says it ran under newer weights": (change(1, model_version=1), "G-BACKWARD-STALE", 1),
    "a recompute under newer weights": (
        both(change(2, model_version=1), insert(2, NewWeights(1))),
        "G-RECOMPUTE-VERSION",
        3,
    ),
    "a recompute under older weights": (insert(2, NewWeights(1)), "G-MODEL-STALE", 3),
    "a recompute before its forward": (recompute_first, "G-RECOMPUTE-UNKNOWN", 0),
    "a recompute of a layer that it is not of": (change(2, layers=(1,)), "G-TRACE-CALL", 2),
    "a recompute whose launch is missing": (a_launch_is_missing, "G-TRACE-CALL", 2),
    "an update that nobody told": (without(8), "G-MODEL-UNKNOWN", 8),
    "weights that go back": (insert(9, NewWeights(1)), "G-VERSION-BACK", 9),
    "rows of a cache that was reset": (insert(4, ResetCache(1)), "G-CACHE-RESET", 5),
    "a launch of a sleeping engine": (insert(4, Sleep()), "G-ASLEEP", 5),
    "a preemption of what has no cache": (first_request(Preempt), "G-REQUEST-STATE", 1),
    "a rollback of what has no cache": (first_request(Rollback, 2), "G-REQUEST-STATE", 1),
    "a migration of what has no cache": (first_request(Migrate, 1), "G-REQUEST-STATE", 1),
    "a request that ends twice": (both(first_request(Finish), first_request(Finish)), "G-REQUEST-STATE", 2),
    "a call in no pass": (lambda h, c: (h[:-4], c), "G-TRACE-CALL", None),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_violation_is_refused_with_its_code_and_place(whole, name):
    plant, code, at = PLANTED[name]
    history, calls = plant(whole.recording.history, whole.calls)
    judgement = judge(replace(whole.recording, history=history), calls)

    assert (judgement.status, judgement.code) == (Legality.ILLEGAL, code)
    assert judgement.place.get("entry") == at
    assert code in judgement.reason
    if at is not None and isinstance(history[at], Pass | PassBackward):
        assert judgement.place["step"] == history[at].step
        assert "layer" in judgement.place or code == "G-ASLEEP"


# in the file, and asked for by name


def test_it_is_stored_and_proved_again_from_the_file(whole, tmp_path, capsys):
    path = tmp_path / "train.h5"
    write_trace(path, whole.recording, whole.calls)
    with tracekit.open(path) as opened:
        assert opened.recording.history == whole.recording.history
    assert run(["verify", "--history", str(path)]) == 0
    assert "history legal: 18 entries" in capsys.readouterr().out

    history, calls = PLANTED["a backward behind the optimizer's step"][0](
        whole.recording.history, whole.calls
    )
    write_trace(path, replace(whole.recording, history=history), calls)
    assert run(["verify", "--history", str(path)]) == 1
    assert "G-BACKWARD-STALE" in capsys.readouterr().out
