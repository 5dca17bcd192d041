"""What one rank says after execution: only that counts (B13 to B15)."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from tracekit.contract.refuse import refuse
from tracekit.contract.split import SplitRequest
from tracekit.contract.topology import Sharding
from tracekit.model import ExecutedIdentity, ReductionSpec


class State(StrEnum):
    """What became of something that was asked for."""

    UNSUPPORTED = "unsupported"
    """The runtime cannot do it, and did not."""
    APPLIED = "applied"
    """It ran, and was read back afterwards."""
    FALLBACK = "fallback"
    """Something else ran instead."""
    UNOBSERVABLE = "unobservable"
    """It was set, and nothing says whether it ran."""
    ERROR = "error"
    """The rank failed."""


class Role(StrEnum):
    """Which side a rank belongs to."""

    TRAIN = "train"
    INFER = "infer"


@dataclass(frozen=True)
class Knob:
    """One setting, as asked for and as it ran.

    Args:
        requested: what was asked for.
        effective: what ran; None where nobody knows.
        state: what became of it.
        reason: why it is anything but applied.

    Raises:
        BindingInvalid: `B-KNOB` for an applied knob whose effective value is another one, and for any other
            state without its reason.
    """

    requested: str
    effective: str | None
    state: State
    reason: str = ""

    def __post_init__(self) -> None:
        if self.state is State.APPLIED and self.effective != self.requested:
            refuse(
                "B-KNOB", f"{self.effective} ran where {self.requested} was asked for: that is no applied."
            )
        if self.state is not State.APPLIED and not self.reason:
            refuse("B-KNOB", f"a knob that is {self.state} says why.")


@dataclass(frozen=True)
class Stage:
    """An operation around the attention core that ran in the scope of a readback.

    Args:
        backend_id: the implementation that ran.
        policy_id: the rule that it follows, such as an order of reduction.
        fallback: whether it ran instead of what was asked for.
        fallback_reason: why.

    Raises:
        BindingInvalid: `B-STAGE` for a fallback without its reason, or a reason without a fallback.
    """

    backend_id: str
    policy_id: str = ""
    fallback: bool = False
    fallback_reason: str | None = None

    def __post_init__(self) -> None:
        if self.fallback != (self.fallback_reason is not None):
            refuse("B-STAGE", "a fallback has its reason, and nothing else has one.")


@dataclass(frozen=True)
class Core:
    """The attention core that ran.

    Args:
        core_id: its executed identity as `core_id` writes it, `tka1 tka1=1`; empty where nobody knows.
        schedule: the schedule of its reduction; empty where nobody knows.
        actual_backend: the backend that called it.
        communication_backend: what carried partial states between ranks; empty without context parallelism.
        production_ready: whether this is the path that serves or trains.
        fallback: whether it ran instead of what was asked for.
        reference_only: whether it exists for comparison only.
    """

    core_id: str
    schedule: str
    actual_backend: str
    communication_backend: str = ""
    production_ready: bool = True
    fallback: bool = False
    reference_only: bool = False


def core_id(ran: ExecutedIdentity) -> str:
    """Return a kernel that ran, and the version of every library that can change a bit of it."""
    return " ".join([ran.kernel, *(f"{name}={version}" for name, version in sorted(ran.libraries.items()))])


SCOPES = {
    "core": frozenset[str](),
    "module": frozenset({"qk_norm", "rope", "qkv_proj", "o_proj"}),
}
"""What a binding is about, and the stages that each side states for it: the attention core on recorded
queries, keys and values, or the whole attention module."""


@dataclass(frozen=True)
class AttentionRuntimeReadback:
    """What one rank executed, told by that rank after it did.

    Args:
        role: which side.
        engine: engine and version.
        modes: how its rows were computed, in order: `prefill`, `chunked_prefill`, `decode`, `training`,
            `recompute`.
        dtype: dtype of queries, keys and the answer, such as `bfloat16`.
        sharding: what the rank owned.
        reduction: how its partial states merged; None where nobody observed it.
        reduction_engine: who merged them; free to differ.
        split_kv: the split that was asked for.
        effective_cp_world_size: context-parallel size of the smallest group that ran: an engine that shards
            prefill only runs its decode with 1.
        export_lse: whether the LSE of attention was exported, executed by the kernel.
        lse_base: `e` or `2`.
        core: the kernel.
        scope: one of `SCOPES`.
        scope_verified: whether the rank checked that nothing outside of its scope touched the attention.
        stages: stage -> what ran, for the scope.
        knobs: setting -> what became of it.
        state: what became of the whole rank.
        reason: why it is anything but applied.
        recorded: anything else worth keeping; free to differ.

    Raises:
        BindingInvalid: `B-READBACK` for a state without its reason, an unknown scope or no mode.
    """

    role: Role
    engine: str
    modes: tuple[str, ...]
    dtype: str
    sharding: Sharding
    reduction: ReductionSpec | None
    reduction_engine: str
    split_kv: SplitRequest
    effective_cp_world_size: int
    export_lse: bool
    lse_base: str
    core: Core
    scope: str = "core"
    scope_verified: bool = False
    stages: Mapping[str, Stage] = field(default_factory=dict)
    knobs: Mapping[str, Knob] = field(default_factory=dict)
    state: State = State.APPLIED
    reason: str = ""
    recorded: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.state is not State.APPLIED and not self.reason:
            refuse("B-READBACK", f"a rank that is {self.state} says why.")
        if self.scope not in SCOPES:
            refuse("B-READBACK", f"{self.scope} is no scope; there are {', '.join(SCOPES)}.")
        if not self.modes:
            refuse("B-READBACK", "a rank that executed computed rows in some mode.")
