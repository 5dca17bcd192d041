"""`tracekit record -- CMD`: any command with all its processes. Everything here runs for real."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import tracekit

JOBS = Path(__file__).with_name("jobs")
ROOT = Path(__file__).parents[2]
TRACEKIT = Path(sys.executable).with_name("tracekit")
GENERATE = [sys.executable, JOBS / "generate.py"]


def record(out, *command, options=(), **more):
    arguments = [TRACEKIT, "record", "-o", out, "--json", *options, "--", *command]
    done = subprocess.run(
        [str(argument) for argument in arguments],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        check=False,
        **more,
    )
    told = json.loads(done.stdout[done.stdout.index("{\n") :]) if "{\n" in done.stdout else {}
    return done, told


def ledger(path):
    with tracekit.open(path) as trace:
        return trace.recording.ledger


@pytest.fixture
def out(tmp_path):
    return tmp_path / "run.h5"


def test_a_process_is_recorded_and_its_code_is_ours(out):
    done, told = record(out, *GENERATE, "5,6,7", "exit", "7")
    assert (done.returncode, told["command_exit_code"]) == (7, 7)
    assert told["problems"] == []
    assert "[[5, 6, 7," in done.stdout
    assert list(out.parent.iterdir()) == [out]
    assert tracekit.verify(out) == []
    with tracekit.open(out) as trace:
        assert trace.content_digest == told["content_digest"]
        assert [len(request.token_ids) for request in trace.recording.requests] == [5]
        assert all(line.complete for line in trace.recording.ledger)
        assert len(trace) == 2 * 3


def test_processes_of_a_shell_are_merged_and_filtered(out):
    line = f"{sys.executable} {JOBS / 'generate.py'}"
    options = ["--layers", "1", "--rows", "1-3", "--steps", "0-1"]
    done, told = record(out, "sh", "-c", f"{line} 5,6,7 && {line} 5,6,7", options=options)
    assert done.returncode == 0, done.stderr
    assert (told["processes"], told["requests"], told["calls"]) == (2, 2, 4)
    assert [(line.recorded, line.left_out) for line in ledger(out)] == [(2, 2), (2, 0), (0, 0)]
    with tracekit.open(out) as trace:
        assert {head.layer for head in trace.heads} == {1}
        assert [head.num_rows for head in trace.heads] == [2, 2, 1, 1]


def requests(out):
    with tracekit.open(out) as trace:
        return trace.recording.requests


def test_a_command_that_runs_no_model(out):
    done, told = record(out, sys.executable, "-c", "import sys; assert 'tracekit' not in sys.modules")
    assert done.returncode == 3
    assert "no process recorded anything" in told["problems"][0]
    assert list(out.parent.iterdir()) == []


def test_a_command_that_is_not_there(out):
    done, _ = record(out, "no-such-program")
    assert done.returncode == 2
    assert "'no-such-program' cannot be started" in done.stderr
    assert list(out.parent.iterdir()) == []


def test_a_killed_process_is_told_and_the_others_are_kept(out):
    line = f"{sys.executable} {JOBS / 'generate.py'}"
    command = f"RANK=1 WORLD_SIZE=2 {line} 8,9 kill; RANK=0 WORLD_SIZE=2 {line} 5,6,7"
    done, told = record(out, "sh", "-c", command)
    assert done.returncode == 3
    assert "(rank 1) left no trace: its process ended before the trace was written" in told["problems"][0]
    assert told["processes"] == 1
    assert all("rank 1 is missing" in line.cut for line in ledger(out))


def test_a_forked_child_that_leaves_by_itself_ends_as_it_would_have(out):
    """Nothing of the recording may abort it while Python frees what it has, nor write its parent's trace."""
    done, told = record(out, *GENERATE, "5,6,7", "fork and leave")
    assert (done.returncode, told["problems"]) == (0, []), done.stderr


def test_a_forked_child_that_runs_the_model_is_not_passed_over(out):
    """Its parent's recording has nothing of it, and a trace that lacks a process says so."""
    done, told = record(out, *GENERATE, "5,6,7", "fork and run")
    assert (done.returncode, told["command_exit_code"]) == (3, 0)
    assert [problem for problem in told["problems"] if "was forked after its model" in problem]
    assert told["calls"] == 2 * 3


def test_a_forked_child_leaves_the_trace_of_its_parent_alone(out):
    done, told = record(out, *GENERATE, "5,6,7", "fork")
    assert (done.returncode, told["problems"]) == (0, []), done.stderr
    assert len(ledger(out)) == 3 + 2
    assert all(line.complete for line in ledger(out))


def test_a_program_that_becomes_another_one_is_not_passed_over(out):
    """Both have one process number, and the second one must not write over what is said of the first."""
    done, told = record(out, *GENERATE, "5,6,7", "exec")
    assert (done.returncode, told["command_exit_code"]) == (3, 0)
    (problem,) = told["problems"]
    assert "left no trace: its process ended before the trace was written" in problem
    assert {request.token_ids[:2].tolist()[0] for request in requests(out)} == {8}


def test_calls_that_were_lost_are_told(out):
    """Beam search reorders the cache, and nobody can follow its rows."""
    done, told = record(out, *GENERATE, "5,6,7", "beams")
    assert done.returncode == 3
    assert "lacks calls of step" in told["problems"][0]
    assert tracekit.verify(out) == []


def test_a_contradicted_convention_is_told_and_the_trace_is_kept(out):
    done, told = record(out, sys.executable, JOBS / "contradicted.py")
    assert done.returncode == 3
    assert "scale" in told["problems"][0]
    assert tracekit.verify(out) == []


def test_a_missing_folder_does_not_reach_the_program(tmp_path):
    environ = {**os.environ, "TRACEKIT_RECORD": str(tmp_path / "no" / "run.h5"), "HF_HUB_OFFLINE": "1"}
    environ["PYTHONPATH"] = str(ROOT / "tracekit" / "engines" / "startup")
    command = [sys.executable, JOBS / "generate.py", "5,6,7"]
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout[:9]) == (0, "[[5, 6, 7"), done.stderr
    assert "is not recorded" in done.stderr


def test_a_terminated_command_leaves_what_was_recorded(out, tmp_path):
    ready = tmp_path / "ready"
    arguments = [TRACEKIT, "record", "-o", out, "--", *GENERATE, "5,6", "wait", ready]
    running = subprocess.Popen(
        [str(argument) for argument in arguments], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    # The program says what it has generated, and waits from then on.
    assert running.stdout.readline().startswith(b"[[5, 6")
    running.send_signal(signal.SIGTERM)
    running.communicate()
    assert running.returncode == 128 + signal.SIGTERM
    assert tracekit.verify(out) == []
    assert "ended by SIGTERM" in ledger(out)[-1].cut


def test_what_the_command_line_refuses(tracekit_cli, out):
    for arguments, words in (
        ((), "give what to record"),
        (("--model", "tiny-qwen3", "--", "true"), "one of them"),
        (("--prompt", "x", "--", "true"), "belong to --model"),
        (("--layers", "x", "--", "true"), "--layers takes numbers"),
        (("--include", "a,b", "--", "true"), "without a comma"),
        (("--engine", "vllm", "--model", "tiny-qwen3", "--prompt-ids", "5"), "runs in transformers"),
    ):
        done = tracekit_cli("record", "-o", out, *arguments)
        assert (done.code, words in done.err) == (2, True), done.err


def test_torchrun_with_heads_split_over_two_processes(tmp_path, tracekit_cli):
    """The heads of a tensor-parallel layer, put together, are those of one process, bit for bit."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, JOBS / "ranks.py", str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    merged = tracekit_cli(
        "merge", tmp_path / "part1.h5", tmp_path / "part0.h5", "-o", tmp_path / "merged.h5", "--json"
    )
    assert merged.code == 0, merged.err
    with tracekit.open(tmp_path / "whole.h5") as whole:
        assert json.loads(merged.out)["content_digest"] == whole.content_digest
    assert tracekit.verify(tmp_path / "merged.h5") == []


def test_a_damaged_trace_is_told_and_the_others_are_kept(out):
    line = f"{sys.executable} {JOBS / 'generate.py'}"
    damage = 'set -- "$(dirname "$TRACEKIT_RECORD")"/*.h5; printf x >> "$1"'
    done, told = record(out, "sh", "-c", f"{line} 8,9; {damage}; {line} 5,6,7")
    assert done.returncode == 3
    assert "cannot be used" in told["problems"][0]
    assert told["processes"] == 1
    assert [path.suffix for path in Path(told["kept"]).iterdir()] == [".h5"]
    assert all("rank 0 is missing: its trace is damaged" in line.cut for line in ledger(out))


@pytest.mark.parametrize("gigabytes", ["nan", "inf", "0", "-1"])
def test_a_budget_that_is_no_size_is_refused_before_the_command_runs(out, gigabytes):
    done, _ = record(out, sys.executable, "-c", "print('ran')", options=["--max-size-gb", gigabytes])
    assert done.returncode == 2
    assert "--max-size-gb is" in done.stderr + done.stdout
    assert "ran" not in done.stdout


def test_a_compiled_model_runs_and_is_told(out):
    done, told = record(out, *GENERATE, "5,6,7", "compiled")
    assert done.returncode == 3
    assert "compiled 3" in done.stdout
    assert any("torch.compile" in problem for problem in told["problems"])
    assert not all(line.complete for line in ledger(out))


def test_models_that_a_program_deletes_are_freed_and_recorded(out):
    done, told = record(out, *GENERATE, "5,6,7", "delete")
    assert (done.returncode, told["problems"]) == (0, []), done.stderr
    assert told["processes"] == 4
    assert told["requests"] == 4


def test_a_model_whose_place_cannot_be_told_runs_and_is_told(out):
    done, told = record(out, *GENERATE, "5,6,7", "place", options=["--engine", "transformers"])
    assert done.returncode == 3
    assert done.stdout.count("[[5, 6, 7,") == 2
    assert "Qwen3ForCausalLM is not recorded: ValueError" in told["problems"][0]
    assert told["processes"] == 1


def test_a_process_in_a_process_is_recorded(out):
    done, told = record(out, *GENERATE, "5,6,7", "spawn")
    assert (done.returncode, told["problems"]) == (0, []), done.stderr
    assert (told["processes"], told["requests"]) == (2, 2)


@pytest.mark.parametrize("flag", ["-I", "-S", "-EB"])
def test_a_python_that_looks_at_no_environment_is_told(out, flag):
    done, told = record(out, sys.executable, flag, "-c", "print('ran')")
    assert (done.returncode, "ran" in done.stdout) == (3, True)
    assert f"started with -{flag[1]}, and such a Python is never recorded" in told["problems"][0]


def test_a_wrong_setting_is_refused_before_the_command_runs(out, monkeypatch):
    monkeypatch.setenv("TRACEKIT_LAYER", "3")
    done, _ = record(out, sys.executable, "-c", "print('ran')")
    assert (done.returncode, "ran" in done.stdout) == (2, False)
    assert "TRACEKIT_LAYER is not a setting" in done.stderr
    assert list(out.parent.iterdir()) == []


def test_settings_of_another_recording_do_not_reach_this_one(out, monkeypatch):
    monkeypatch.setenv("TRACEKIT_RECORD", str(out.parent / "no" / "other.h5"))
    monkeypatch.setenv("TRACEKIT_LAYERS", "0")
    done, told = record(out, *GENERATE, "5,6,7")
    assert (done.returncode, told["calls"]) == (0, 6), done.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_reach_the_command_and_its_code_is_ours(out, number):
    program = (
        "import signal, sys\n"
        f"signal.signal({int(number)}, lambda *_: sys.exit(40))\n"
        "print('ready', flush=True)\n"
        "signal.pause()\n"
    )
    arguments = [str(TRACEKIT), "record", "-o", str(out), "--", sys.executable, "-c", program]
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    # This test may itself run under `nohup`, and what is ignored stays ignored.
    fresh = (
        "import os, signal, sys\n"
        "signal.signal(signal.SIGHUP, signal.SIG_DFL)\n"
        "os.execv(sys.argv[1], sys.argv[1:])\n"
    )
    running = subprocess.Popen([sys.executable, "-c", fresh, *arguments], cwd=ROOT, **pipes)
    assert running.stdout.readline() == b"ready\n"
    running.send_signal(number)
    running.communicate()
    assert running.returncode == 40


def test_a_signal_that_is_ignored_stays_ignored_in_the_command(out):
    """`nohup tracekit record -- CMD` outlives its terminal."""
    program = "import signal; print(signal.getsignal(signal.SIGHUP) is signal.SIG_IGN)"
    arguments = [str(TRACEKIT), "record", "-o", str(out), "--", sys.executable, "-c", program]
    done = subprocess.run(
        ["sh", "-c", 'trap "" HUP; exec "$@"', "sh", *arguments],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.stdout == "True\n"


def test_a_command_that_cannot_be_run_is_told(out):
    for command, words in ((out.parent, "permission denied"), (Path(__file__), "permission denied")):
        done, _ = record(out, command)
        assert (done.returncode, words in done.stderr) == (2, True), done.stderr
        assert list(out.parent.iterdir()) == []


def test_a_command_that_takes_the_folder_away_is_told_that_nothing_is_there(out):
    done, told = record(out, "sh", "-c", 'rm -r "$(dirname "$TRACEKIT_RECORD")"')
    assert (done.returncode, told["path"]) == (3, None)
    assert "no process recorded anything" in told["problems"][0]
    assert not list(out.parent.iterdir())
