"""`tracekit replay`: verdicts, exit codes and the words for them."""

import json


def verdicts(done) -> dict[tuple[str, str], dict]:
    return {(v["provider"], v["claim"]): v for v in json.loads(done.out)["verdicts"]}


def test_tka1_holds_every_claim_on_a_recorded_engine(tracekit_cli, prefill):
    done = tracekit_cli("replay", prefill, "--provider", "tka1", "--json")
    assert done.code == 0
    told = verdicts(done)
    assert told["tka1", "solo"]["status"] == "held"
    assert told["tka1", "control"]["status"] == "bounded"
    assert all(v["compared"]["elements"] for v in told.values() if v["status"] in ("held", "bounded"))


def test_torch_flash_cpu_is_refuted_on_solo_with_a_place(tracekit_cli, prefill):
    done = tracekit_cli("replay", prefill, "--provider", "torch-flash-cpu", "--claim", "solo", "--json")
    assert done.code == 1
    verdict = verdicts(done)["torch-flash-cpu", "solo"]
    assert verdict["status"] == "refuted"
    first = verdict["first"]
    assert first["expected_bits"] != first["actual_bits"]
    assert verdict["differences"]["elements"] > 0
    assert "solo" in verdict["next_command"]


def test_the_report_says_it_in_words(tracekit_cli, prefill):
    done = tracekit_cli("replay", prefill, "--provider", "torch-flash-cpu", "--claim", "solo")
    assert "REFUTED" in done.out
    assert "first: request" in done.out
    assert done.out.strip().splitlines()[-1].endswith("exit 1")


def test_a_probe_never_changes_the_exit_code(tracekit_cli, prefill):
    done = tracekit_cli("replay", prefill, "--provider", "torch-flash-cpu", "--probe", "--json")
    assert done.code == 0
    assert verdicts(done)["torch-flash-cpu", "solo"]["status"] == "observed varies"


def test_a_provider_that_raises_is_a_verdict(tracekit_cli, prefill):
    done = tracekit_cli(
        "replay",
        prefill,
        "--provider",
        "tests.cli.raising:Raising",
        "--claim",
        "rerun",
        "--layers",
        "0",
        "--json",
    )
    assert done.code == 3
    assert "Traceback" not in done.err
    (verdict,) = verdicts(done).values()
    assert verdict["status"] == "inconclusive"
    assert "out of registers" in verdict["reason"]


def test_another_kernel_has_nothing_to_say_about_recorded_answers(tracekit_cli, prefill):
    done = tracekit_cli("replay", prefill, "--provider", "torch-flash-cpu", "--claim", "recorded", "--json")
    assert done.code == 5
    verdict = verdicts(done)["torch-flash-cpu", "recorded"]
    assert verdict["status"] == "not applicable"
    assert "transformers.sdpa" in verdict["reason"]


def test_only_the_layers_asked_for(tracekit_cli, prefill):
    one = tracekit_cli("replay", prefill, "--provider", "tka1", "--claim", "rerun", "--layers", "0", "--json")
    all_layers = tracekit_cli("replay", prefill, "--provider", "tka1", "--claim", "rerun", "--json")
    assert verdicts(one)["tka1", "rerun"]["calls"] < verdicts(all_layers)["tka1", "rerun"]["calls"]
