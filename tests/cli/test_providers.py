"""`tracekit providers`: what can run here, and what is said of kernels that no hardware ran."""

import json

import pytest

torch = pytest.importorskip("torch")


def test_each_provider_is_here_or_says_why_not(tracekit_cli):
    done = tracekit_cli("providers", "--json")
    assert done.code == 0, done.err
    found = {one["provider"]: one for one in json.loads(done.out)}
    assert found["tka1"]["reason"] == ""
    assert "recorded" in found["tka1"]["promises"]
    assert found["tka1"]["label"] == ""
    for name in ("tka1-cuda", "flash-attn", "torch-cudnn"):
        assert found[name]["label"].endswith("untested on hardware")
        assert torch.cuda.is_available() or found[name]["reason"]


def test_the_table_is_for_people(tracekit_cli):
    done = tracekit_cli("providers")
    assert done.code == 0
    assert "untested on hardware" in done.out


def test_a_claim_on_a_kernel_that_cannot_run_here_is_not_run(no_device, tracekit_cli, prefill_tka1):
    done = tracekit_cli("replay", prefill_tka1, "--provider", "tka1-cuda", "--claim", "recorded", "--json")
    assert done.code == 4, done.err
    (verdict,) = json.loads(done.out)["verdicts"]
    assert verdict["status"] == "not run"
    assert "sees no CUDA device" in verdict["reason"]
