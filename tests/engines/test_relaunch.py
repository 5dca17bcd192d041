"""Provider `transformers`: the engine's own function on the recorded launch gives the recorded bits."""

from dataclasses import replace

import pytest

from tracekit.engines.driver import greedy
from tracekit.errors import Unsupported
from tracekit.providers.base import Execution, Launch, Provider
from tracekit.providers.transformers import Transformers

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
        assert answer.executed == call.provenance.executed == provider.identity_of(call)


@pytest.mark.parametrize("calls", CASES, indirect=True, ids="-".join)
def test_a_fresh_launch_is_the_one_that_the_engine_would_make(calls):
    """Without a plan: the same padding on the left and the same kind of mask, so the same bits."""
    for call in calls:
        answer = Transformers().run(Launch((replace(call, launch=None),), Execution(threads=1)))
        assert answer.tensors[0].out.same(call.out.bits), (call.layer, call.step)


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


def test_it_is_a_provider():
    assert isinstance(Transformers(), Provider)
    assert Transformers().advertised() == {"rerun", "recorded"}
