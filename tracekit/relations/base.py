"""The protocol of a relation: one promise about executions of one kernel.

A relation makes variants of a call and says what their answers must equal. It runs nothing and compares
nothing: answers come back to the original rows by their identity `(request, position)`.
"""

import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar, Protocol, runtime_checkable

import numpy as np

from tracekit.model import AttentionCall
from tracekit.providers.base import Capabilities, Launch, Provider
from tracekit.verdict import ClaimId


class Expectation(StrEnum):
    """What the answers of the variants are held against."""

    BASELINE = "bits of the same call, run as it stands"
    TRACE = "bits in the trace"
    ENVELOPE = "error envelope around the float64 oracle"


@dataclass(frozen=True, eq=False)
class Variant:
    """One legal re-arrangement of a call.

    Args:
        name: what was changed, for the report (`reversed`, `row alone`).
        launch: calls whose rows keep their identity; together they hold every row of the original call
            at least once in one of the variants. Rows of other requests are companions: they are run, and
            not compared.
        free: tensors that the variant may legally change, of `d_q`, `d_kv` and `d_sink`; not compared.
    """

    name: str
    launch: Launch
    free: frozenset[str] = frozenset()


class Relation(Protocol):
    """One promise."""

    id: ClassVar[ClaimId]
    promise: ClassVar[str]
    expects: ClassVar[Expectation]

    def applies(self, call: AttentionCall) -> str | None:
        """Return why the claim says nothing about a call, in one clause, or None where it applies."""
        ...

    def variants(self, call: AttentionCall, seed: int) -> Iterator[Variant]:
        """Yield the variants; the same seed gives the same variants."""
        ...

    def broken(self) -> Provider:
        """Return the negative control: right on the baseline call, wrong through this claim's mechanism."""
        ...


@runtime_checkable
class Physical(Protocol):
    """What a relation adds whose variants lie elsewhere in memory: it asks only for what a kernel takes."""

    def on(self, capabilities: Capabilities) -> Relation:
        """Return the relation for a kernel; it applies to nothing where the kernel takes no variant."""
        ...


def on_kernel(relation: Relation, capabilities: Capabilities) -> Relation:
    """Return a relation for a kernel; most ask the same of every kernel."""
    return relation.on(capabilities) if isinstance(relation, Physical) else relation


@runtime_checkable
class Grounded(Protocol):
    """What a relation adds whose variants are held against another launch than the call as it stands."""

    def base(self, call: AttentionCall) -> Launch:
        """Return the launch whose answer is the baseline."""
        ...


def base_of(relation: Relation | None, call: AttentionCall) -> Launch:
    """Return the baseline of a relation; of most it is the call alone."""
    return relation.base(call) if isinstance(relation, Grounded) else Launch((call,))


@runtime_checkable
class Planted(Protocol):
    """What a relation adds that is judged on another call than the recorded one."""

    def subject(self, call: AttentionCall) -> AttentionCall:
        """Return the call in its place; its rows are those of the call, and more."""
        ...


def subject_of(relation: Relation, call: AttentionCall) -> AttentionCall:
    """Return the call on which a relation is judged: most take it as it stands."""
    return relation.subject(call) if isinstance(relation, Planted) else call


@runtime_checkable
class Rescheduled(Protocol):
    """What a relation adds whose variants count only where the kernel ran another way (`Answer.schedule`)."""

    schedules: tuple[str, ...]


def rng(seed: int, claim: ClaimId) -> np.random.Generator:
    """Return the random numbers of one claim; claims do not share a stream."""
    return np.random.default_rng([seed, zlib.crc32(claim.encode())])
