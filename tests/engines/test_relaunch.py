"""Provider `transformers`: the engine's own function on the recorded launch gives the recorded bits."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AttentionInterface

from tracekit.engines.driver import greedy
from tracekit.errors import Unsupported
from tracekit.providers.base import Execution, Launch, Provider
from tracekit.providers.transformers import Transformers
from tracekit.providers.transformers_launch import fresh, relaunch
from tracekit.testing import dense_call

CASES = [("qwen3", "sdpa"), ("qwen3", "eager"), ("gpt_oss", "eager")]


@pytest.fixture
def calls(request, recorded, prompt):
    """Prefill and decode, past the window, padded and not."""
    name, kernel = request.param
    model = request.getfixturevalue(name)
    model.set_attn_implementation(kernel)
    alone = recorded(model, lambda m: greedy(m, [prompt(33)], 4)).calls
    return [*alone, *recorded(model, lambda m: greedy(m, [prompt(5, 1), prompt(25, 2)], 4)).calls]


@pytest.mark.parametrize("calls", CASES, indirect=True, ids="-".join)
def test_the_recorded_launch_gives_the_recorded_bits(calls):
    provider = Transformers()
    for call in calls:
        answer = provider.run(Launch((call,)))
        assert answer.tensors[0].out.same(call.out.bits), (call.layer, call.step)
        assert answer.executed == call.provenance.executed


@pytest.mark.parametrize("calls", CASES, indirect=True, ids="-".join)
def test_a_fresh_launch_is_the_one_that_the_engine_would_make(calls):
    """Without a plan: the same padding on the left, so the same bits, although it always has a mask."""
    for call in calls:
        answer = Transformers().run(Launch((replace(call, launch=None),), Execution(threads=1)))
        assert answer.tensors[0].out.same(call.out.bits), (call.layer, call.step)


def test_fresh_launches_have_one_kind_of_mask():
    """A prefill as it stands needs no mask, its rows in another order do."""
    call = dense_call(lengths=(9,), seed=1)
    masks = [fresh(one, "sdpa").mask for one in (call, call.take(np.arange(9)[::-1]), call.take([0]))]
    assert [mask is not None and mask.dtype for mask in masks] == [torch.bool] * 3


@pytest.mark.parametrize("calls", [("gpt_oss", "eager")], indirect=True, ids="-".join)
def test_sdpa_refuses_sinks(calls):
    provider = Transformers("sdpa")
    assert provider.refuses(calls[0]) == "it does not take an attention sink"
    with pytest.raises(Unsupported):
        provider.run(Launch((calls[0],)))


@pytest.mark.parametrize("calls", [("qwen3", "eager")], indirect=True, ids="-".join)
def test_a_trace_names_no_module_to_import(calls):
    call = calls[0]
    provenance = replace(call.provenance, details={"module": "os.path.Attention"})
    assert "not in transformers" in Transformers().refuses(replace(call, provenance=provenance))


@pytest.mark.parametrize("calls", [("qwen3", "sdpa")], indirect=True, ids="-".join)
def test_a_plan_that_does_not_fit_is_refused(calls):
    call = calls[0]
    scalars = {name: value for name, value in call.launch.scalars.items() if name != "scaling"}
    lacking = replace(call, launch=replace(call.launch, scalars=scalars))
    assert Transformers().refuses(lacking) == "its launch plan lacks scaling"

    fewer = replace(call, launch=replace(call.launch, scalars=call.launch.scalars | {"key_length": 8}))
    assert "a key_real of another size" in Transformers().refuses(fewer)


HOSTILE = [
    *(
        {name: value}
        for name in ("batch", "query_length", "key_length")
        for value in ("x", 0, -1, 10**12, 1 << 70, None)
    ),
    *({"batch": 1 << 30}, {"key_length": 1 << 30}, {"batch": 2.0}, {"batch": True}),
    *({"scaling": value} for value in (3.0, float("nan"), float("inf"), "x", True, -1, 0, 1 << 70)),
    *(
        {"is_causal": "text"},
        {"module_is_causal": "text"},
        {"grad": 1},
        {"q_layout": "junk"},
        {"kv_layout": 7},
    ),
    *({"mask_kind": "junk"}, {"mask_kind": "additive"}, {"mask_kind": "bool"}, {"mask_kind": None}),
    *(
        {"mask_kind": "additive", "mask_batch": 1, "mask_low": low, "mask_dtype": "int4"}
        for low in (-1.0, "x")
    ),
]


@pytest.mark.parametrize("calls", [("qwen3", "sdpa")], indirect=True, ids="-".join)
@pytest.mark.parametrize("scalars", HOSTILE, ids=str)
def test_a_hostile_plan_is_refused_before_anything_is_made(calls, scalars):
    call = calls[0]
    plan = replace(call.launch, scalars=call.launch.scalars | scalars)
    assert "launch plan" in Transformers().refuses(replace(call, launch=plan))


@pytest.mark.parametrize("calls", [("qwen3", "eager")], indirect=True, ids="-".join)
def test_only_whole_names_of_models_that_are_there(calls):
    call = calls[0]
    right = "transformers.models.qwen3.modeling_qwen3"
    for module in (right, f"{right}.A.b", "transformers.models.nope.modeling_nope.A", f"{right}.A\n"):
        changed = replace(call, provenance=replace(call.provenance, details={"module": module}))
        assert "not in transformers" in Transformers().refuses(changed)


def with_scalars(call, **scalars):
    return replace(call, launch=replace(call.launch, scalars=call.launch.scalars | scalars))


def test_keys_and_values_lie_as_they_lay(qwen3, recorded, prompt, monkeypatch):
    """A function that gets k as a transposed view and v contiguous is run again on just that."""

    def rotated(module, q, k, v, mask, **kwargs):
        k = k.transpose(1, 2).contiguous().transpose(1, 2)
        return AttentionInterface._global_mapping["sdpa"](module, q, k, v.contiguous(), mask, **kwargs)

    def run(model):
        monkeypatch.setattr(
            "transformers.models.qwen3.modeling_qwen3.ALL_ATTENTION_FUNCTIONS.get_interface",
            lambda *_: rotated,
        )
        model(torch.tensor([prompt(7)]), use_cache=False)

    (call, _) = recorded(qwen3, run).calls
    assert [call.launch.scalars[n] for n in ("kv_layout", "v_layout")] == ["bshd", "bhsd"]
    arguments = relaunch(call, call.launch)
    assert not arguments.k.is_contiguous()
    assert arguments.v.is_contiguous()


@pytest.mark.parametrize("calls", [("qwen3", "sdpa")], indirect=True, ids="-".join)
def test_a_plan_without_the_layout_of_values_takes_that_of_keys(calls):
    old = {name: value for name, value in calls[0].launch.scalars.items() if name != "v_layout"}
    call = replace(calls[0], launch=replace(calls[0].launch, scalars=old | {"kv_layout": "bshd"}))
    assert Transformers().refuses(call) is None
    assert not relaunch(call, call.launch).v.is_contiguous()


@pytest.mark.parametrize("calls", [("qwen3", "sdpa")], indirect=True, ids="-".join)
@pytest.mark.parametrize(("name", "tensor"), [("q_layout", "q"), ("kv_layout", "k"), ("v_layout", "v")])
def test_strides_that_are_not_recorded_are_not_run(calls, name, tensor):
    refused = Transformers().refuses(with_scalars(calls[0], **{name: "other"}))
    assert refused == f"the strides of {tensor} are not recorded"


def test_it_is_a_provider():
    assert isinstance(Transformers(), Provider)
    assert Transformers().advertised() == {"rerun", "recorded"}
