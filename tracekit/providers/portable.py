"""`tka1`: the project's own kernel (docs/tka1.md) as a provider.

Its bits depend on the definition alone, so its identity names no library, processor or instruction set.
"""

from collections.abc import Sequence
from functools import cache
from typing import Literal

from tracekit.errors import Unsupported
from tracekit.model import (
    AttentionCall,
    Bits,
    DType,
    ExecutedIdentity,
    Gradients,
    KVFamily,
    KVRows,
    Ranges,
    RequestKey,
    Selection,
)
from tracekit.providers import tka1
from tracekit.providers.base import Answer, Capabilities, Execution, Launch, Tensors, refusal
from tracekit.providers.graphs.kind import GraphKind
from tracekit.providers.graphs.pool import HostPool
from tracekit.providers.placed import PAGE_SIZES, run_placed
from tracekit.providers.placement import Fill, Layout, Padding
from tracekit.providers.ranks import attention_of_ranks
from tracekit.providers.split import Split
from tracekit.providers.tka1.static import StaticLaunch
from tracekit.verdict import ClaimId

Form = Literal["auto", "native", "numpy"]

# TKA-1 numbers its families: compressed rows are 0, recent rows 1 (S3); a call with one family uses 0.
_ORDER = (KVFamily.C4, KVFamily.C128, KVFamily.INDEX, KVFamily.RECENT, KVFamily.DENSE)


@cache
def _capabilities(numpy: bool) -> Capabilities:
    """Asked before each launch, and a value that never changes."""
    return Capabilities(
        dtypes=frozenset({DType.BFLOAT16, DType.FLOAT16, DType.FLOAT32}),
        two_families=True,
        lists=True,
        sink=True,
        launch_plan=False,
        page_sizes=PAGE_SIZES,
        layouts=tuple(Layout),
        reads_pages=False,
        padding=frozenset(Padding),
        fills=True,
        splits=True,
        grad=True,
        graphs=frozenset() if numpy else frozenset({GraphKind.HOST}),
        schedules=() if numpy else tuple(tka1.SCHEDULES),
    )


class Tka1:
    """TKA-1 in the fastest form that runs here."""

    id = "tka1"
    form: Form = "auto"

    def capabilities(self) -> Capabilities:
        """Attention of every family, list and sink, P in binary32; pages through the canonicaliser."""
        return _capabilities(self._numpy)

    def advertised(self) -> frozenset[ClaimId]:
        """Every claim: the definition leaves nothing to batches, orders, threads or processes.

        Where no build serves, `after` is left out: numpy computes in the mode that it finds (S1). So is
        `host-graph`, as it calls no kernel that could be captured, and `schedule`, as it has one only.
        """
        return frozenset(() if self._numpy else ("after", "host-graph", "schedule")) | frozenset(
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
                "splits",
                "cp",
                "tp",
                "grad",
                "backward",
            }
        )

    @property
    def _numpy(self) -> bool:
        return tka1.serving(self.form).form == "numpy"

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
        execution = launch.execution
        ran: list[str | None] = []

        def run(call: AttentionCall) -> Tensors:
            if reason := self.refuses(call):
                raise Unsupported(f"{self.id} cannot run this call: {reason}.", rule="P-REFUSED")
            if execution.split is not None:
                return self._ranks(call, execution, execution.split)
            if execution.grad:
                return self._train(call, execution)
            tensors, schedule = self._attend(call, execution)
            ran.append(schedule)
            return tensors

        tensors = tuple(run_placed(run, call, execution.placement) for call in launch.calls)
        account = None if None in ran else "; ".join(dict.fromkeys(filter(None, ran))) or None
        return Answer(tensors, self.identity(), account)

    def _ranks(self, call: AttentionCall, execution: Execution, split: Split) -> Tensors:
        """Answer one call as the ranks of a job."""
        threads = execution.threads or None
        at = call.rows.positions
        got = attention_of_ranks(inputs(call), at, split, form=self.form, threads=threads)
        return Tensors(Bits(got.out, call.dtype), Bits(got.lse, DType.FLOAT32))

    def _train(self, call: AttentionCall, execution: Execution) -> Tensors:
        """Answer one call as a training step does, backward and all where there is a dO."""
        threads = execution.threads or None
        got, rows = tka1.training(inputs(call), form=self.form, threads=threads)
        grads = None
        if call.grads is not None:
            done = tka1.backward(backward_of(call, call.grads.d_out, rows), form=self.form, threads=threads)
            grads = gradients_of(call, call.grads.d_out, done)
        return Tensors(Bits(got.out, call.dtype), Bits(got.lse, DType.FLOAT32), grads)

    def static(self, calls: Sequence[AttentionCall], execution: Execution, pool: HostPool) -> "Captured":
        """Return a launch over static buffers (graphs/base.py).

        Raises:
            Unsupported: a call is refused, or the calls cannot share a launch (`P-GRAPH`).
        """
        for call in calls:
            if reason := self.refuses(call):
                raise Unsupported(f"{self.id} cannot run this call: {reason}.", rule="P-REFUSED")
        return Captured(tka1.static(list(map(inputs, calls)), execution.threads or None, pool), self)

    def _attend(self, call: AttentionCall, execution: Execution) -> tuple[Tensors, str | None]:
        """Answer one call, and say in which schedule where the kernel gives an account."""
        fill = None if execution.placement is None else execution.placement.fill
        threads, account = execution.threads or None, None
        if self._numpy or fill is not None:
            got = tka1.attention(inputs(call), form=self.form, threads=threads, fill=fill)
        else:
            got, account = tka1.scheduled(inputs(call), execution.schedule, threads=threads)
        return Tensors(Bits(got.out, call.dtype), Bits(got.lse, DType.FLOAT32)), account


class Captured:
    """A static launch of TKA-1 in the words of a provider.

    Args:
        launch: the launch.
        provider: who answers.
    """

    def __init__(self, launch: StaticLaunch, provider: Tka1) -> None:
        self.launch, self.provider = launch, provider

    def load(self, call: AttentionCall) -> None:
        """Write the inputs of a call into the buffers."""
        self.launch.load(inputs(call))
        self.launch.keep()

    def enqueue(self) -> None:
        """Call the kernel."""
        self.launch.enqueue()

    def poison(self, fill: Fill) -> None:
        """Fill the outputs."""
        self.launch.poison(fill)

    def read(self) -> Tensors:
        """Return a copy of the answer."""
        out = self.launch.out
        return Tensors(Bits(out.out.copy(), self.launch.dtype), Bits(out.lse.copy(), DType.FLOAT32))

    def changed(self) -> str | None:
        """Return the name of an input that the launch changed, or None."""
        return self.launch.changed()

    def executed(self) -> ExecutedIdentity:
        """As an eager launch."""
        return self.provider.identity()


class Tka1Numpy(Tka1):
    """TKA-1 in numpy: slow, and needs nothing built."""

    id = "tka1-numpy"
    form: Form = "numpy"


def in_order(call: AttentionCall) -> list[KVFamily]:
    """Return the families of a call by the numbers that TKA-1 gives them."""
    return sorted(call.selection.families, key=_ORDER.index)


def inputs(call: AttentionCall) -> tka1.Inputs:
    """Return a call in the words of TKA-1."""
    return tka1.Inputs(
        q=call.q.data,
        request=call.rows.request,
        families=tuple(_family(call, family) for family in in_order(call)),
        sink=None if call.sink is None else call.sink.data,
        scale_bits=call.conventions.scale_bits,
        dtype=call.dtype,
    )


def backward_of(call: AttentionCall, d_out: Bits, rows: tka1.Partials | None = None) -> tka1.Backward:
    """Return the backward of a call in the words of TKA-1; `rows` are those before S10, where kept."""
    return tka1.Backward(inputs(call), call.rows.positions, d_out.data, d_out.dtype, rows)


def gradients_of(call: AttentionCall, d_out: Bits, done: tka1.Gradients) -> Gradients:
    """Return what TKA-1 gave in the words of a call: binary32, the sink summed by ascending request key."""
    d_kv: dict[RequestKey, dict[KVFamily, KVRows]] = {key: {} for key in call.rows.requests}
    for family, grads in zip(in_order(call), done.families, strict=True):
        for key, keys, values in zip(call.rows.requests, grads.keys, grads.values, strict=True):
            held = call.kv[key][family]
            value = None if values is keys else Bits(values, DType.FLOAT32)
            d_kv[key][family] = KVRows(Bits(keys, DType.FLOAT32), value, held.first, held.generation)
    order = sorted(range(len(call.rows.requests)), key=lambda i: call.rows.requests[i])
    sink = None if done.d_sink is None else Bits(tka1.sum_of_sinks(done.d_sink, order), DType.FLOAT32)
    return Gradients(d_out, Bits(done.d_q, DType.FLOAT32), d_kv, sink)


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
