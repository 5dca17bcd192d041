"""`python -m tools.gpu_acceptance` without a device: where it ends, and its logic with a stand-in."""

import os
import subprocess
import sys
import zipfile
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from tools.gpu_acceptance import needs, stages
from tools.gpu_acceptance.__main__ import STAND_IN, main
from tools.gpu_acceptance.evidence import ROOT, Refused, admit, parse_evidence
from tools.gpu_acceptance.run import GPU_KERNELS, Run
from tracekit.model import Bits
from tracekit.providers import registry
from tracekit.providers.base import Answer, Launch
from tracekit.providers.graphs.kind import GraphKind
from tracekit.providers.portable import Tka1
from tracekit.providers.tka1 import native, selftest

torch = pytest.importorskip("torch")

GOLDEN = "smollm2-prefill.tka1.h5"


def command(*arguments: str, **options) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tools.gpu_acceptance", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        **options,
    )


def test_without_a_device_it_ends_with_4_and_one_sentence(no_device: None, tmp_path: Path):
    done = command("-o", str(tmp_path / "e.json"))
    assert done.returncode == 4
    assert done.stdout == ""
    assert done.stderr == (
        "gpu_acceptance: torch sees no CUDA or HIP device on this machine, so nothing was run.\n"
    )
    assert not list(tmp_path.iterdir())


@pytest.fixture(scope="module")
def stood_in(tmp_path_factory: pytest.TempPathFactory):
    out = tmp_path_factory.mktemp("run") / "e.json"
    with pytest.MonkeyPatch.context() as patch:  # the tool sets the path of its children
        patch.setenv("PYTHONPATH", os.environ.get("PYTHONPATH", ""))
        patch.setattr(sys, "path", list(sys.path))
        code = main(["--stand-in", "--golden", GOLDEN, "-o", str(out), "--commit", "0" * 40])
    return code, parse_evidence(out.read_text()), out


def test_the_whole_run_with_a_stand_in(stood_in):
    code, evidence, out = stood_in
    assert code == 0
    assert evidence.stand_in == STAND_IN
    held = {(c.stage, c.name) for c in evidence.checks if c.status in ("held", "bounded")}
    assert {("self-test", "bf16"), ("device", GOLDEN), ("graphs", "soak (host)")} <= held
    assert {f"{claim} on {GOLDEN}" for claim in ("recorded", "solo", "slack", "control")} <= {
        name for stage, name in held if stage == "claims"
    }
    assert {c.provider for c in evidence.checks if c.status == "not run"} >= set(GPU_KERNELS)
    assert [name for name in evidence.new_goldens if (out.parent / name).is_file()] == ["device.tka1.h5"]


def test_a_stand_in_is_no_evidence_of_a_device(stood_in):
    with pytest.raises(Refused) as caught:
        admit(stood_in[1])
    assert caught.value.rule == "EV-STAND-IN"


def test_the_run_names_every_gpu_provider_there_is():
    assert {*GPU_KERNELS, "tka1-cuda", "tka1-hip"} == set(registry.UNTESTED)


class OneBitOff(Tka1):
    """TKA-1 with one bit of O flipped in each call."""

    def run(self, launch: Launch) -> Answer:
        answer = super().run(launch)
        wrong = []
        for tensors in answer.tensors:
            data = tensors.out.data.copy()
            data.flat[0] ^= 1
            wrong.append(replace(tensors, out=Bits(data, tensors.out.dtype)))
        return replace(answer, tensors=tuple(wrong))


def test_wrong_bits_are_refuted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The control: a device that differs from the CPU in one bit of each call, and wrong hashes."""
    providers = {"a device": OneBitOff(), "tka1": Tka1()}
    monkeypatch.setattr(stages, "create", providers.__getitem__)
    run = Run("a device", STAND_IN, 100.0, (ROOT / "traces" / GOLDEN,), tmp_path)
    run.stage("device", stages.device, 1.0)
    (check,) = run.checks
    assert (check.status, check.reason[:5]) == ("refuted", "2 of ")
    native.load(native.available()[0])
    monkeypatch.setattr(selftest, "EXPECTED", "0" * 64)
    run.stage("self-test", stages.self_test, 1.0)
    assert [one.status for one in run.checks[1:]] == ["refuted", "held"]


def test_replays_that_differ_are_refuted(tmp_path: Path):
    """The control of the soak: a captured launch that keeps answering its first call."""

    class Stuck(Tka1):
        def static(self, calls, execution, pool):
            made = super().static(calls, execution, pool)
            made.load = cache(lambda call: type(made).load(made, calls[0]))
            return made

    run = Run("tka1", STAND_IN, 100.0, (), tmp_path)
    stages._soak(run, Stuck(), GraphKind.HOST)
    assert run.checks[0].status == "refuted"


def test_a_stage_without_time_or_with_a_failure_says_so(tmp_path: Path):
    run = Run("tka1", STAND_IN, 5.0, (), tmp_path)
    run.stage("speed", lambda run: None, 10.0)

    def fails(run: Run) -> None:
        raise RuntimeError("no such\ndevice")

    run.stage("graphs", fails, 1.0)
    run.stage("claims", lambda run: None, 1.0)
    assert [(one.stage, one.status) for one in run.checks] == [
        ("speed", "not run"),
        ("graphs", "inconclusive"),
        ("claims", "not run"),
    ]
    assert "RuntimeError: no such device" in run.checks[1].reason


def test_what_is_missing_is_one_sentence(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(needs, "MODULES", ("numpy", "no_such_module"))
    with pytest.raises(needs.Lacking, match=r"needs no_such_module, .* \(--wheels\), or install them\.$"):
        needs.check()
    monkeypatch.setitem(needs.OLDEST, "torch", (99, 0))
    monkeypatch.setattr(needs, "MODULES", ("numpy",))
    with pytest.raises(needs.Lacking, match=r"needs 2\.11 or newer"):
        needs.check()


def test_the_cpu_kernels_are_built_from_the_tree(tmp_path: Path):
    """As on a machine on which nothing is installed; loading a library runs its self-test."""
    needs.build(tmp_path, ("v1",))
    library = native.load_file(tmp_path / "libtka1_v1.so", "v1")
    assert selftest.digest(library.run, library.partials) == selftest.EXPECTED


def test_wheels_are_unpacked_for_children_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    wheel = tmp_path / "given-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("given_module.py", "ANSWER = 42\n")
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("PYTHONPATH", "")
    needs.unpack([wheel], tmp_path / "site")
    script = "import given_module, tools.gpu_acceptance; print(given_module.ANSWER)"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False, cwd="/"
    )
    assert done.stdout == "42\n", done.stderr
