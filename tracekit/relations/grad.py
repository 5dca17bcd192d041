"""`grad`: a forward that a backward may follow gives the bits of one without."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from tracekit.controls.grad import OtherKeysInTraining
from tracekit.model import AttentionCall
from tracekit.providers.base import Capabilities, Execution, Launch, Provider
from tracekit.relations.base import Expectation, Variant


@dataclass(frozen=True)
class TrainingForward:
    """Whether gradients are wanted is no part of the answer.

    Args:
        grad: whether the kernel can run as in training.
    """

    grad: bool = False
    id: ClassVar[str] = "grad"
    promise: ClassVar[str] = "a forward gives the same bits with and without gradients"
    expects: ClassVar[Expectation] = Expectation.BASELINE

    def on(self, capabilities: Capabilities) -> "TrainingForward":
        """Ask a kernel that trains."""
        return TrainingForward(capabilities.grad)

    def applies(self, call: AttentionCall) -> str | None:
        """Needs a kernel that trains."""
        return None if self.grad else "the kernel has no training forward"

    def variants(self, call: AttentionCall, seed: int) -> Iterator[Variant]:
        """Yield the call as a training step runs it, alone and twice."""
        training = Execution(grad=True)
        yield Variant("with gradients", Launch((call,), training))
        yield Variant("after a forward with gradients", Launch((call,), before=(Launch((call,), training),)))

    def broken(self) -> Provider:
        """Return a kernel that selects other keys where gradients are wanted."""
        return OtherKeysInTraining()
