"""DeepSeek-V3.2: the rows that its indexer let the kernel read, and the expanded keys and values."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from tracekit.compare import Roundings, compare_envelope, envelope
from tracekit.engines.driver import greedy
from tracekit.errors import Unsupported
from tracekit.model import KVFamily, Lists
from tracekit.providers.base import Launch
from tracekit.providers.transformers import Transformers
from tracekit.providers.transformers_launch import relaunch

DENSE = KVFamily.DENSE
FORCED = [[9, 8, 7, 6], [5, 4, 9, 8]]


@pytest.fixture(params=["eager", "sdpa"])
def got(request, deepseek_v32, recorded, prompt):
    deepseek_v32.set_attn_implementation(request.param)
    return recorded(deepseek_v32, lambda m: greedy(m, [prompt(11, 1), prompt(30, 2)], 4, forced=FORCED))


@pytest.mark.parametrize("kernel", ["eager", "sdpa"])
def test_tokens_are_the_same_with_recording_on(kernel, deepseek_v32, recorded, prompt):
    deepseek_v32.set_attn_implementation(kernel)
    tokens = []
    got = recorded(deepseek_v32, lambda m: tokens.append(greedy(m, [prompt(25, 1)], 6)))

    assert tokens == [greedy(deepseek_v32, [prompt(25, 1)], 6)]
    assert got.session.problems == []
    assert all(line.complete for line in got.recording.ledger)


def test_the_selection_is_the_choice_of_the_module_cut_to_the_past(deepseek_v32, recorded, prompt):
    chosen = []
    module = deepseek_v32.model.layers[1].self_attn.indexer
    hook = module.register_forward_hook(lambda m, a, out: chosen.append(out[0].tolist()))
    got = recorded(deepseek_v32, lambda m: greedy(m, [prompt(30)], 4, forced=[FORCED[0]]))
    hook.remove()

    for step, lists in enumerate(chosen):
        call = got.at(layer=1, step=step)
        part = call.selection.families[DENSE]
        assert isinstance(part, Lists)
        for t, position in enumerate(call.rows.positions.tolist()):
            assert part.row(t).tolist() == sorted(i for i in lists[t] if i <= position)
            assert part.row(t).size == min(position + 1, 8)


def test_keys_and_values_are_expanded_per_head(got):
    for call in got.calls:
        rows = [call.kv[key][DENSE] for key in call.rows.requests]
        assert {r.keys.shape[1:] for r in rows} == {(2, 32)}
        assert {r.values.shape[1:] for r in rows} == {(2, 16)}
    assert [r.count for r in rows] == [14, 33]


def test_the_recorded_launch_gives_the_recorded_bits(got):
    provider = Transformers()
    for call in got.calls:
        for one in (call, replace(call, launch=None)):
            answer = provider.run(Launch((one,)))
            assert answer.tensors[0].out.same(call.out.bits), (call.layer, call.step)
        assert answer.executed == call.provenance.executed


def test_out_lies_in_its_envelope(got):
    for call in got.calls:
        bound = envelope(call, Roundings(call.conventions.score_dtype, call.conventions.probability_dtype))
        assert compare_envelope(call, bound, call.out.bits, None).outside.first is None


def test_tka1_as_a_backend_refuses_the_model(deepseek_v32, prompt):
    """Its indexer adds the mask to its scores, and the mask of TKA-1 is row numbers."""
    deepseek_v32.set_attn_implementation("tracekit")
    with pytest.raises(Unsupported, match="passes indices"), torch.no_grad():
        deepseek_v32(torch.tensor([prompt(9)]))


def test_padding_leaves_no_trace_in_the_choice(deepseek_v32, recorded, prompt):
    """Left padding moves slots, not rows: a sequence chooses the same alone and beside a longer one."""
    short, long = prompt(11, 1), prompt(30, 2)
    alone = recorded(deepseek_v32, lambda m: m(torch.tensor([short]))).indexer_calls[0]
    padded = recorded(deepseek_v32, lambda m: greedy(m, [short, long], 1)).indexer_calls[0]

    mine = padded.take(np.flatnonzero(padded.rows.request == 0))
    assert mine.rows.ids == alone.rows.ids
    assert [sorted(mine.top_k.row(t)) for t in range(11)] == [sorted(alone.top_k.row(t)) for t in range(11)]
    assert mine.keys[mine.rows.requests[0]].same(alone.keys[alone.rows.requests[0]])


def test_values_lie_in_the_rows_that_they_share_with_keys(got):
    """v is a part of wider rows: as recorded, so rebuilt, and nothing else is taken from a plan."""
    provider = Transformers()
    for call in got.calls:
        scalars = call.launch.scalars
        assert (scalars["v_layout"], scalars["v_row"], scalars["v_skip"]) == ("bshd", 32, 16)
        value = relaunch(call, call.launch).v
        held = value.shape[2]
        assert (value.stride(), value.storage_offset()) == ((held * 2 * 32, 32, 2 * 32, 1), 16)
    for wrong in ({"v_skip": 17}, {"v_skip": -1}, {"v_row": 1 << 40}, {"v_row": "x"}, {"v_row": True}):
        plan = replace(call.launch, scalars=scalars | wrong)
        assert "no usable v_row" in provider.refuses(replace(call, launch=plan))
    lacking = {name: value for name, value in scalars.items() if name != "v_skip"}
    plan = replace(call.launch, scalars=lacking)
    assert provider.refuses(replace(call, launch=plan)) == "its launch plan lacks v_skip"
