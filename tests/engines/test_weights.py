"""A history says under which weights its forwards ran; what was written behind torch makes it unknown."""

import pytest
import torch

from tracekit.engines import tiny
from tracekit.engines.driver import cache_argument, greedy
from tracekit.engines.transformers_proof import ProvenWeights
from tracekit.gate.recorded import Legality, judge
from tracekit.model.history import Unproven


def through_data(model):
    model.lm_head.weight.data.mul_(2)


def in_place(model):
    with torch.no_grad():
        model.lm_head.weight.mul_(2)


def optimizer_step(model):
    weight = model.lm_head.weight
    weight.grad = torch.ones_like(weight)
    torch.optim.SGD([weight], lr=0.5).step()


def generation(model, prompt, between, steps=4, fresh=False):
    """Prefill and decodes, with something between the second and the third; then maybe a new cache."""
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config)
    for step in range(steps):
        if step == 2:
            between(model)
            if fresh:
                cache = DynamicCache(config=model.config)
        ids = torch.tensor([prompt if step == 0 or (fresh and step == 2) else [7]])
        with torch.no_grad():
            model(input_ids=ids, use_cache=True, **{cache_argument(model): cache})


@pytest.fixture
def model():
    return tiny.build("tiny-qwen3")


def judged(got):
    return judge(got.recording, got.calls)


def test_weights_written_through_data_in_a_generation_are_never_legal(model, recorded, prompt):
    version = model.lm_head.weight._version
    got = recorded(model, lambda m: generation(m, prompt(5), through_data))
    assert model.lm_head.weight._version == version
    judgement = judged(got)
    assert judgement.status is Legality.UNKNOWN
    assert "steps 0 to 3 may have run under different weights" in judgement.reason
    assert ".data" in judgement.reason
    assert judgement.calls == len(got.calls)


def test_a_write_through_data_that_changes_nothing_leaves_a_legal_history(model, recorded, prompt):
    got = recorded(model, lambda m: generation(m, prompt(5), lambda m: m.lm_head.weight.data.mul_(1)))
    assert judged(got).status is Legality.LEGAL


def test_weights_written_through_data_before_an_optimizer_steps_are_seen(model, recorded, prompt):
    def both(m):
        through_data(m)
        optimizer_step(m)

    def run(m):
        generation(m, prompt(5), through_data, steps=3)
        optimizer_step(m)
        greedy(m, [prompt(5, 1)], 2)

    assert "steps 0 to 2" in judged(recorded(model, run)).reason
    # A write between the last forward and the update changes nothing that ran.
    fresh = tiny.build("tiny-qwen3")
    got = recorded(fresh, lambda m: generation(m, prompt(5), both, fresh=True))
    assert "steps 0 to 1" in judged(got).reason


def test_a_rollout_an_optimizer_step_and_a_rollout_are_legal(model, recorded, prompt):
    got = recorded(model, lambda m: generation(m, prompt(5), optimizer_step, fresh=True))
    assert judged(got).status is Legality.LEGAL


def test_an_update_that_nobody_announced_leaves_the_forwards_before_it_unproven(model, recorded, prompt):
    """A `.data` write before it would be hidden by the update itself."""
    got = recorded(model, lambda m: generation(m, prompt(5), in_place, fresh=True))
    judgement = judged(got)
    assert judgement.status is Legality.UNKNOWN
    assert "updated before their bytes could be read again" in judgement.reason


def test_what_is_illegal_stays_so_beside_a_doubt(model, recorded, prompt):
    got = recorded(model, lambda m: generation(m, prompt(5), in_place))
    assert any(isinstance(entry, Unproven) for entry in got.recording.history)
    assert judged(got).code == "G-KV-MODEL"


def test_stored_buffers_are_weights_and_others_are_not():
    doubts = []
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    model.register_buffer("bias", torch.zeros(2))
    model.register_buffer("cache", torch.zeros(2), persistent=False)
    weights = ProvenWeights(model, doubts.append)
    for step in range(2):
        assert not weights.changed(step)
        model.cache.data.add_(1)
    weights.settle()
    assert doubts == []
    model.bias.data.add_(1)
    assert not weights.changed(2)
    weights.settle()
    assert len(doubts) == 1


def test_weights_that_cannot_be_read_are_told_and_break_nothing():
    doubts = []
    model = torch.nn.Linear(2, 2, device="meta")
    weights = ProvenWeights(model, doubts.append)
    for step in range(2):
        weights.changed(step)
    weights.settle()
    assert len(doubts) == 1
    assert "cannot be read" in doubts[0]


def test_weights_of_inference_mode_are_watched_by_their_bytes():
    doubts = []
    with torch.inference_mode():
        model = torch.nn.Linear(2, 2)
        weights = ProvenWeights(model, doubts.append)
        for step in range(2):
            assert not weights.changed(step)
            model.weight.add_(1)
        weights.settle()
    assert "steps 0 to 1" in doubts[0]
