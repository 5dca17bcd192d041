"""Bad input: one sentence, the right exit code, no traceback, nothing lost."""

import json

import pytest

from tests.malformed import e02_newer_format
from tracekit.cli.main import VERBS


def sentence(done) -> str:
    assert "Traceback" not in done.err
    lines = done.err.strip().splitlines()
    assert len(lines) == 1, done.err
    return lines[0]


def test_missing_trace_names_the_nearest(tracekit_cli, prefill):
    done = tracekit_cli("replay", prefill.with_name("smollm2-prefil.sdpa.h5"))
    assert done.code == 2
    assert "smollm2-prefill.sdpa.h5" in sentence(done)


def test_unknown_provider_lists_the_valid_ones(tracekit_cli, prefill):
    done = tracekit_cli("replay", prefill, "--provider", "tka2")
    assert done.code == 2
    assert "tka1" in sentence(done)
    assert "torch-flash-cpu" in done.err


def test_unknown_claim_lists_the_valid_ones(tracekit_cli, prefill):
    done = tracekit_cli("replay", prefill, "--claim", "row")
    assert done.code == 2
    assert "rows" in sentence(done)


def test_provider_of_a_module_that_is_not_there(tracekit_cli, prefill):
    done = tracekit_cli("replay", prefill, "--provider", "no_such_module:Kernel")
    assert done.code == 2
    assert "no_such_module" in sentence(done)


def test_layers_that_do_not_exist(tracekit_cli, prefill):
    done = tracekit_cli("replay", prefill, "--layers", "999")
    assert done.code == 5
    assert "999" in sentence(done)


@pytest.mark.parametrize("text", ["a", "3-1", "", "1,,2", "-1"])
def test_layers_that_are_no_numbers(tracekit_cli, prefill, text):
    done = tracekit_cli("replay", prefill, f"--layers={text}")
    assert done.code == 2
    assert "--layers" in sentence(done)


def test_truncated_trace(tracekit_cli, prefill, tmp_path):
    cut = tmp_path / "cut.h5"
    cut.write_bytes(prefill.read_bytes()[:-1000])
    for verb in ("replay", "inspect", "diff"):
        done = tracekit_cli(verb, cut, *([cut] if verb == "diff" else []))
        assert done.code == 2
        assert "cut.h5" in sentence(done)
    assert tracekit_cli("verify", cut).code == 2


def test_newer_format(tracekit_cli, tmp_path):
    path = tmp_path / "newer.h5"
    e02_newer_format.build(path)
    done = tracekit_cli("inspect", path)
    assert done.code == 2
    assert "newer" in sentence(done)


def test_not_a_trace(tracekit_cli, tmp_path):
    text = tmp_path / "note.h5"
    text.write_text("hello")
    done = tracekit_cli("inspect", text)
    assert done.code == 2
    assert "note.h5" in sentence(done)


def test_a_folder_is_no_trace(tracekit_cli, tmp_path):
    done = tracekit_cli("inspect", tmp_path)
    assert done.code == 2
    sentence(done)


def test_a_misspelt_setting(tracekit_cli, prefill, monkeypatch):
    from tracekit.env import settings

    monkeypatch.setenv("TRACEKIT_TREADS", "2")
    settings.cache_clear()
    done = tracekit_cli("replay", prefill)
    settings.cache_clear()
    assert done.code == 2
    assert "TRACEKIT_TREADS" in sentence(done)


def test_record_refuses_to_write_over_a_trace(tracekit_cli, prefill):
    before = prefill.read_bytes()
    done = tracekit_cli("record", "-o", prefill, "--model", "tiny-qwen3", "--prompt-ids", "5,6,7")
    assert done.code == 2
    assert "--force" in sentence(done)
    assert prefill.read_bytes() == before


def test_record_without_a_prompt(tracekit_cli, tmp_path):
    done = tracekit_cli("record", "-o", tmp_path / "x.h5", "--model", "tiny-qwen3")
    assert done.code == 2
    assert "--prompt" in sentence(done)


def test_errors_are_json_too(tracekit_cli, prefill):
    done = tracekit_cli("replay", prefill, "--layers", "999", "--json")
    facts = json.loads(done.out)
    assert (facts["error"], facts["exit_code"]) == ("NothingSelected", 5)


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_help(tracekit_cli, verb):
    done = tracekit_cli(verb, "--help")
    assert done.code == 0
    assert "Usage: tracekit" in done.out


def test_an_unknown_verb_is_wrong_usage(tracekit_cli):
    assert tracekit_cli("replai").code == 2


@pytest.mark.parametrize(
    ("option", "one", "two"),
    [
        ("--claim", "solo", "rows"),
        ("--provider", "tka1", "oracle"),
        ("--layers", "0", "1"),
        ("--seed", "1", "2"),
    ],
)
def test_an_option_given_twice_would_lose_one_of_its_values(tracekit_cli, prefill, option, one, two):
    done = tracekit_cli("replay", prefill, option, one, f"{option}={two}", "--json")
    assert done.code == 2
    assert f"{option} is given twice" in json.loads(done.out)["message"]


def test_options_that_may_be_repeated_are(tracekit_cli, tmp_path):
    done = tracekit_cli(
        "record", "-o", tmp_path / "x.h5", "--include", "a", "--include", "b", "--json", "--json"
    )
    assert "twice" not in done.err


@pytest.mark.parametrize(
    "arguments", [("replay", "x.h5", "--jobs", "0"), ("replay",), ("no-verb",), ("bind", "x")]
)
def test_wrong_usage_is_json_too(tracekit_cli, arguments):
    done = tracekit_cli(*arguments, "--json")
    assert done.code == 2
    assert json.loads(done.out)["exit_code"] == 2


def test_json_of_the_command_is_not_ours(tracekit_cli, tmp_path):
    done = tracekit_cli("record", "-o", tmp_path / "no folder" / "x.h5", "--", "true", "--json")
    assert (done.code, done.out) == (2, "")


@pytest.mark.parametrize("threads", ["4097", "536870912", "99999999999999999999"])
def test_threads_that_no_machine_has(tracekit_cli, prefill, threads):
    """Kernels count in 32 bits; this one never came back."""
    done = tracekit_cli("replay", prefill, "--provider", "tka1", "--claim", "rerun", "--threads", threads)
    assert done.code == 2
    assert threads in sentence(done)


@pytest.mark.parametrize("option", ["--provider", "--claim"])
def test_an_empty_list_selects_nothing_by_mistake(tracekit_cli, prefill, option):
    done = tracekit_cli("replay", prefill, option, ",")
    assert done.code == 2
    assert "no " in sentence(done)
