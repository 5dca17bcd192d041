"""Every leaf of a run's files is changed, one at a time: nothing but what is free to differ may pass."""

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.edits import edited
from tools.binding.job import Job
from tools.binding.launch import launch
from tracekit.contract import Role
from tracekit.contract.folder import RankFile
from tracekit.contract.judge import bind_runs
from tracekit.contract.shards import digests, shard_pieces
from tracekit.contract.wire import dump, parse
from tracekit.errors import BindingInvalid
from tracekit.model import AttentionCall, Bits
from tracekit.store import open_trace, write_trace

JOB = Job(tokens=160, prompt=158, chunk=96, layers=1, q_heads=2, kv_heads=1, head_dim=8, tp=1, cp=2)
SIDES = {"training": Role.TRAIN, "rollout": Role.INFER}
FREE = frozenset(
    {
        ("readback", "engine"),
        ("readback", "reduction_engine"),
        ("readback", "core", "actual_backend"),
        ("readback", "core", "communication_backend"),
        ("readback", "knobs"),
        ("readback", "knobs", "context_parallel_size"),
        ("readback", "knobs", "context_parallel_size", "reason"),
        ("readback", "reason"),
        ("readback", "recorded"),
        ("readback", "recorded", "launches"),
        ("plans", "execution", "backend"),
    }
)
"""What docs/binding.md calls recorded: names, reasons of what was applied, settings that nobody asked for."""

Path_ = tuple[str | int, ...]
ENUMS = (("train", "infer"), ("applied", "fallback"), ("fixed", "disabled"), ("float32", "bfloat16"),
         ("aligned_binary", "left_fold"), ("global_block_index", "arrival"), ("core", "module"),
         ("final_write", "per_block"), ("after_merge", "every_partial"), ("e", "2"))  # fmt: skip


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fuzz")
    for side, role in SIDES.items():
        assert launch(JOB, role, folder / side) == [0, 0]
    assert bind_runs(folder / "training", folder / "rollout").passed
    return folder


def places(value: Any, path: Path_ = ()) -> Iterator[tuple[Path_, Any]]:
    """Yield every node below the root, with its value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield (*path, key), item
        yield from places(item, (*path, key))


def others(value: Any) -> Iterator[Any]:
    """Yield values that are not this one: of its type, and of another."""
    yield None if value is not None else 0
    if isinstance(value, bool):
        yield not value
    elif isinstance(value, int):
        yield from (value + 1, -value - 1, 2**70, float(value))
    elif isinstance(value, float):
        yield from (value * 2, float("nan"), float("inf"))
    elif isinstance(value, str):
        yield f"{value}x"
        yield from (b if value == a else a for a, b in ENUMS if value in (a, b))
    elif value:
        yield type(value)()
    if isinstance(value, list) and value and not isinstance(value[0], str):  # a mode may come twice
        yield [*value, value[0]]


def free(path: Path_) -> bool:
    return tuple(key for key in path if isinstance(key, str)) in FREE


@pytest.mark.parametrize("name", ["run.json", "ranks/tp0-cp1.json"])
@pytest.mark.parametrize("side", SIDES)
def test_no_leaf_of_a_file_may_be_another_one(runs: Path, tmp_path: Path, side: str, name: str) -> None:
    """A verdict or a refusal comes of each, and no traceback; and only what is free to differ passes."""
    pair = Path(shutil.copytree(runs, tmp_path / "pair"))
    file = pair / side / name
    told = json.loads(file.read_text())
    passed = []
    for path, value in places(told):
        edits = [(repr(other), edited(told, path, other)) for other in others(value)]
        for what, damaged in [*edits, ("gone", edited(told, path, None, gone=True))]:
            file.write_text(json.dumps(damaged))
            try:
                found = bind_runs(pair / "training", pair / "rollout")
            except BindingInvalid:
                continue
            json.dumps(found.to_dict(), allow_nan=False)
            if found.passed and not free(path):
                passed.append((path, what))

    assert passed == []


@pytest.mark.parametrize(
    "text",
    ['{"a": 1, "a": 2}', '{"a": NaN}', '{"a": Infinity}', "[" * 100_000, '{"a": "\\ud800"}', "\ufeff{}", ""],
    ids=["name twice", "NaN", "infinity", "deep", "half a character", "byte order mark", "empty"],
)
@pytest.mark.parametrize("name", ["run.json", "ranks/tp0-cp1.json"])
def test_json_that_is_none(runs: Path, tmp_path: Path, name: str, text: str) -> None:
    pair = Path(shutil.copytree(runs, tmp_path / "pair"))
    (pair / "rollout" / name).write_text(text)

    with pytest.raises(BindingInvalid, match=name.rpartition("/")[2]):
        bind_runs(pair / "training", pair / "rollout")


def _swap(one: Path, other: Path) -> None:
    held = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(held)


MIXED = {
    "the trace of the other side": lambda pair: shutil.copy(
        pair / "training" / "trace.h5", pair / "rollout" / "trace.h5"
    ),
    "traces swapped": lambda pair: _swap(pair / "training" / "trace.h5", pair / "rollout" / "trace.h5"),
    "the ranks of the other side": lambda pair: [
        shutil.copy(file, pair / "rollout" / "ranks") for file in (pair / "training" / "ranks").iterdir()
    ],
    "the whole other side": lambda pair: [
        shutil.rmtree(pair / "rollout"), shutil.copytree(pair / "training", pair / "rollout")
    ],
}  # fmt: skip


@pytest.mark.parametrize("mixed", MIXED)
def test_evidence_of_the_other_side_is_none_of_this_one(runs: Path, tmp_path: Path, mixed: str) -> None:
    """The bits are the same, so only what else is told can give it away."""
    pair = Path(shutil.copytree(runs, tmp_path / "pair"))
    MIXED[mixed](pair)

    assert not bind_runs(pair / "training", pair / "rollout").passed


def _rewrite(run: Path, change: Callable[[list[AttentionCall]], list[AttentionCall]]) -> None:
    """Another trace, of which the ranks tell the right digests."""
    with open_trace(run / "trace.h5") as trace:
        recording, calls = trace.recording, change(list(trace))
    steps = tuple(replace(step, expected=n, fired=n, recorded=n) for step in recording.ledger or ()
                  if (n := sum(call.step == step.step for call in calls)))  # fmt: skip
    write_trace(run / "trace.h5", replace(recording, ledger=steps), iter(calls))
    for file in (run / "ranks").iterdir():
        rank = parse(RankFile, json.loads(file.read_text()))
        told = digests(shard_pieces(calls, rank.readback.sharding))
        file.write_text(json.dumps(dump(replace(rank, digests=told))))


def _second_layer(calls: list[AttentionCall]) -> list[AttentionCall]:
    return [replace(call, layer=layer) for call in calls for layer in (0, 1)]


def _nan(calls: list[AttentionCall]) -> list[AttentionCall]:
    def hurt(call: AttentionCall) -> AttentionCall:
        assert call.out is not None
        data = call.out.bits.data.copy()
        data[0] = 0x7FC0
        return replace(call, out=replace(call.out, bits=Bits(data, call.out.bits.dtype)))

    return [hurt(calls[0]), *calls[1:]]


def test_a_layer_that_one_side_lacks_was_not_compared(runs: Path, tmp_path: Path) -> None:
    pair = Path(shutil.copytree(runs, tmp_path / "pair"))
    _rewrite(pair / "training", _second_layer)
    assert bind_runs(pair / "training", pair / "rollout").codes() == ["BITS_NOT_COMPARED"]

    _rewrite(pair / "rollout", _second_layer)
    assert bind_runs(pair / "training", pair / "rollout").passed


def test_equal_nans_prove_nothing(runs: Path, tmp_path: Path) -> None:
    pair = Path(shutil.copytree(runs, tmp_path / "pair"))
    for side in SIDES:
        _rewrite(pair / side, _nan)

    assert bind_runs(pair / "training", pair / "rollout").codes() == ["BITS_NOT_COMPARED"] * 2


def test_sides_that_are_swapped_collide(runs: Path) -> None:
    assert "ROLE_COLLISION" in bind_runs(runs / "rollout", runs / "training").codes()


def test_a_role_that_was_not_asked_for(runs: Path, tmp_path: Path) -> None:
    pair = Path(shutil.copytree(runs, tmp_path / "pair"))
    head = pair / "rollout" / "run.json"
    head.write_text(json.dumps({**json.loads(head.read_text()), "role": "train"}))

    assert bind_runs(pair / "training", pair / "rollout").codes() == ["ROLE_COLLISION"]


def test_plans_that_another_rank_tells(runs: Path, tmp_path: Path) -> None:
    pair = Path(shutil.copytree(runs, tmp_path / "pair"))
    files = [pair / "rollout" / "ranks" / f"tp0-cp{rank}.json" for rank in (0, 1)]
    told = [json.loads(file.read_text()) for file in files]
    for file, rank, other in zip(files, told, reversed(told), strict=True):
        file.write_text(json.dumps({**rank, "plans": other["plans"]}))

    assert "SPLIT_KV_MISMATCH" in bind_runs(pair / "training", pair / "rollout").codes()


def test_a_folder_that_holds_a_run_takes_no_second_one(runs: Path, tmp_path: Path) -> None:
    """A rank that dies in the second one would leave the file of the first."""
    pair = Path(shutil.copytree(runs, tmp_path / "pair"))

    with pytest.raises(BindingInvalid, match="another folder") as refused:
        launch(JOB, Role.INFER, pair / "rollout", kill=0)

    assert refused.value.rule == "B-RUN"
    assert bind_runs(pair / "training", pair / "rollout").passed
