"""The two policies of topology, and plans of owners with several blocks."""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.contract.pair import CONTIGUOUS, LEAF, LENGTH, ZIGZAG, Pair, execution, plan_set, ranks, sharding
from tracekit.contract import (
    Coordinate,
    PlanEntry,
    Role,
    SplitExecution,
    SplitKVRuntimePlanSet,
    SplitMode,
    SplitRequest,
    TopologyPolicy,
)
from tracekit.contract.topology import Range, tiles
from tracekit.errors import BindingInvalid
from tracekit.model import DType

PAST = ((0, 128), (128, 256), (256, 384))
WHOLE: dict[int, tuple[Range, ...]] = {0: ((0, LENGTH),)}


def test_zigzag_owners_have_several_blocks() -> None:
    pair = Pair(
        rollout=ranks(Role.INFER, ZIGZAG),
        training=ranks(Role.TRAIN, ZIGZAG),
        rollout_plan_set=plan_set(ZIGZAG),
        training_plan_set=plan_set(ZIGZAG),
    )

    assert pair.bind().passed


@pytest.mark.parametrize(("owners", "tp"), [(ZIGZAG, 2), (WHOLE, 2), (WHOLE, 1), (CONTIGUOUS, 4)])
def test_another_cut_passes_only_where_it_may_differ(owners: dict[int, tuple[Range, ...]], tp: int) -> None:
    strict, free = (
        Pair(
            rollout=ranks(Role.INFER, owners, tp=tp),
            rollout_plan_set=plan_set(owners, tp=tp),
            topology=policy,
        ).bind()
        for policy in TopologyPolicy
    )

    assert not strict.comparable
    assert "TOPOLOGY_MISMATCH" in strict.codes()
    assert free.passed, free.issues


def test_where_cuts_may_differ_other_splits_are_still_refused() -> None:
    halves = SplitRequest(SplitMode.FIXED, 256)
    entries = [
        PlanEntry(
            Coordinate(0, 0, 0, 0),
            WHOLE[0],
            SplitExecution(halves, SplitMode.FIXED, 256, ((0, 256), (256, 512))),
        )
    ]
    other = SplitKVRuntimePlanSet(1, 1, 1, (LENGTH,), tuple(entries))
    pair = Pair(
        rollout=ranks(Role.INFER, WHOLE, tp=1), rollout_plan_set=other, topology=TopologyPolicy.MAY_DIFFER
    )

    assert "SPLIT_KV_MISMATCH" in pair.bind().codes()


@pytest.mark.parametrize(
    ("rule", "changes"),
    [
        ("tp rank 2", {"tp_rank": 2}),
        ("cp rank -1", {"cp_rank": -1}),
        ("not cut evenly", {"local_q_heads": 15}),
        ("not from 1", {"local_kv_head_start": 1}),
        ("do not share", {"global_kv_heads": 6, "local_kv_heads": 3}),
        ("ascending", {"blocks": ((256, 512), (0, 128))}),
        ("ascending", {"blocks": ((0, 128), (64, 256))}),
        ("ascending", {"blocks": ((0, LENGTH + 1),)}),
        ("ascending", {"blocks": ((5, 5),)}),
    ],
)
def test_a_sharding_that_is_none(rule: str, changes: dict[str, Any]) -> None:
    with pytest.raises(BindingInvalid, match=rule) as refused:
        replace(sharding(0, 0, CONTIGUOUS), **changes)

    assert refused.value.rule == "B-TOPOLOGY"


def test_an_empty_rank_is_a_rank() -> None:
    owners: dict[int, tuple[Range, ...]] = {0: ((0, LENGTH),), 1: ()}
    pair = Pair(
        rollout=ranks(Role.INFER, owners),
        training=ranks(Role.TRAIN, owners),
        rollout_plan_set=plan_set(owners),
        training_plan_set=plan_set(owners),
    )

    assert pair.bind().passed


@pytest.mark.parametrize(
    ("words", "change"),
    [
        ("is missing", lambda entries: entries[1:]),
        ("comes twice", lambda entries: (*entries, entries[0])),
        ("is no place", lambda entries: (*entries, _moved(entries[0], owner_cp_rank=2))),
        ("misses keys", lambda entries: (_cut(entries[0], ((0, 128),)), *entries[1:])),
        ("not its owner's", lambda entries: (_cut(entries[0], PAST), *entries[1:])),
        ("ran another acc_dtype", lambda entries: (_other(entries[0]), *entries[1:])),
        ("nobody observed", lambda entries: (_unseen(entries[0]), *entries[1:])),
        ("ranks disagree", lambda entries: (_owner(entries[0], ((0, 128),)), *entries[1:])),
    ],
)
def test_a_plan_set_that_is_none(
    words: str, change: Callable[[tuple[PlanEntry, ...]], tuple[PlanEntry, ...]]
) -> None:
    sound = plan_set()

    with pytest.raises(BindingInvalid, match=words) as refused:
        SplitKVRuntimePlanSet(1, 2, 2, (LENGTH,), change(sound.entries))

    assert refused.value.rule == "B-PLAN-SET"


def _moved(entry: PlanEntry, **changes: int) -> PlanEntry:
    return PlanEntry(
        Coordinate(**{**vars(entry.coordinate), **changes}), entry.expected_kv_ranges, entry.execution
    )


def _cut(entry: PlanEntry, boundaries: tuple[Range, ...]) -> PlanEntry:
    ran = execution(entry.expected_kv_ranges, boundaries=boundaries)
    return PlanEntry(entry.coordinate, entry.expected_kv_ranges, ran)


def _other(entry: PlanEntry) -> PlanEntry:
    ran = execution(entry.expected_kv_ranges, acc_dtype=DType.BFLOAT16)
    return PlanEntry(entry.coordinate, entry.expected_kv_ranges, ran)


def _unseen(entry: PlanEntry) -> PlanEntry:
    ran = execution(entry.expected_kv_ranges, actual_mode=None, actual_split_size=None, boundaries=())
    return PlanEntry(entry.coordinate, entry.expected_kv_ranges, ran)


def _owner(entry: PlanEntry, ranges: tuple[Range, ...]) -> PlanEntry:
    return PlanEntry(entry.coordinate, ranges, execution(ranges))


@pytest.mark.parametrize(
    ("words", "make"),
    [
        ("a fixed split has a size", lambda: SplitRequest(SplitMode.FIXED)),
        ("no other split has one", lambda: SplitRequest(SplitMode.DISABLED, 128)),
        ("0 keys is none", lambda: SplitRequest(SplitMode.FIXED, 0)),
        ("never strict", lambda: SplitRequest(SplitMode.AUTO)),
        ("ascending", lambda: execution((), boundaries=((128, 256), (0, 128)))),
        ("no split of 128", lambda: execution((), boundaries=((0, 64), (64, 128)))),
        ("no split of 128", lambda: execution((), boundaries=((0, 256),))),
        ("has its reason", lambda: execution((), fallback=True)),
        ("nobody observed", lambda: execution((), actual_mode=None)),
    ],
)
def test_splits_that_are_none(words: str, make: Callable[[], object]) -> None:
    with pytest.raises(BindingInvalid, match=words):
        make()


def test_the_last_split_of_a_sequence_may_be_short() -> None:
    assert execution((), boundaries=((0, LEAF), (LEAF, 200))).boundaries[-1] == (128, 200)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.randoms())
def test_ranges_tile_what_they_were_cut_from_and_nothing_else(sizes: list[int], random: Random) -> None:
    edges = [sum(sizes[:n]) for n in range(len(sizes) + 1)]
    ranges = list(pairwise(edges))
    random.shuffle(ranges)

    assert tiles(ranges, edges[-1])
    assert not tiles(ranges, edges[-1] + 1)
    assert not tiles(ranges[1:], edges[-1])
    assert not tiles([*ranges, ranges[0]], edges[-1])
