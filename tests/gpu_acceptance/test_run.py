"""`python -m tools.gpu_acceptance` without a device: where it ends, and its logic with a stand-in."""

import signal
import subprocess
import sys
import zipfile
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from tests.gpu_acceptance.conftest import GOLDEN
from tools.gpu_acceptance import __main__ as cli
from tools.gpu_acceptance import needs, sanitizer, stages
from tools.gpu_acceptance.__main__ import STAND_IN
from tools.gpu_acceptance.checks import GPU_KERNELS, Refused, fault
from tools.gpu_acceptance.evidence import admit
from tools.gpu_acceptance.run import Run
from tools.gpu_acceptance.tree import ROOT
from tracekit.model import Bits
from tracekit.providers import registry
from tracekit.providers.base import Answer, Launch
from tracekit.providers.graphs.kind import GraphKind
from tracekit.providers.portable import Tka1
from tracekit.providers.tka1 import native, selftest

torch = pytest.importorskip("torch")


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


def test_the_whole_run_with_a_stand_in(stood_in_once):
    code, evidence, out = stood_in_once
    assert code == 0
    assert evidence.stand_in == STAND_IN
    held = {(c.stage, c.name) for c in evidence.checks if c.status in ("held", "bounded")}
    assert {("self-test", "bf16"), ("device", GOLDEN), ("graphs", "soak (host)")} <= held
    assert {f"{claim} on {GOLDEN}" for claim in ("recorded", "solo", "slack", "control")} <= {
        name for stage, name in held if stage == "claims"
    }
    assert {c.provider for c in evidence.checks if c.status == "not run"} >= set(GPU_KERNELS)
    assert [name for name in evidence.new_goldens if (out.parent / name).is_file()] == ["device.tka1.h5"]


def test_a_stand_in_is_no_evidence_of_a_device(stood_in_once):
    with pytest.raises(Refused) as caught:
        admit(stood_in_once[1])
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


def test_a_kernel_that_fails_on_import_costs_its_own_check_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def broken(provider: str) -> object:
        raise RuntimeError(f"{provider}: built for another torch")

    monkeypatch.setattr(stages, "create", broken)
    run = Run("tka1-cuda", "", 100.0, (), tmp_path)
    run.stage("claims", stages.claims, 1.0)
    assert {(check.provider, check.status) for check in run.checks} == {
        (name, "inconclusive") for name in ("tka1-cuda", *GPU_KERNELS)
    }


DIGEST = "0" * 64


@pytest.mark.parametrize(
    ("text", "status"),
    [
        (f"{DIGEST}\n========= ERROR SUMMARY: 0 errors", "held"),
        (f"{DIGEST}\n========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)", "held"),
        (f"{DIGEST}\n========= ERROR SUMMARY: 3 errors", "refuted"),
        ("========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)", "refuted"),
        ("K-DRIVER\n========= ERROR SUMMARY: 0 errors", "not run"),  # the program failed, and was not checked
        (DIGEST, "not run"),
        ("Device not supported", "not run"),
        ("Command timed out after 180 seconds", "not run"),
    ],
)
def test_a_sanitizer_says_nothing_unless_it_counted(tmp_path: Path, text: str, status: str):
    run = Run("tka1-cuda", "", 100.0, (), tmp_path)
    sanitizer.judge(run, "memcheck", text, "golden")
    assert [check.status for check in run.checks] == [status]
    assert fault(run.checks[0]) == ""


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["-o", "{there}"], "e.json is there already and is not written over"),
        (["-o", "{folder}/none/e.json"], "nothing can be written in"),
        (["--commit", "main"], "'main' is no commit"),
        (["--golden", "no.h5"], "there is no golden no.h5 in traces/"),
        (["--wheels", "{folder}"], "there is no wheel in"),
    ],
)
def test_what_would_spoil_the_end_is_said_before_the_beginning(tmp_path: Path, options: list[str], said: str):
    there = tmp_path / "e.json"
    there.write_text("evidence of another run")
    free = [] if "-o" in options else ["-o", str(tmp_path / "free.json")]
    given = [one.format(there=there, folder=tmp_path) for one in options]
    done = command("--stand-in", *free, *given)
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert there.read_text() == "evidence of another run"
    assert [path.name for path in tmp_path.iterdir()] == ["e.json"]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGKILL, -signal.SIGKILL)])
def test_a_run_that_is_ended_leaves_no_evidence(tmp_path: Path, number: signal.Signals, code: int):
    """Neither half of a document, nor one of what was found so far that looks whole."""
    with subprocess.Popen(
        [sys.executable, "-m", "tools.gpu_acceptance", "--stand-in", "-o", str(tmp_path / "e.json")],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as run:
        assert run.stdout is not None
        assert "self-test" in run.stdout.readline()  # it is under way
        run.send_signal(number)
        _, said = run.communicate()
    assert run.returncode == code
    if number is signal.SIGINT:
        assert said == "gpu_acceptance: interrupted; no evidence was written.\n"
    assert list(tmp_path.iterdir()) == []


def test_evidence_that_cannot_be_written_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Nothing that was found in ten minutes is lost; the code says that something is missing."""
    found = cli.Evidence("0" * 40, "0" * 64, {}, "", {}, {}, (), {}, 1.0, "2026-01-31T12:00:00Z")
    assert cli._told(found, tmp_path / "none" / "e.json", "tka1") == 2
    assert found.to_json() in capsys.readouterr().out


def test_evidence_that_contradicts_itself_is_a_fault_of_the_tool(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    found = cli.Evidence("0" * 40, "0" * 64, {}, "", {}, {}, (), {}, 1.0, "2026-01-31T12:00:00Z")
    assert cli._told(found, tmp_path / "e.json", "tka1") == 6
    assert "EV-FIELD" in capsys.readouterr().err


def test_a_check_that_came_to_nothing_is_not_0(stood_in_once, tmp_path: Path):
    evidence = stood_in_once[1]
    assert cli._told(evidence, tmp_path / "a.json", "tka1") == 0
    failed = replace(evidence.checks[2], status="inconclusive", compared=0, data={})
    checks = (*evidence.checks[:2], failed, *evidence.checks[3:])
    assert cli._told(replace(evidence, checks=checks), tmp_path / "b.json", "tka1") == 3


def test_a_damaged_torch_and_a_damaged_wheel_are_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise OSError('libcudart.so.13: cannot open')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "torch")
    with pytest.raises(needs.Lacking, match=r"torch is installed and cannot be imported: libcudart\.so\.13"):
        needs.check()
    wheel = tmp_path / "damaged.whl"
    wheel.write_bytes(b"PK")
    with pytest.raises(needs.Lacking, match=r"the wheel .*damaged\.whl cannot be unpacked"):
        needs.unpack([wheel], tmp_path / "site")


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
