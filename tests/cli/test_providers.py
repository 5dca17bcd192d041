"""`tracekit providers`: what can run here, and what is said of kernels that no hardware ran."""

import json


def test_each_provider_is_here_or_says_why_not(tracekit_cli):
    done = tracekit_cli("providers", "--json")
    assert done.returncode == 0, done.stderr
    found = {one["provider"]: one for one in json.loads(done.stdout)}
    assert found["tka1"]["available"]
    assert "recorded" in found["tka1"]["promises"]
    assert found["tka1"]["label"] == ""
    for name in ("tka1-cuda", "flash-attn", "torch-cudnn"):
        assert found[name]["label"].endswith("untested on hardware")
        assert found[name]["available"] or found[name]["reason"]


def test_the_table_is_for_people(tracekit_cli):
    done = tracekit_cli("providers")
    assert done.returncode == 0
    assert "untested on hardware" in done.stdout


def test_a_claim_on_a_kernel_that_cannot_run_here_is_not_run(tracekit_cli):
    import torch

    if torch.cuda.is_available():
        import pytest

        pytest.skip("this machine has a GPU")
    trace = "traces/smollm2-prefill.tka1.h5"
    done = tracekit_cli("replay", trace, "--provider", "tka1-cuda", "--claim", "recorded", "--json")
    assert done.returncode == 4, done.stderr
    (verdict,) = json.loads(done.stdout)["verdicts"]
    assert verdict["status"] == "not run"
    assert "sees no CUDA device" in verdict["reason"]
