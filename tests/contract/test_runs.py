"""TP = 2 × CP = 2 as four real processes over gloo: the bits of one process, and a binding from evidence."""

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import jsonschema
import numpy as np
import pytest

import tracekit
from tools.binding.job import Job
from tools.binding.launch import launch
from tools.binding.schema import document
from tracekit.cli.main import run
from tracekit.contract import Role, TopologyPolicy
from tracekit.contract.folder import read_run
from tracekit.contract.judge import bind_runs
from tracekit.contract.shards import digests, shard_pieces
from tracekit.model import AttentionCall, Bits, KVFamily, Recording
from tracekit.providers.split import Sequence
from tracekit.store import open_trace, write_trace

JOB = Job(tokens=416, prompt=408, chunk=200, layers=1)
ONE = replace(JOB, tp=1, cp=1)
SIDES = {"training": Role.TRAIN, "rollout": Role.INFER}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of both sides, in both layouts over four processes, and in one process."""
    folder = tmp_path_factory.mktemp("runs")
    for name, job in (
        ("zigzag", JOB),
        ("contiguous", replace(JOB, sequence=Sequence.CONTIGUOUS)),
        ("one", ONE),
    ):
        for side, role in SIDES.items():
            assert launch(job, role, folder / name / side) == [0] * (job.tp * job.cp)
    return folder


@pytest.fixture
def pair(runs: Path, tmp_path: Path) -> Path:
    """A copy of the zigzag pair, to be damaged."""
    return Path(shutil.copytree(runs / "zigzag", tmp_path / "pair"))


def calls(path: Path) -> list[AttentionCall]:
    with open_trace(path / "trace.h5") as trace:
        return list(trace)


@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
def test_training_and_rollout_bind(runs: Path, layout: str) -> None:
    found = bind_runs(runs / layout / "training", runs / layout / "rollout")

    assert found.issues == ()
    assert found.passed
    assert found.bits["rows"] == JOB.tokens
    assert found.recorded_differences["modes"]["rollout"] == "chunked_prefill, decode"
    assert any("compared in bits" in sentence for sentence in found.boundary)


@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
@pytest.mark.parametrize("side", SIDES)
def test_four_processes_have_the_bits_of_one(runs: Path, layout: str, side: str) -> None:
    ours, one = calls(runs / layout / side), calls(runs / "one" / side)

    assert len(ours) == len(one) > 0
    for split, whole in zip(ours, one, strict=True):
        for name in ("out", "lse"):
            assert getattr(split, name).bits.same(getattr(whole, name).bits)


@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
def test_gradients_of_four_processes_have_the_bits_of_one(runs: Path, layout: str) -> None:
    (split,), (whole,) = calls(runs / layout / "training"), calls(runs / "one" / "training")
    assert split.grads is not None
    assert whole.grads is not None
    ours, theirs = (grads.d_kv[JOB.key][KVFamily.DENSE] for grads in (split.grads, whole.grads))

    assert split.grads.d_q is not None
    assert whole.grads.d_q is not None
    assert split.grads.d_q.same(whole.grads.d_q)
    assert ours.keys.same(theirs.keys)
    assert ours.value_bits.same(theirs.value_bits)
    assert np.count_nonzero(ours.keys.data) > ours.keys.size // 2


@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
def test_a_cut_that_may_differ_binds_with_one_process(runs: Path, layout: str) -> None:
    strict = bind_runs(runs / "one" / "training", runs / layout / "rollout")
    free = bind_runs(runs / "one" / "training", runs / layout / "rollout", topology=TopologyPolicy.MAY_DIFFER)

    assert (strict.comparable, strict.codes()[0]) == (False, "TOPOLOGY_MISMATCH")
    assert free.passed, free.issues


def test_the_environment_says_two_and_one_rank_runs(runs: Path, tmp_path: Path) -> None:
    """Context parallelism was asked for; one process came; a setting is no evidence."""
    job = replace(JOB, tp=1, cp=1)
    asked = tmp_path / "training"
    assert launch(job, Role.TRAIN, asked, requested_cp=2) == [0]

    found = bind_runs(asked, runs / "one" / "rollout")

    assert not found.passed
    assert "CP_FALLBACK" in found.codes()
    assert "RUNTIME_FALLBACK" in found.codes()


def test_a_rank_that_is_killed_leaves_no_verdict(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dead = tmp_path / "rollout"
    codes = launch(JOB, Role.INFER, dead, kill=1)
    assert any(codes)

    found = bind_runs(runs / "zigzag" / "training", dead)
    assert run(["bind", str(runs / "zigzag" / "training"), str(dead)]) == 3
    assert "inconclusive" in capsys.readouterr().out
    assert found.status == "inconclusive"
    assert {"RUNTIME_INCOMPLETE", "BITS_NOT_COMPARED"} <= set(found.codes())


def _rank(pair: Path, name: str = "tp1-cp0") -> Path:
    return pair / "rollout" / "ranks" / f"{name}.json"


def _edit(path: Path, *keys: str, value: object) -> None:
    told = json.loads(path.read_text())
    place = told
    for key in keys[:-1]:
        place = place[key]
    place[keys[-1]] = value
    path.write_text(json.dumps(told))


def _flip(pair: Path, tensor: str) -> None:
    """One bit of one value of a trace."""
    path = pair / "rollout" / "trace.h5"
    with open_trace(path) as trace:
        recording, held = trace.recording, list(trace)

    def flipped() -> Iterator[AttentionCall]:
        for n, call in enumerate(held):
            if n == 1:
                output = getattr(call, tensor)
                data = output.bits.data.copy()
                data.flat[7] ^= 1
                bits = type(output)(Bits(data, output.bits.dtype), output.origin)
                yield replace(call, **{tensor: bits})
            else:
                yield call

    write_trace(path, recording, flipped())


DAMAGE = {
    "one bit of an output": ("BITS_DIFFER", lambda pair: _flip(pair, "out")),
    "one bit of an LSE": ("BITS_DIFFER", lambda pair: _flip(pair, "lse")),
    "a trace that its ranks did not compute": ("EVIDENCE_MISMATCH", lambda pair: _flip(pair, "out")),
    "a digest": (
        "EVIDENCE_MISMATCH",
        lambda pair: _edit(_rank(pair), "digests", "keys", value="0" * 64),
    ),
    "a digest that is not told": (
        "EVIDENCE_MISMATCH",
        lambda pair: _edit(_rank(pair), "digests", value={}),
    ),
    "a kernel that is only stated": (
        "EVIDENCE_MISMATCH",
        lambda pair: _edit(_rank(pair), "readback", "core", "core_id", value="flash 3"),
    ),
    "a version of the kernel that did not run, on both sides": (
        "EVIDENCE_MISMATCH",
        lambda pair: [
            _edit(told, "readback", "core", "core_id", value="tka1 tka1=0")
            for told in pair.glob("*/ranks/*.json")
        ],
    ),
    "heads that are only stated": (
        "IDENTITY_MISMATCH",
        lambda pair: [
            _edit(pair / side / "run.json", "identity", "q_heads", value=64) for side in SIDES
        ],
    ),
    "tokens that are only stated": (
        "IDENTITY_MISMATCH",
        lambda pair: [
            _edit(pair / side / "run.json", "identity", "token_ids_fingerprint", value="0" * 64)
            for side in SIDES
        ],
    ),
    "no trace": ("BITS_NOT_COMPARED", lambda pair: (pair / "rollout" / "trace.h5").unlink()),
    "no readback of a rank": ("RUNTIME_INCOMPLETE", lambda pair: _rank(pair).unlink()),
    "no plan": ("SPLIT_KV_RUNTIME_MISSING", lambda pair: _edit(_rank(pair), "plans", value=[])),
    "a plan of other keys": (
        "SPLIT_KV_MISMATCH",
        lambda pair: _edit(_rank(pair), "total_kv_tokens", value=[512]),
    ),
    "a world that was asked for and is not there": (
        "CP_FALLBACK",
        lambda pair: _edit(pair / "rollout" / "run.json", "cp_world_size", value=4),
    ),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGE)
def test_nothing_that_a_run_stored_is_believed(pair: Path, damage: str) -> None:
    code, hurt = DAMAGE[damage]
    hurt(pair)

    found = bind_runs(pair / "training", pair / "rollout")

    assert code in found.codes()
    assert not found.passed


@pytest.mark.parametrize(("tensor", "pattern"), [("out", 0), ("out", 0x7FC0), ("lse", 0x7FC00000)])
def test_equal_outputs_that_are_none_are_no_evidence(pair: Path, tensor: str, pattern: int) -> None:
    """Zeros that nobody wrote, and NaN: the same on both sides, and told by the ranks as they are held."""

    def spoiled(call: AttentionCall) -> AttentionCall:
        output = getattr(call, tensor)
        data = np.full_like(output.bits.data, pattern)
        return replace(call, **{tensor: replace(output, bits=Bits(data, output.bits.dtype))})

    for side in SIDES:
        _rewrite(pair / side, lambda recording, calls: (recording, [spoiled(call) for call in calls]))

    found = bind_runs(pair / "training", pair / "rollout")

    assert found.codes() == ["BITS_NOT_COMPARED"] * 2
    assert not found.passed


def _rewrite(
    side: Path, change: Callable[[Recording, list[AttentionCall]], tuple[Recording, list[AttentionCall]]]
) -> None:
    """Write another trace, with the digests that its ranks would have told."""
    path = side / "trace.h5"
    with open_trace(path) as trace:
        recording, calls = change(trace.recording, list(trace))
    write_trace(path, recording, calls)
    for rank in read_run(side).ranks:
        shard = rank.readback.sharding
        told = side / "ranks" / f"tp{shard.tp_rank}-cp{shard.cp_rank}.json"
        _edit(told, "digests", value=digests(shard_pieces(calls, shard)))


@pytest.mark.parametrize("lost", ["no ledger", "a hook that did not fire"])
def test_a_capture_that_lacks_calls_proves_no_whole_scope(pair: Path, lost: str) -> None:
    def change(recording: Recording, calls: list[AttentionCall]) -> tuple[Recording, list[AttentionCall]]:
        lines = [replace(line, expected=line.expected + 1) for line in recording.ledger]
        return replace(recording, ledger=() if lost == "no ledger" else tuple(lines)), calls

    _rewrite(pair / "rollout", change)

    found = bind_runs(pair / "training", pair / "rollout")
    assert {(issue.code, issue.field) for issue in found.issues} == {
        ("EVIDENCE_MISMATCH", "rollout.scope_verified")
    }


def test_inputs_that_are_no_numbers_are_no_evidence(pair: Path) -> None:
    for side in SIDES:
        _rewrite(pair / side, lambda recording, calls: (recording, [_nan_q(call) for call in calls]))

    assert bind_runs(pair / "training", pair / "rollout").codes() == ["BITS_NOT_COMPARED"] * 2


def _nan_q(call: AttentionCall) -> AttentionCall:
    return replace(call, q=Bits(np.full_like(call.q.data, 0x7FC0), call.q.dtype))


def test_rows_of_one_side_are_told_and_not_compared(pair: Path) -> None:
    def without_the_last(
        recording: Recording, calls: list[AttentionCall]
    ) -> tuple[Recording, list[AttentionCall]]:
        last = max(call.step for call in calls)
        ledger = tuple(line for line in recording.ledger if line.step < last)
        return replace(recording, ledger=ledger), [call for call in calls if call.step < last]

    _rewrite(pair / "rollout", without_the_last)

    found = bind_runs(pair / "training", pair / "rollout")
    assert any(line.startswith("Not compared: only in training: ") for line in found.boundary)
    assert found.bits["rows"] == JOB.tokens - 1


@pytest.mark.parametrize(
    ("rule", "hurt"),
    [
        ("B-RUN", lambda pair: (pair / "rollout" / "run.json").unlink()),
        ("B-RUN", lambda pair: (pair / "rollout" / "run.json").write_text("{")),
        ("B-RUN", lambda pair: (pair / "rollout" / "run.json").write_text("[]")),
        ("B-RUN", lambda pair: _edit(pair / "rollout" / "run.json", "identity", value=None)),
        ("B-RUN", lambda pair: _edit(pair / "rollout" / "run.json", "schema_version", value="v2")),
        ("B-RUN", lambda pair: _rank(pair).rename(_rank(pair, "tp3-cp0"))),
        ("B-JSON", lambda pair: _edit(_rank(pair), "readback", "modes", value="decode")),
        ("B-TOPOLOGY", lambda pair: _edit(_rank(pair), "readback", "sharding", "tp_rank", value=5)),
        ("B-SPLIT-PLAN", lambda pair: _edit(_rank(pair), "plans", value=[_plan()])),
    ],
)
def test_a_folder_that_is_no_run(
    pair: Path, rule: str, hurt: Callable[[Path], object], capsys: pytest.CaptureFixture[str]
) -> None:
    hurt(pair)

    assert run(["bind", str(pair / "training"), str(pair / "rollout"), "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["rule"] == rule


def _plan() -> dict[str, object]:
    return {
        "coordinate": {"batch_index": 0, "tp_rank": 1, "cp_rank": 0, "owner_cp_rank": 0},
        "expected_kv_ranges": [[0, 128]],
        "execution": {
            "requested": {"mode": "fixed", "fixed_split_size": 128, "strict": True},
            "actual_mode": "fixed",
            "actual_split_size": 128,
            "boundaries": [[0, 100], [100, 128]],
            "merge_order": "global_block_index",
            "acc_dtype": "float32",
            "downcast_at": "final_write",
            "backend": "tka1",
            "fallback": False,
            "fallback_reason": None,
        },
    }


def test_the_command_line_prints_its_boundary(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sides = [str(runs / "zigzag" / side) for side in SIDES]

    assert run(["bind", *sides]) == 0
    words = capsys.readouterr().out
    assert run(["bind", *sides, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)

    assert "passed" in words
    assert "Nothing is said of other shapes" in words
    assert told["claim_boundary"]
    jsonschema.validate(told, {**document(), "$ref": "#/$defs/binding"})


def test_the_run_is_replayed_like_any_trace(runs: Path) -> None:
    """What four processes computed is what one process computes from their trace."""
    report = tracekit.replay(runs / "zigzag" / "training" / "trace.h5", claims=["recorded"], provider="tka1")

    assert [verdict.status for verdict in report.verdicts] == [tracekit.Status.HELD]


def test_the_trace_holds_what_the_job_gave(runs: Path) -> None:
    (call,) = calls(runs / "zigzag" / "training")
    values = JOB.settings.plain(JOB.raw(0, "v"))

    assert np.array_equal(call.kv[JOB.key][KVFamily.DENSE].value_bits.data, values)
