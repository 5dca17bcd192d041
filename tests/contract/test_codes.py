"""Every code of a binding is fired by one broken thing, and the sound pair fires none."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.contract.pair import LENGTH, Pair, execution, identity, leaves, plan_set, ranks, sharding
from tracekit.contract import (
    CODES,
    Core,
    Issue,
    Knob,
    Role,
    SplitMode,
    SplitRequest,
    Stage,
    State,
    Tier,
    bind_attention_runtime_readbacks,
    unsupported_reduction_reason,
)
from tracekit.contract.readback import SCOPES
from tracekit.model import (
    TKA1_REDUCTION,
    Downcast,
    DType,
    LseBase,
    MergeOrder,
    PartialState,
    SinkPlace,
    Tree,
)

CORE = Pair().rollout[0].core
STAGES = {name: Stage(f"test.{name}", "policy 1") for name in SCOPES["module"]}


def _identity_missing(pair: Pair) -> None:
    del pair.rollout_identity["tokenizer_fingerprint"]


def _identity_null(pair: Pair) -> None:
    pair.training_identity["checkpoint_id"] = None


def _identity_differs(pair: Pair) -> None:
    pair.rollout_identity = identity(weight_version="b" * 16)


def _identity_type(pair: Pair) -> None:
    """1 is not true, although Python says that they are equal."""
    pair.rollout_identity, pair.training_identity = identity(model_version=1), identity(model_version=True)


def _other_heads(pair: Pair) -> None:
    pair.rollout = ranks(Role.INFER, tp=1)
    pair.rollout_plan_set = plan_set(tp=1)


def _overlap(pair: Pair) -> None:
    owners = {0: ((0, 256),), 1: ((128, 512),)}
    pair.change(1, sharding=sharding(0, 1, owners))


def _rank_twice(pair: Pair) -> None:
    pair.rollout.append(pair.rollout[0])


def _role(pair: Pair) -> None:
    pair.rollout = ranks(Role.TRAIN)


def _rank_missing(pair: Pair) -> None:
    del pair.rollout[2]


def _module(pair: Pair, **changes: Stage | None) -> None:
    """Both sides bind the whole module; one rank of one side ran other stages."""
    for side in (pair.rollout, pair.training):
        side[:] = [replace(rank, scope="module", stages=STAGES) for rank in side]
    stages = {name: stage for name, stage in {**STAGES, **changes}.items() if stage is not None}
    pair.change(stages=stages)


def _change(**changes: Any) -> Callable[[Pair], None]:
    return lambda pair: pair.change(**changes)


def _core(**changes: Any) -> Callable[[Pair], None]:
    return lambda pair: pair.change(core=replace(CORE, **changes))


def _reduction(**changes: Any) -> Callable[[Pair], None]:
    return lambda pair: pair.change(reduction=replace(TKA1_REDUCTION, **changes))


def _knob(state: State) -> Callable[[Pair], None]:
    knob = Knob("2", None, state, "for the test")
    return lambda pair: pair.change(knobs={"rollout.context_parallel_size": knob})


def _plans(**changes: Any) -> Callable[[Pair], None]:
    def broken(pair: Pair) -> None:
        pair.rollout_plan_set = plan_set(**changes)

    return broken


BROKEN: list[tuple[str, Callable[[Pair], None]]] = [
    ("IDENTITY_MISSING", _identity_missing),
    ("IDENTITY_MISSING", _identity_null),
    ("IDENTITY_MISMATCH", _identity_differs),
    ("IDENTITY_MISMATCH", _identity_type),
    ("TOPOLOGY_MISMATCH", _other_heads),
    ("TOPOLOGY_INCOMPLETE", _overlap),
    ("TOPOLOGY_INCOMPLETE", _rank_twice),
    ("ROLE_COLLISION", _role),
    ("RUNTIME_INCOMPLETE", _rank_missing),
    ("RUNTIME_INCOMPLETE", lambda pair: pair.rollout.clear()),
    ("RUNTIME_UNOBSERVABLE", _knob(State.UNOBSERVABLE)),
    ("RUNTIME_UNOBSERVABLE", _change(state=State.UNOBSERVABLE, reason="set, not read back")),
    ("RUNTIME_UNOBSERVABLE", _change(reduction=None)),
    ("RUNTIME_UNSUPPORTED", _knob(State.UNSUPPORTED)),
    ("RUNTIME_FALLBACK", _knob(State.FALLBACK)),
    ("RUNTIME_FALLBACK", _core(fallback=True)),
    ("RUNTIME_ERROR", _change(state=State.ERROR, reason="the kernel raised")),
    ("CP_FALLBACK", _change(effective_cp_world_size=1)),
    ("REDUCTION_SEMANTIC_MISMATCH", _reduction(tree=Tree.LEFT_FOLD)),
    ("REDUCTION_SEMANTIC_MISMATCH", _reduction(leaf=64)),
    ("REDUCTION_SEMANTIC_MISMATCH", _reduction(partial=PartialState.OUT_LSE)),
    ("REDUCTION_SEMANTIC_MISMATCH", _reduction(lse_base=LseBase.TWO)),
    ("REDUCTION_SEMANTIC_MISMATCH", _change(dtype="float16")),
    ("REDUCTION_MANDATE_VIOLATION", _reduction(order=MergeOrder.ARRIVAL)),
    ("REDUCTION_MANDATE_VIOLATION", _reduction(accumulate=DType.BFLOAT16)),
    ("REDUCTION_MANDATE_VIOLATION", _reduction(downcast=Downcast.PER_BLOCK)),
    ("REDUCTION_MANDATE_VIOLATION", _reduction(sink=SinkPlace.EVERY_PARTIAL)),
    ("LSE_NOT_EXPORTED", _change(export_lse=False)),
    ("LSE_NOT_EXPORTED", _change(lse_base="2")),
    ("DETERMINISM_INCOMPATIBLE", _change(scope_verified=False)),
    ("SPLIT_KV_REQUEST", _change(split_kv=SplitRequest(SplitMode.AUTO, strict=False))),
    ("SPLIT_KV_RUNTIME_MISSING", lambda pair: vars(pair).update(rollout_plan_set=None)),
    ("SPLIT_KV_MISMATCH", _plans(acc_dtype=DType.BFLOAT16)),
    ("SPLIT_KV_MISMATCH", _plans(owners={0: ((0, 128), (384, 512)), 1: ((128, 384),)})),
    ("SPLIT_KV_MISMATCH", _plans(tp=1)),
    ("SPLIT_KV_FALLBACK", _plans(fallback=True, fallback_reason="no workspace")),
    ("ATTENTION_PREPROCESS_MISSING", lambda pair: _module(pair, rope=None)),
    ("ATTENTION_PREPROCESS_MISMATCH", lambda pair: _module(pair, rope=Stage("another.rope"))),
    (
        "ATTENTION_PREPROCESS_FALLBACK",
        lambda pair: _module(pair, qk_norm=Stage("test.qk_norm", "policy 1", True, "no native kernel")),
    ),
    ("ATTENTION_PROJECTION_MISSING", lambda pair: _module(pair, o_proj=None)),
    ("ATTENTION_PROJECTION_MISMATCH", lambda pair: _module(pair, qkv_proj=Stage("another.gemm"))),
    ("ATTENTION_CORE_MISSING", _core(core_id="")),
    ("ATTENTION_CORE_MISMATCH", _core(core_id="flash 3")),
    ("ATTENTION_CORE_SCHEDULE", _core(schedule="leaf 256")),
    ("ATTENTION_BACKEND_MISSING", _core(actual_backend="")),
    ("ATTENTION_BACKEND_MISSING", _core(communication_backend="")),
    ("ATTENTION_NOT_PRODUCTION_READY", _core(reference_only=True)),
]

ELSEWHERE = {"EVIDENCE_MISMATCH", "BITS_NOT_COMPARED", "BITS_DIFFER"}
"""Codes about traces; `test_runs.py` fires them."""


def test_the_sound_pair_passes() -> None:
    found = Pair().bind()

    assert found.codes() == []
    assert (found.comparable, found.passed, found.status) == (True, True, "passed")


@pytest.mark.parametrize(
    ("code", "broken"), BROKEN, ids=[f"{code}-{n}" for n, (code, _) in enumerate(BROKEN)]
)
def test_one_broken_thing_fires_its_code(code: str, broken: Callable[[Pair], None]) -> None:
    pair = Pair()
    broken(pair)

    found = pair.bind()

    assert code in found.codes()
    assert not found.passed
    assert found.comparable == (Tier.IDENTICAL not in {issue.tier for issue in found.issues})


def test_every_code_has_its_test() -> None:
    assert {code for code, _ in BROKEN} | ELSEWHERE == set(CODES)


def test_a_topology_that_differs_is_not_comparable_and_a_reduction_that_differs_is() -> None:
    other, tree = Pair(), Pair()
    _other_heads(other)
    _reduction(tree=Tree.LEFT_FOLD)(tree)

    assert (other.bind().comparable, other.bind().status) == (False, "not comparable")
    assert (tree.bind().comparable, tree.bind().status) == (True, "refused")


def test_a_rank_that_is_missing_leaves_no_verdict() -> None:
    pair = Pair()
    _rank_missing(pair)

    assert pair.bind().status == "inconclusive"


def test_rope_scaling_alone_may_be_null() -> None:
    pair = Pair()
    del pair.rollout_identity["rope_scaling"]

    assert pair.bind().codes() == ["IDENTITY_MISSING"]


def test_plans_of_other_owners_than_the_ranks_are_refused() -> None:
    pair = Pair()
    owners = {0: ((0, 128),), 1: ((128, LENGTH),)}
    pair.rollout_plan_set = pair.training_plan_set = plan_set(owners)

    assert set(pair.bind().codes()) == {"SPLIT_KV_MISMATCH"}


def test_an_unknown_code_is_no_issue() -> None:
    with pytest.raises(ValueError, match="no code"):
        Issue("NO_SUCH_CODE", "field", "message")


def test_recorded_facts_are_free_to_differ_and_are_told() -> None:
    pair = Pair()
    pair.rollout = [replace(rank, recorded={"page_size": "16"}) for rank in pair.rollout]

    found = pair.bind()

    assert found.passed
    assert found.recorded_differences["recorded.page_size"] == {"rollout": "16", "training": None}
    assert found.recorded_differences["modes"]["training"] == "training"


def test_what_ran_is_in_the_fingerprint() -> None:
    plain, changed = Pair(), Pair()
    changed.change(core=Core(**{**vars(CORE), "communication_backend": "nccl"}))

    prints = [pair.bind().fingerprints for pair in (plain, Pair(), changed)]

    assert prints[0] == prints[1]
    assert prints[0]["binding"] != prints[2]["binding"]
    assert prints[0]["identity"] == prints[2]["identity"]


def test_without_any_readback_there_is_a_verdict_all_the_same() -> None:
    found = bind_attention_runtime_readbacks(
        rollout=[], training=[], rollout_identity={}, training_identity={}
    )

    assert (found.comparable, found.passed) == (False, False)
    assert "RUNTIME_INCOMPLETE" in found.codes()


def test_leaves_of_the_builder_are_the_plan() -> None:
    assert execution(((0, 256),)).boundaries == leaves(((0, 256),)) == ((0, 128), (128, 256))


def test_the_table_of_the_documentation_is_that_of_the_code() -> None:
    text = (Path(__file__).parents[2] / "docs" / "binding.md").read_text()

    for code, (tier, rule) in CODES.items():
        assert f"| `{code}` | {tier} | {rule} |" in text


@pytest.mark.parametrize(
    ("knob", "value"),
    [("order", "arrival"), ("acc_dtype", "bf16"), ("downcast_at", "per_block"), ("engine", "te_oracle")],
)
def test_a_request_that_cannot_be_served_is_named_and_not_coerced(knob: str, value: str) -> None:
    reason = unsupported_reduction_reason({f"attention.reduction_{knob}": value})

    assert reason is not None
    assert f"attention.reduction_{knob}" in reason


def test_a_request_that_is_served_or_about_something_else_has_no_reason() -> None:
    assert (
        unsupported_reduction_reason({"attention.reduction_order": "global_block_index", "tp": "2"}) is None
    )
