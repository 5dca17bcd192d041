"""`tracekit diff`: the first divergence, in the order of the data."""

import json


def test_a_trace_equals_itself(tracekit_cli, prefill):
    done = tracekit_cli("diff", prefill, prefill)
    assert done.code == 0
    assert "first divergence" not in done.out


def test_engine_kernel_against_tka1_diverges_first_in_the_output_of_layer_0(
    tracekit_cli, prefill, prefill_tka1
):
    done = tracekit_cli("diff", prefill, prefill_tka1, "--json")
    told = json.loads(done.out)
    assert done.code == 1
    assert (told["first"]["layer"], told["first"]["tensor"]) == (0, "out")
    before = {part["tensor"]: part["verdict"] for part in told["parts"] if part["layer"] == 0}
    assert {before[name] for name in ("q", "keys", "values", "selection set", "selection order")} == {"equal"}


def test_a_derived_lse_is_not_compared(tracekit_cli, prefill):
    told = json.loads(tracekit_cli("diff", prefill, prefill, "--json").out)
    (lse,) = [part for part in told["parts"] if part["tensor"] == "lse" and part["layer"] == 0]
    assert lse["verdict"] == "not compared"
    assert "derived" in lse["reason"]


def test_traces_of_other_prompts_have_nothing_to_compare(tracekit_cli, prefill):
    done = tracekit_cli("diff", prefill, prefill.with_name("gpt-oss.eager.h5"))
    assert done.code == 3
