"""`tracekit record`: the built-in driver."""

import json

import pytest


@pytest.mark.parametrize("attn", ["sdpa", "eager", "tracekit"])
def test_record_replay_inspect(tracekit_cli, tmp_path, attn):
    out = tmp_path / "run.h5"
    done = tracekit_cli(
        "record", "-o", out, "--model", "tiny-qwen3", "--prompt-ids", "5,6,7,8", "--prompt-ids", "9,10",
        "--max-new-tokens", "3", "--attn", attn, "--json",
    )  # fmt: skip
    assert done.code == 0, done.err
    told = json.loads(done.out)
    assert told["calls"] == 2 * 3
    facts = json.loads(tracekit_cli("inspect", out, "--json").out)
    assert [request["prompt"] for request in facts["requests"]] == [4, 2]
    assert {call["kernel"] for call in facts["calls"]} == {
        "tka1" if attn == "tracekit" else f"transformers.{attn}"
    }
    assert facts["content_digest"] == told["content_digest"]
    assert facts["notes"] == {
        "driver": "run_transformers",
        "attention": attn,
        "prompts": "2",
        "max_new_tokens": "3",
        "decoding": "greedy",
    }
    assert f"attention {attn}, " in tracekit_cli("inspect", out).out
    assert tracekit_cli("verify", out).code == 0
    assert tracekit_cli("replay", out, "--claim", "recorded,control").code == 0


def test_only_some_layers(tracekit_cli, tmp_path):
    out = tmp_path / "run.h5"
    tracekit_cli("record", "-o", out, "--model", "tiny-qwen3", "--prompt-ids", "5,6", "--layers", "1")
    facts = json.loads(tracekit_cli("inspect", out, "--json").out)
    assert {call["layer"] for call in facts["calls"]} == {1}
    assert sum(step["filtered"] for step in facts["ledger"]) > 0


def test_inspect_in_words(tracekit_cli, prefill):
    done = tracekit_cli("inspect", prefill, "--calls")
    assert done.code == 0
    for word in ("transformers.sdpa", "prefill", "hooks expected", "derived", "consumed"):
        assert word in done.out


def test_a_model_that_is_not_there(tracekit_cli, tmp_path):
    done = tracekit_cli("record", "-o", tmp_path / "x.h5", "--model", "no-such-model", "--prompt-ids", "5")
    assert done.code == 2
    assert "no-such-model" in done.err
    assert not list(tmp_path.iterdir())


def test_doctor(tracekit_cli):
    done = tracekit_cli("doctor", "--json")
    assert done.code == 0
    levels = {finding["name"]: finding["level"] for finding in json.loads(done.out)}
    assert levels["tracekit"] == levels["distribution"] == levels["tka1 v1"] == "ok"
