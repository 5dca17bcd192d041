"""What the twins of captured launches share: a static launch with one fault, around one that has none.

The faults are real: plans, buffers and arguments of the launch are what the fault says, and the stand-in
replays them. An eager launch of a twin is right.
"""

from collections.abc import Sequence
from typing import ClassVar

from tracekit.controls.base import Twin
from tracekit.errors import Unsupported
from tracekit.model import AttentionCall, ExecutedIdentity
from tracekit.providers.base import Execution, Tensors
from tracekit.providers.graphs.base import Capturable, Pool
from tracekit.providers.placement import Fill
from tracekit.providers.portable import Captured


class Spoiled:
    """A static launch of TKA-1; a subclass departs from it in one method.

    Args:
        right: the launch.
    """

    def __init__(self, right: Captured) -> None:
        self.right, self.buffers = right, right.launch

    def load(self, call: AttentionCall) -> None:
        """Write the inputs of a call into the buffers."""
        self.right.load(call)

    def enqueue(self) -> None:
        """Call the kernel."""
        self.right.enqueue()

    def poison(self, fill: Fill) -> None:
        """Fill the outputs."""
        self.right.poison(fill)

    def read(self) -> Tensors:
        """Return a copy of the answer."""
        return self.right.read()

    def changed(self) -> str | None:
        """Say nothing: no twin writes into an input."""
        return None

    def executed(self) -> ExecutedIdentity:
        """As the correct launch."""
        return self.right.executed()


class CapturedTwin(Twin):
    """A kernel whose eager launches are right, and whose captured ones are spoiled."""

    spoiled: ClassVar[type[Spoiled]]

    def static(self, calls: Sequence[AttentionCall], execution: Execution, pool: Pool) -> Spoiled:
        """Return a static launch with the fault.

        Raises:
            Unsupported: `P-GRAPH`, or a call is refused.
        """
        right = self.correct.static(calls, execution, pool) if isinstance(self.correct, Capturable) else None
        if not isinstance(right, Captured):
            raise Unsupported("only launches of TKA-1 can be spoiled.", rule="P-GRAPH")
        return self.spoiled(right)
