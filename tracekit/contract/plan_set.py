"""The split plans of a whole side: every request × TP rank × CP consumer × KV owner (B11, B12).

An owner may hold several ranges (zigzag context parallelism gives it two), which RL-Kernel's set, with one
range an owner in rank order, cannot say.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import astuple, dataclass, replace
from itertools import product

from tracekit.contract.codes import Issue
from tracekit.contract.refuse import refuse
from tracekit.contract.split import SplitExecution, differing
from tracekit.contract.topology import Range, tiles


@dataclass(frozen=True, order=True)
class Coordinate:
    """Where a plan ran: which request, on which rank, on whose keys."""

    batch_index: int
    tp_rank: int
    cp_rank: int
    owner_cp_rank: int


@dataclass(frozen=True)
class PlanEntry:
    """One plan that ran.

    Args:
        coordinate: where.
        expected_kv_ranges: the keys of the owner in this request, ascending; none where it holds none.
        execution: what ran on them.
    """

    coordinate: Coordinate
    expected_kv_ranges: tuple[Range, ...]
    execution: SplitExecution


@dataclass(frozen=True)
class SplitKVRuntimePlanSet:
    """What really ran on a side.

    Args:
        batch_size: requests.
        tp_world_size: tensor-parallel ranks.
        cp_world_size: context-parallel ranks.
        total_kv_tokens: keys of each request, `[batch_size]`.
        entries: one plan a coordinate, in any order.

    Raises:
        BindingInvalid: `B-PLAN-SET` for a missing, extra or repeated coordinate, a plan that does not cover
            its owner's keys, owners that do not hold each key once, and ranks that ran unequal plans.
    """

    batch_size: int
    tp_world_size: int
    cp_world_size: int
    total_kv_tokens: tuple[int, ...]
    entries: tuple[PlanEntry, ...]

    def __post_init__(self) -> None:
        if min(self.batch_size, self.tp_world_size, self.cp_world_size) < 1:
            refuse("B-PLAN-SET", "a plan set has a request and a rank of each kind.")
        if len(self.total_kv_tokens) != self.batch_size or min(self.total_kv_tokens) < 1:
            refuse("B-PLAN-SET", f"{self.batch_size} requests have that many positive numbers of keys.")
        self._check_coordinates()
        for entry in self.entries:
            self._check_entry(entry)
        self._check_owners()
        self._check_ranks()

    def _check_coordinates(self) -> None:
        """Places are counted no further than to the first without a plan: a file may state any world."""
        found = Counter(entry.coordinate for entry in self.entries)
        sizes = (self.batch_size, self.tp_world_size, self.cp_world_size, self.cp_world_size)
        twice = (at for at, count in found.items() if count > 1)
        missing = (at for at in self.coordinates() if at not in found)
        extra = (
            at for at in found if not all(0 <= n < size for n, size in zip(astuple(at), sizes, strict=True))
        )
        for word, places in (("comes twice", twice), ("is missing", missing), ("is no place", extra)):
            first = min(places, default=None) if word != "is missing" else next(places, None)
            if first is not None:
                refuse("B-PLAN-SET", f"the plan of {first} {word}.")

    def coordinates(self) -> Iterator[Coordinate]:
        """Yield every place that has a plan."""
        ranks = range(self.cp_world_size)
        for place in product(range(self.batch_size), range(self.tp_world_size), ranks, ranks):
            yield Coordinate(*place)

    def _check_entry(self, entry: PlanEntry) -> None:
        """The boundaries cover the owner's keys, each within one of its ranges."""
        if entry.execution.actual_mode is None:
            refuse(
                "B-PLAN-SET", f"nobody observed the plan of {entry.coordinate}; a set holds plans that ran."
            )
        cut: dict[Range, list[Range]] = {owned: [] for owned in entry.expected_kv_ranges}
        for start, stop in entry.execution.boundaries:
            owned = next((own for own in cut if own[0] <= start and stop <= own[1]), None)
            if owned is None:
                refuse("B-PLAN-SET", f"keys {start} to {stop} of {entry.coordinate} are not its owner's.")
            cut[owned].append((start - owned[0], stop - owned[0]))
        for (start, stop), parts in cut.items():
            if not tiles(parts, stop - start):
                refuse("B-PLAN-SET", f"the plan of {entry.coordinate} misses keys of {start} to {stop}.")

    def _check_owners(self) -> None:
        owned: dict[int, dict[int, set[tuple[Range, ...]]]] = defaultdict(lambda: defaultdict(set))
        for entry in self.entries:
            at = entry.coordinate
            owned[at.batch_index][at.owner_cp_rank].add(entry.expected_kv_ranges)
        for batch_index, owners in owned.items():
            for owner, said in owners.items():
                if len(said) > 1:
                    refuse(
                        "B-PLAN-SET", f"ranks disagree on the keys of owner {owner}, request {batch_index}."
                    )
            ranges = [r for said in owners.values() for own in said for r in own]
            if not tiles(ranges, self.total_kv_tokens[batch_index]):
                refuse("B-PLAN-SET", f"the owners of request {batch_index} do not hold each key once.")

    def _check_ranks(self) -> None:
        first: dict[tuple[int, int], PlanEntry] = {}
        for entry in sorted(self.entries, key=lambda entry: entry.coordinate):
            at = entry.coordinate
            reference = first.setdefault((at.batch_index, at.owner_cp_rank), entry)
            unequal = differing(reference.execution, entry.execution)
            if unequal:
                refuse("B-PLAN-SET", f"{at} ran another {', '.join(unequal)} than {reference.coordinate}.")


def check_plan_sets(
    rollout: SplitKVRuntimePlanSet | None, training: SplitKVRuntimePlanSet | None, *, owners_match: bool
) -> Iterator[Issue]:
    """Yield the issues of the plan sets of two sides.

    Args:
        rollout: what the rollout side ran; None where it does not say.
        training: what the training side ran.
        owners_match: whether both sides must be cut alike. If not, the plans of the whole sequence are
            compared, over owners, which needs splits that do not depend on the owner.
    """
    for side, plans in (("rollout", rollout), ("training", training)):
        if plans is None:
            yield Issue(
                "SPLIT_KV_RUNTIME_MISSING",
                f"{side}.split_kv_runtime_plan_set",
                f"the {side} side did not read back the splits that ran; a setting is no evidence.",
            )
            continue
        astray = [e.coordinate for e in plans.entries if e.execution.differs_from_request]
        if astray:
            yield Issue(
                "SPLIT_KV_FALLBACK",
                f"{side}.split_kv_runtime_plan_set",
                f"the {side} side ran other splits than it was asked for, at {len(astray)} places, "
                f"first {astray[0]}.",
            )
    if rollout is not None and training is not None:
        yield from _compare(rollout, training, owners_match)


def _compare(
    rollout: SplitKVRuntimePlanSet, training: SplitKVRuntimePlanSet, owners_match: bool
) -> Iterator[Issue]:
    shapes = ("batch_size", "total_kv_tokens") + (("tp_world_size", "cp_world_size") if owners_match else ())
    for name in shapes:
        theirs, ours = getattr(rollout, name), getattr(training, name)
        if theirs != ours:
            yield Issue("SPLIT_KV_MISMATCH", name, f"the plan sets differ in {name}.", theirs, ours)
            return
    views = [_by_place(side) if owners_match else _whole(side) for side in (rollout, training)]
    for place, theirs in views[0].items():
        ours = views[1][place]
        unequal = differing(theirs, ours)
        if unequal:
            yield Issue(
                "SPLIT_KV_MISMATCH",
                f"split_kv.{unequal[0]}",
                f"the sides ran other {', '.join(unequal)} at {place}.",
                list(map(list, theirs.boundaries)),
                list(map(list, ours.boundaries)),
            )
            return


def _by_place(plans: SplitKVRuntimePlanSet) -> dict[object, SplitExecution]:
    return {entry.coordinate: entry.execution for entry in sorted(plans.entries, key=lambda e: e.coordinate)}


def _whole(plans: SplitKVRuntimePlanSet) -> dict[object, SplitExecution]:
    """The plan of each whole request: the owners' boundaries together (ranks were checked to agree)."""
    whole: dict[object, SplitExecution] = {}
    for entry in sorted(plans.entries, key=lambda e: e.coordinate):
        at = entry.coordinate
        if (at.tp_rank, at.cp_rank) != (0, 0):
            continue
        place, held = f"request {at.batch_index}", whole.get(f"request {at.batch_index}")
        cuts = entry.execution.boundaries if held is None else (*held.boundaries, *entry.execution.boundaries)
        whole[place] = replace(held or entry.execution, boundaries=tuple(sorted(cuts)))
    return whole
