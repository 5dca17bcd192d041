"""`trace`: what the trace itself recorded, so that the engine's own answer can be held against the oracle.

It runs nothing, so it can only answer the call as it was recorded: the claim `control`.
"""

from tracekit.errors import Unsupported
from tracekit.model import AttentionCall, DType, ExecutedIdentity, Origin
from tracekit.providers.base import Answer, Capabilities, Launch, Tensors
from tracekit.verdict import ClaimId


class RecordedAnswer:
    """The pseudo-provider `trace`."""

    id = "trace"

    def capabilities(self) -> Capabilities:
        """Whatever could be recorded."""
        return Capabilities(
            dtypes=frozenset(DType), two_families=True, lists=True, sink=True, max_head_dim=1 << 16
        )

    def advertised(self) -> frozenset[ClaimId]:
        """An engine's answer lies inside its own error envelope."""
        return frozenset({"control"})

    def identity(self) -> ExecutedIdentity:
        """Nothing runs; each answer carries the identity that was recorded."""
        return ExecutedIdentity("trace")

    def refuses(self, call: AttentionCall) -> str | None:
        """Return why a call holds no evidence."""
        if call.out is None:
            return "the trace holds no output"
        if call.out.origin is Origin.DERIVED:
            return "a derived output is no evidence"
        return None

    def run(self, launch: Launch) -> Answer:
        """Return what was recorded; a derived LSE is left out.

        The LSE is in the conventions that the call declares, not converted: a conversion would hide what
        was recorded.

        Raises:
            Unsupported: a call has no executed output, or calls of several kernels are mixed.
        """
        answers = []
        for call in launch.calls:
            if (reason := self.refuses(call)) or call.out is None:
                raise Unsupported(f"the trace cannot answer this call: {reason}.", rule="P-REFUSED")
            executed = call.lse is not None and call.lse.origin is Origin.EXECUTED
            answers.append(Tensors(call.out.bits, call.lse.bits if call.lse and executed else None))
        kernels = {call.provenance.executed.kernel for call in launch.calls}
        if len(kernels) > 1:
            raise Unsupported(
                f"one launch mixes the kernels {', '.join(sorted(kernels))}; answer them one by one.",
                rule="P-REFUSED",
            )
        return Answer(tuple(answers), launch.calls[0].provenance.executed)
