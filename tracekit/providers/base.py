"""The protocol of a provider: a kernel that can be run again."""

from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from tracekit.model import AttentionCall, Bits, DType, ExecutedIdentity, Gradients, KVFamily
from tracekit.providers.graphs.kind import GraphKind
from tracekit.providers.mode import FloatMode
from tracekit.providers.placement import Layout, Padding, Placement
from tracekit.providers.split import Split
from tracekit.verdict import ClaimId


@dataclass(frozen=True)
class Capabilities:
    """What a provider can run; everything else it refuses by name.

    Args:
        dtypes: dtypes of Q, KV and O.
        families: KV families.
        two_families: whether one call may read two of them in one softmax.
        lists: whether a row may read a list of KV rows (else only a range).
        sink: whether it applies a sink.
        lse: whether it returns the LSE (natural logarithm, sink not counted).
        max_head_dim: largest D and Dv.
        score_dtype: dtype that holds the scores, by dtype of Q; FP32 where absent.
        probability_dtype: dtype of P when it meets V, by dtype of Q; FP32 where absent.
        launch_plan: whether the recorded bits can only be had again by the launch plan of the engine; then
            `recorded` is not run without one. False where rows, KV and selection decide every bit.
        page_sizes: rows of a page that it can be asked for, ascending; empty where it takes no pages.
        layouts: layouts of a page that it can be asked for, its own first; empty where it takes no pages.
        reads_pages: whether its kernel reads pages itself. Else the canonicaliser reads them for it, and
            what a claim about pages proves is proven of both together; the verdict says so.
        padding: what it can be asked to add to a launch.
        fills: whether it can be asked what stands in memory that belongs to no row (`Fill`).
        splits: whether it can be asked to work as the ranks of a parallel job (`Split`).
        grad: whether it can run as in training, and give gradients where a call carries dO.
        graphs: where its launches can be captured; it is `Capturable` then (`providers/graphs/base.py`).
        schedules: names of legal ways to cut and order a launch that it can be asked for; its answers say
            then in which one they were computed.
    """

    dtypes: frozenset[DType]
    families: frozenset[KVFamily] = frozenset(KVFamily)
    two_families: bool = False
    lists: bool = False
    sink: bool = False
    lse: bool = True
    max_head_dim: int = 576
    score_dtype: dict[DType, DType] = field(default_factory=dict)
    probability_dtype: dict[DType, DType] = field(default_factory=dict)
    launch_plan: bool = True
    page_sizes: tuple[int, ...] = ()
    layouts: tuple[Layout, ...] = ()
    reads_pages: bool = True
    padding: frozenset[Padding] = frozenset()
    fills: bool = False
    splits: bool = False
    grad: bool = False
    graphs: frozenset[GraphKind] = frozenset()
    schedules: tuple[str, ...] = ()


@dataclass(frozen=True)
class Execution:
    """How to run a launch.

    Args:
        threads: threads of the kernel; 0 is its default.
        placement: where it lies in memory; None leaves that to the provider. Only a provider whose
            capabilities say that it takes a placement is asked for it.
        mode: what an earlier library left the processor in; None is as it stands. `perform` sets it.
        split: the ranks that share the launch; None runs it in one. Asked where the capabilities say so.
        grad: run as in training: what a backward needs is kept, and where a call carries dO (`grads.d_out`)
            the backward runs too. Asked where the capabilities say so.
        graph: capture the launch with the inputs of its first call, and replay it for each of its calls;
            None launches them eagerly. `perform` does it. The calls have equally many rows.
        schedule: one of the schedules of the provider; None is its own choice.
    """

    threads: int = 0
    placement: Placement | None = None
    mode: FloatMode | None = None
    split: Split | None = None
    grad: bool = False
    graph: GraphKind | None = None
    schedule: str | None = None


@dataclass(frozen=True, eq=False)
class Launch:
    """What a provider is asked to run: calls one after the other in one process, and how.

    Each call is one kernel launch over all of its rows and requests.

    Args:
        calls: the calls.
        execution: how to run them.
        before: launches that run first and are not read; `perform` runs them, a provider does not.
    """

    calls: tuple[AttentionCall, ...]
    execution: Execution = Execution()
    before: tuple["Launch", ...] = ()


@dataclass(frozen=True, eq=False)
class Tensors:
    """The answer to one call, rows in the order of the call.

    Args:
        out: O `[T, H, Dv]`.
        lse: FP32 `[T, H]`, natural, sink not counted; None where the kernel gives none.
        grads: the dO of the call and what the backward made of it, or None where it did not run.
    """

    out: Bits
    lse: Bits | None
    grads: Gradients | None = None


@dataclass(frozen=True, eq=False)
class Answer:
    """The answers to the calls of a launch, and what really ran.

    Args:
        tensors: the answers.
        executed: the kernel.
        schedule: how the work was cut and ordered, read back from the kernel; None where it gives no
            account, or did not do what it was asked to.
    """

    tensors: tuple[Tensors, ...]
    executed: ExecutedIdentity
    schedule: str | None = None


@runtime_checkable
class Provider(Protocol):
    """A kernel that can be run again."""

    id: str

    def capabilities(self) -> Capabilities:
        """Return what it can run."""
        ...

    def advertised(self) -> frozenset[ClaimId]:
        """Return the claims that it promises; the others are only probed."""
        ...

    def identity(self) -> ExecutedIdentity:
        """Return what would run here."""
        ...

    def refuses(self, call: AttentionCall) -> str | None:
        """Return why it cannot run a call, in one clause, or None."""
        ...

    def run(self, launch: Launch) -> Answer:
        """Run the calls of a launch.

        Raises:
            Unsupported: a call is refused.
        """
        ...


@runtime_checkable
class RoundsByCall(Protocol):
    """What a provider may add whose kernels round in different places; else its capabilities say where."""

    def roundings(self, call: AttentionCall) -> tuple[DType, DType]:
        """Return the dtype that holds the scores of a call, and that of P when it meets V."""
        ...


def roundings(provider: Provider, call: AttentionCall) -> tuple[DType, DType]:
    """Return the dtype that holds the scores of a call, and that of P when it meets V."""
    if isinstance(provider, RoundsByCall):
        return provider.roundings(call)
    capabilities = provider.capabilities()
    return (
        capabilities.score_dtype.get(call.dtype, DType.FLOAT32),
        capabilities.probability_dtype.get(call.dtype, DType.FLOAT32),
    )


def refusal(capabilities: Capabilities, call: AttentionCall) -> str | None:
    """Return the first capability that a call exceeds, in one clause, or None."""
    from tracekit.model import Lists

    families = call.selection.families
    checks = (
        (call.dtype in capabilities.dtypes, f"dtype {call.dtype}"),
        (set(families) <= capabilities.families, f"KV family {', '.join(families)}"),
        (len(families) == 1 or capabilities.two_families, "two KV families in one softmax"),
        (
            capabilities.lists or not any(isinstance(part, Lists) for part in families.values()),
            "a selection that is a list of rows",
        ),
        (capabilities.sink or call.sink is None, "an attention sink"),
        (max(call.head_dim, call.value_dim) <= capabilities.max_head_dim, f"head size {call.head_dim}"),
    )
    return next((f"it does not take {what}" for fine, what in checks if not fine), None)
