"""A run is a folder: what it was asked for, one file a rank, one trace. It can be judged again at any time.

    run.json              role, identity and world: written before anything runs
    ranks/tp0-cp0.json    written by each rank after it ran: readback, split plans, digests of what it held
    trace.h5              what the ranks computed, in logical words

A file of a rank appears whole or not at all, so a rank that died is a rank without a file.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from tracekit.contract.plan_set import PlanEntry, SplitKVRuntimePlanSet
from tracekit.contract.readback import AttentionRuntimeReadback, Role
from tracekit.contract.refuse import refuse
from tracekit.contract.topology import check_world, rank_name
from tracekit.contract.wire import dump, parse

RUN_SCHEMA = "tracekit.attention_run.v1"


@dataclass(frozen=True)
class RunHead:
    """What a run was asked for.

    Args:
        schema_version: `RUN_SCHEMA`.
        role: which side it is.
        tp_world_size: tensor-parallel ranks that were asked for.
        cp_world_size: context-parallel ranks that were asked for.

    Raises:
        BindingInvalid: `B-TOPOLOGY` for a world without ranks, or with more than any job has.
    """

    schema_version: str
    role: Role
    tp_world_size: int
    cp_world_size: int

    def __post_init__(self) -> None:
        check_world(self.tp_world_size, self.cp_world_size)


@dataclass(frozen=True)
class RankFile:
    """What one rank left.

    Args:
        readback: what it executed.
        total_kv_tokens: keys of each request, as the rank saw them.
        plans: the split plans that it executed, one an owner and request; none where nobody observed them.
        digests: tensor -> SHA-256 of what the rank held (`contract/shards.py`).
    """

    readback: AttentionRuntimeReadback
    total_kv_tokens: tuple[int, ...] = ()
    plans: tuple[PlanEntry, ...] = ()
    digests: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Run:
    """A folder that was read.

    Args:
        path: the folder.
        head: what was asked for.
        identity: what the run states of itself.
        ranks: what the ranks left, in rank order.
    """

    path: Path
    head: RunHead
    identity: dict[str, Any]
    ranks: tuple[RankFile, ...]

    @property
    def trace(self) -> Path:
        """Where its trace is."""
        return self.path / "trace.h5"

    @property
    def readbacks(self) -> list[AttentionRuntimeReadback]:
        """Of the ranks that left one."""
        return [rank.readback for rank in self.ranks]

    @property
    def told(self) -> dict[str, dict[str, str]]:
        """The digests that the ranks told, by rank name."""
        return {rank_name(*rank.readback.sharding.rank): rank.digests for rank in self.ranks}

    def plan_set(self) -> SplitKVRuntimePlanSet | None:
        """Return what really ran; None where a rank did not observe it.

        Raises:
            BindingInvalid: `B-PLAN-SET`.
        """
        if not self.ranks or not all(rank.plans for rank in self.ranks):
            return None
        totals = {rank.total_kv_tokens for rank in self.ranks}
        if len(totals) > 1:
            refuse("B-PLAN-SET", f"ranks of {self.path.name} saw requests of other lengths.")
        total = totals.pop()
        for rank in self.ranks:
            for plan in rank.plans:
                if (plan.coordinate.tp_rank, plan.coordinate.cp_rank) != rank.readback.sharding.rank:
                    told = rank_name(*rank.readback.sharding.rank)
                    refuse("B-PLAN-SET", f"{told} tells the plan of another rank, {plan.coordinate}.")
        plans = tuple(plan for rank in self.ranks for plan in rank.plans)
        return SplitKVRuntimePlanSet(
            len(total), self.head.tp_world_size, self.head.cp_world_size, total, plans
        )


def write_head(path: Path, head: RunHead, identity: dict[str, Any]) -> None:
    """Begin a run folder; before anything runs.

    Raises:
        BindingInvalid: `B-RUN` the folder holds a run: what a rank of that one left would count for this one.
    """
    if any((path / "ranks").glob("*")) or (path / "trace.h5").exists():
        refuse("B-RUN", f"{path} holds a run already; name another folder, so that two runs do not mix.")
    (path / "ranks").mkdir(parents=True, exist_ok=True)
    _write(path / "run.json", {**dump(head), "identity": identity})


def write_rank(path: Path, rank: RankFile) -> None:
    """Leave the file of a rank; after it ran."""
    tp_rank, cp_rank = rank.readback.sharding.rank
    _write(path / "ranks" / f"tp{tp_rank}-cp{cp_rank}.json", dump(rank))


def read_run(path: Path) -> Run:
    """Read a run folder.

    Raises:
        BindingInvalid: `B-RUN` the folder is no run; `B-JSON` and the rules of the nouns for its files.
    """
    told = _read(path / "run.json")
    identity = told.pop("identity", None)
    if not isinstance(identity, dict):
        refuse("B-RUN", f"{path / 'run.json'} states no identity.")
    head = parse(RunHead, told, "run.json")
    if head.schema_version != RUN_SCHEMA:
        refuse("B-RUN", f"{path} is of schema {head.schema_version}; this tracekit reads {RUN_SCHEMA}.")
    ranks = []
    for file in sorted((path / "ranks").glob("*.json")):
        rank = parse(RankFile, _read(file), file.name)
        sharding = rank.readback.sharding
        if file.name != f"tp{sharding.tp_rank}-cp{sharding.cp_rank}.json":
            refuse("B-RUN", f"{file.name} is of {rank_name(*sharding.rank)}.")
        ranks.append(rank)
    ranks.sort(key=lambda rank: rank.readback.sharding.rank)
    return Run(path, head, identity, tuple(ranks))


def _write(path: Path, data: Any) -> None:
    """A file appears whole or not at all."""
    beside = path.with_name(f"{path.name}.tmp")
    beside.write_text(json.dumps(data, indent=1, allow_nan=False) + "\n")
    beside.replace(path)


def _read(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_bytes(), object_pairs_hook=_once, parse_constant=_no_number)
    except FileNotFoundError:
        refuse("B-RUN", f"there is no {path}; a run is a folder with run.json, ranks/ and trace.h5.")
    except (OSError, ValueError, RecursionError) as error:
        refuse("B-RUN", f"{path} is no JSON that can be read ({error}).")
    if not isinstance(data, dict):
        refuse("B-RUN", f"{path} holds no JSON object.")
    return data


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A name that comes twice would be read as its last value, and shown as its first."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)} comes twice")
    return found


def _no_number(word: str) -> NoReturn:
    raise ValueError(f"{word} is no number of JSON")
