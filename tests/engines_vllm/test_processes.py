"""The plug-in: it records the process that runs the model, wherever that is, and is inert otherwise."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import tracekit
from tracekit.engines import tiny, vllm_plugin
from tracekit.engines.process import Recordings
from tracekit.env import settings
from tracekit.gate.recorded import Legality
from tracekit.model import Tag
from tracekit.model.events import Adopt
from tracekit.verdict import Status

SERVE = Path(__file__).with_name("serve.py")


def test_without_the_setting_the_plugin_touches_nothing(qwen3):
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    before = GPUModelRunner.execute_model
    vllm_plugin.register()
    assert GPUModelRunner.execute_model is before


def test_the_plugin_is_declared():
    from importlib.metadata import entry_points

    (point,) = (p for p in entry_points(group="vllm.general_plugins") if p.name == "tracekit")
    assert point.load() is vllm_plugin.register


def serve(prompts, **settings):
    """Run vLLM as it comes, its engine compiled and in a process of its own."""
    return subprocess.run(
        [sys.executable, SERVE, str(tiny.prepared("tiny-qwen3")), json.dumps(prompts)],
        env=os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"} | settings,
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )


def test_one_setting_serves_tka1_in_a_compiled_engine(prompt, tmp_path):
    prompts = [prompt(70, 1), prompt(9, 2)]
    ran = serve(prompts, TRACEKIT_RECORD=str(tmp_path / "run.h5"), TRACEKIT_BACKEND="tka1")
    assert ran.returncode == 0, ran.stderr[-2000:]
    (path,) = tmp_path.iterdir()
    report = tracekit.replay(path, claims=["recorded"])
    assert report.find("recorded", "tka1").status is Status.HELD


def test_a_backend_that_does_not_exist_is_no_engine(prompt):
    """An engine on its own kernel would be another one than was asked for."""
    ran = serve([prompt(9)], TRACEKIT_BACKEND="tka2")
    assert ran.returncode != 0
    assert "TRACEKIT_BACKEND is 'tka2'; valid is tka1" in ran.stderr


def test_a_compiled_engine_in_its_own_process_writes_its_trace(prompt, tmp_path):
    prompts = [prompt(70, 1), prompt(9, 2)]
    ran = serve(prompts, TRACEKIT_RECORD=str(tmp_path / "run.h5"))
    assert ran.returncode == 0, ran.stderr[-2000:]
    said = json.loads(ran.stdout.splitlines()[-1])
    assert said["refused"] == "V-PROCESS"

    (path,) = tmp_path.iterdir()
    assert path.name.startswith("run.rank0-")
    with tracekit.open(path) as trace:
        assert trace.recording.notes["pid"] == path.stem.rpartition("-")[2] != str(said["pid"])
        lines = trace.recording.ledger
        assert [line.tag for line in lines if line.tag is not Tag.NORMAL] == [Tag.PROFILE]
        assert all(line.complete and line.recorded == 2 for line in lines if line.tag is Tag.NORMAL)
        found = [request.token_ids.tolist() for request in trace.recording.requests]
    assert found == [p + t[:-1] for p, t in zip(prompts, said["tokens"], strict=True)]
    assert tracekit.verify(path) == []
    judgement = tracekit.history(path)  # on the CPU the model runs in a third process then
    assert judgement.status is Legality.UNKNOWN
    assert "the scheduler of the engine, which empties its cache, runs in another process" in judgement.reason
    assert tracekit.replay(path, provider="vllm-cpu", claims=["recorded"]).status is Status.HELD


def test_the_history_of_a_compiled_engine_in_one_process_is_legal(prompt, tmp_path):
    """The plug-in finds the core that steps: prompts of which one begins as the other."""
    prompts = [prompt(70, 1), prompt(70, 1)[:50]]
    settings = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "TRACEKIT_RECORD": str(tmp_path / "run.h5")}
    ran = serve(prompts, **settings)
    assert ran.returncode == 0, ran.stderr[-2000:]
    (path,) = tmp_path.iterdir()
    judgement = tracekit.history(path)
    assert judgement.status is Legality.LEGAL, judgement
    with tracekit.open(path) as trace:
        assert judgement.calls == len(trace.heads)
        assert [e.at for e in trace.recording.history if isinstance(e, Adopt)] == [32]


def test_record_runs_a_server_and_leaves_one_trace(prompt, tmp_path):
    """The command line around an engine whose model runs in a process of its own."""
    out = tmp_path / "run.h5"
    ran = subprocess.run(
        [
            *(sys.executable, "-c", "from tracekit.cli import main; main()", "record", "-o", out),
            *("--include", "*layers.1.*", "--json", "--", sys.executable, SERVE),
            *(str(tiny.prepared("tiny-qwen3")), json.dumps([prompt(9)])),
        ],
        env=os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert list(tmp_path.iterdir()) == [out]
    with tracekit.open(out) as trace:
        assert {head.layer for head in trace.heads} == {1}
        lines = [line for line in trace.recording.ledger if line.tag is Tag.NORMAL]
    assert all(line.complete and (line.recorded, line.filtered) == (1, 1) for line in lines)


def test_an_engine_whose_place_cannot_be_read_is_not_recorded_and_runs(tmp_path, monkeypatch, capsys):
    """The plug-in's own failure: the engine runs its step, and the missing trace says why."""

    class Runner:  # of a version without `parallel_config`
        def execute_model(self, scheduled):
            return scheduled + 1

    monkeypatch.setenv("TRACEKIT_RECORD", str(tmp_path / "run.h5"))
    runners = vllm_plugin.Runners(Recordings(replace(settings(), record=tmp_path / "run.h5")))
    step = vllm_plugin._wrapped(Runner.execute_model, runners)
    runner = Runner()
    assert [step(runner, 1), step(runner, 2)] == [2, 3]
    assert "its place in the job could not be read" in capsys.readouterr().err
    (marker,) = tmp_path.iterdir()
    assert marker.name.endswith(".h5.started")
    assert "its place in the job could not be read" in marker.read_text()
