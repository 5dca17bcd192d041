"""The joint plan of DeepSeek-V4: live and again from the file, the same plan and the same bits."""

from dataclasses import replace

import numpy as np
import pytest
import torch

import tracekit
from tracekit.engines.driver import greedy
from tracekit.errors import GateRefused
from tracekit.gate.plan import joint_plan
from tracekit.model import Bits, DType, KVFamily, KVRows, Lists, Ranges, Selection
from tracekit.providers.base import Launch
from tracekit.providers.transformers import Transformers
from tracekit.store import write_trace

RECENT, C4, C128 = KVFamily.RECENT, KVFamily.C4, KVFamily.C128
PROMPT, STEPS, WINDOW = 125, 8, 128


@pytest.fixture(scope="module")
def live(_models, recorded, prompt):
    """A generation across 127 and 128, and what the eager function was given at each of its calls."""
    from transformers.models.deepseek_v4 import modeling_deepseek_v4 as model_file

    seen = []
    eager = model_file.eager_attention_forward

    def spy(module, q, k, v, mask, **kwargs):
        answer = eager(module, q, k, v, mask, **kwargs)
        seen.append((module.layer_idx, k is v, mask.clone(), q.shape[2], answer[0].clone()))
        return answer

    model = _models["tiny-deepseek-v4"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model_file, "eager_attention_forward", spy)
        got = recorded(model, lambda m: greedy(m, [prompt(PROMPT)], STEPS, forced=[prompt(STEPS, 3)]))
    return got, seen


@pytest.fixture(scope="module")
def plans(live):
    return [joint_plan(call) for call in live[0].calls]


def test_the_plan_is_what_the_live_mask_lets_each_row_read(live, plans):
    """From the mask alone: its last columns are compressed rows, those before are the window's."""
    seen = live[1]
    assert len(seen) == len(plans) == 3 * STEPS
    for plan, (layer, shared, mask, count, _) in zip(plans, seen, strict=True):
        end = plan.rows[-1].position + 1
        ratio = {0: None, 1: 4, 2: 128}[layer]
        compressed = 0 if ratio is None else end // ratio
        recent = mask.shape[-1] - compressed
        assert shared
        assert (plan.layer, len(plan.rows)) == (layer, count)
        for t, candidates in enumerate(plan.candidates):
            open_columns = np.flatnonzero((mask[0, 0, t] == 0).numpy())
            window = open_columns[open_columns < recent] + (end - recent)
            rows = open_columns[open_columns >= recent] - recent
            read = dict(candidates)
            assert read.pop(RECENT).tolist() == window.tolist()
            assert [ids.tolist() for ids in read.values()] == ([rows.tolist()] if ratio else [])


@pytest.mark.parametrize(
    ("layer", "position", "recent", "compressed"),
    [
        (1, 2, 3, 0),
        (1, 3, 4, 1),
        (2, 126, 127, 0),
        (2, 127, 128, 1),
        (2, 128, 128, 1),
        (0, 127, 128, 0),
        (0, 128, 128, 0),
    ],
)
def test_the_boundaries(plans, layer, position, recent, compressed):
    (read,) = (
        dict(candidates)
        for plan in plans
        if plan.layer == layer
        for row, candidates in zip(plan.rows, plan.candidates, strict=True)
        if row.position == position
    )
    assert read.pop(RECENT).size == recent
    assert sum(ids.size for ids in read.values()) == compressed


def test_each_layer_has_its_kind(plans):
    assert [plan.kind for plan in plans[:3]] == ["C0", "C4", "C128"]
    assert {plan.window for plan in plans} == {WINDOW}
    assert all(next(iter(dict(c))) is RECENT for plan in plans for c in plan.candidates)  # as executed


def test_the_trace_gives_the_same_plan_and_the_same_bits(live, plans, tmp_path):
    got, seen = live
    write_trace(tmp_path / "x.h5", got.recording, got.calls)
    with tracekit.open(tmp_path / "x.h5") as trace:
        for call, plan, (*_, out) in zip(trace, plans, seen, strict=True):
            assert joint_plan(call).digest == plan.digest
            answer = Transformers().run(Launch((call,))).tensors[0].out
            wanted = out[0].contiguous().view(torch.int16).numpy().view(np.uint16)
            assert np.array_equal(answer.data, wanted)


def test_the_order_of_rows_is_not_in_the_plan(live, plans):
    call = live[0].calls[1]
    order = np.random.default_rng(0).permutation(call.num_rows)
    assert joint_plan(call.take(order)).digest == plans[1].digest


def test_the_plan_is_owned(live):
    call = live[0].calls[1]
    before = joint_plan(call)
    digest = before.digest
    for candidates in joint_plan(call).candidates:
        for _, ids in candidates:
            ids += 1
    assert before.digest == digest == joint_plan(call).digest


def with_family(call, family, part):
    return replace(call, selection=Selection({**call.selection.families, family: part}), launch=None)


def wide(call):
    kv = {k: {f: KVRows(r.keys, r.keys, r.first) for f, r in kv.items()} for k, kv in call.kv.items()}
    return call.with_kv(kv)


def short_window(call):
    part = call.selection.families[RECENT]
    return with_family(call, RECENT, Ranges(np.minimum(part.lo + 1, part.hi - 1), part.hi))


def no_compressed(call):
    family = next(family for family in call.selection.families if family is not RECENT)
    return with_family(call, family, Lists.of([np.zeros(0, np.int64)] * call.num_rows))


def other_family(call):
    families = {KVFamily.DENSE: call.selection.families[RECENT]}
    kv = {k: {KVFamily.DENSE: kv[RECENT]} for k, kv in call.kv.items()}
    return replace(call, kv=kv, selection=Selection(families), launch=None)


def other_scale(call):
    bits = call.conventions.scale_bits + 1
    return replace(call, conventions=replace(call.conventions, scale_bits=bits))


@pytest.mark.parametrize(
    ("change", "layer", "code"),
    [
        (other_family, 0, "G-PLAN-FAMILIES"),
        (wide, 0, "G-PLAN-SHARED"),
        (short_window, 0, "G-PLAN-WINDOW"),
        (no_compressed, 2, "G-PLAN-ROWS"),
        (other_scale, 0, "G-PLAN-SCALE"),
    ],
)
def test_what_is_no_joint_attention_is_refused(live, change, layer, code):
    call = next(c for c in live[0].calls if c.layer == layer and c.rows.positions.max() >= 128)
    with pytest.raises(GateRefused) as refused:
        joint_plan(change(call))
    assert refused.value.rule == code


def test_a_row_that_is_not_complete_and_a_sink_of_another_shape_are_refused(live):
    """The model refuses both in a call that it checks; the plan does not rely on that."""
    call = next(c for c in live[0].calls if c.layer == 1)
    early = call.take(np.array([2]))
    object.__setattr__(
        early, "selection", Selection({**early.selection.families, C4: Lists.of([np.array([0])])})
    )
    with pytest.raises(GateRefused) as refused:
        joint_plan(early)
    assert refused.value.rule == "G-PLAN-ROWS"
    wrong = replace(call)
    object.__setattr__(wrong, "sink", Bits(np.zeros(call.num_heads + 1, np.uint32), DType.FLOAT32))
    with pytest.raises(GateRefused) as refused:
        joint_plan(wrong)
    assert refused.value.rule == "G-PLAN-SINK"
