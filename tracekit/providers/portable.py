"""`tka1`: the project's own kernel (docs/tka1.md) as a provider.

Its bits depend on the definition alone, so its identity names no library, processor or instruction set.
"""

from functools import partial
from typing import Literal

from tracekit.errors import Unsupported
from tracekit.model import AttentionCall, Bits, DType, ExecutedIdentity, KVFamily, Ranges, Selection
from tracekit.providers import tka1
from tracekit.providers.base import Answer, Capabilities, Launch, Tensors, refusal
from tracekit.providers.placed import PAGE_SIZES, run_placed
from tracekit.providers.placement import Fill, Layout, Padding
from tracekit.verdict import ClaimId

Form = Literal["auto", "native", "numpy"]

# TKA-1 numbers its families: compressed rows are 0, recent rows 1 (S3); a call with one family uses 0.
_ORDER = (KVFamily.C4, KVFamily.C128, KVFamily.INDEX, KVFamily.RECENT, KVFamily.DENSE)


class Tka1:
    """TKA-1 in the fastest form that runs here."""

    id = "tka1"
    form: Form = "auto"

    def capabilities(self) -> Capabilities:
        """Attention of every family, list and sink, P in binary32; pages through the canonicaliser."""
        return Capabilities(
            dtypes=frozenset({DType.BFLOAT16, DType.FLOAT16, DType.FLOAT32}),
            two_families=True,
            lists=True,
            sink=True,
            launch_plan=False,
            page_sizes=PAGE_SIZES,
            layouts=tuple(Layout),
            padding=frozenset(Padding),
            fills=True,
        )

    def advertised(self) -> frozenset[ClaimId]:
        """Every claim: the definition leaves nothing to batches, orders, threads or processes.

        Where no build serves, `after` is left out: numpy computes in the mode that it finds (S1).
        """
        numpy = tka1.serving(self.form).form == "numpy"
        return frozenset(() if numpy else ("after",)) | frozenset(
            {
                "recorded",
                "rerun",
                "threads",
                "requests",
                "rows",
                "solo",
                "subbatch",
                "chunks",
                "decode",
                "control",
                "page-ids",
                "page-size",
                "padding",
                "layout",
                "slack",
            }
        )

    def identity(self) -> ExecutedIdentity:
        """The version of the definition, and nothing else."""
        return ExecutedIdentity("tka1", {"tka1": "1"})

    def refuses(self, call: AttentionCall) -> str | None:
        """Return why it cannot run a call."""
        return refusal(self.capabilities(), call)

    def run(self, launch: Launch) -> Answer:
        """Run each call as one launch.

        Raises:
            Unsupported: a call is refused.
        """
        threads, placement = launch.execution.threads, launch.execution.placement
        run = partial(self._run, threads=threads, fill=None if placement is None else placement.fill)
        return Answer(tuple(run_placed(run, call, placement) for call in launch.calls), self.identity())

    def _run(self, call: AttentionCall, threads: int, fill: Fill | None) -> Tensors:
        if reason := self.refuses(call):
            raise Unsupported(f"{self.id} cannot run this call: {reason}.", rule="P-REFUSED")
        return self._attend(call, threads, fill)

    def _attend(self, call: AttentionCall, threads: int, fill: Fill | None) -> Tensors:
        answer = tka1.attention(inputs(call), form=self.form, threads=threads or None, fill=fill)
        return Tensors(Bits(answer.out, call.dtype), Bits(answer.lse, DType.FLOAT32))


class Tka1Numpy(Tka1):
    """TKA-1 in numpy: slow, and needs nothing built."""

    id = "tka1-numpy"
    form: Form = "numpy"


def inputs(call: AttentionCall) -> tka1.Inputs:
    """Return a call in the words of TKA-1."""
    return tka1.Inputs(
        q=call.q.data,
        request=call.rows.request,
        families=tuple(_family(call, family) for family in sorted(call.selection.families, key=_ORDER.index)),
        sink=None if call.sink is None else call.sink.data,
        scale_bits=call.conventions.scale_bits,
        dtype=call.dtype,
    )


def _family(call: AttentionCall, family: KVFamily) -> tka1.FamilyInput:
    held = [call.kv[key][family] for key in call.rows.requests]
    return tka1.FamilyInput(
        keys=tuple(rows.keys.data for rows in held),
        values=tuple(rows.value_bits.data for rows in held),
        first=tuple(rows.first for rows in held),
        selection=_selection(call.selection, family),
    )


def _selection(selection: Selection, family: KVFamily) -> tka1.Ranges | tka1.Lists:
    part = selection.families[family]
    if isinstance(part, Ranges):
        return tka1.Ranges(part.lo, part.hi)
    return tka1.Lists(part.ids, part.offsets)
