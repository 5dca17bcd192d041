"""Which place in a job each trace has: the groups of processes that work on the same requests."""

from dataclasses import dataclass

from tracekit.errors import InvalidCall, UsageError
from tracekit.model import RequestKey, Share
from tracekit.store import Trace


@dataclass(frozen=True, eq=False)
class Part:
    """One trace and its place in the job."""

    trace: Trace
    share: Share

    @property
    def name(self) -> str:
        """How messages call it."""
        return f"{self.trace.path.name} (rank {self.share.rank})"


@dataclass(frozen=True, eq=False)
class Group:
    """The processes that work on the same requests.

    Args:
        data: their data-parallel number.
        cells: by tensor-parallel number the traces that hold its heads, each with other layers.
        lost: tensor-parallel numbers of which there is no trace.
    """

    data: int
    cells: dict[int, list[Part]]
    lost: tuple[int, ...]

    @property
    def parts(self) -> list[Part]:
        """All of them, in order."""
        return [part for _, cell in sorted(self.cells.items()) for part in cell]


def refuse_twice(traces: list[Trace]) -> None:
    """Refuse a trace that is given twice, by one name or as a copy: a process leaves one trace.

    Replicas, which also say the same, are other ranks.

    Raises:
        UsageError: `U-MERGE`.
    """
    seen: dict[tuple[str, Share | None], Trace] = {}
    for trace in traces:
        known = seen.setdefault((trace.content_digest, trace.recording.share), trace)
        if known is not trace:
            again = "is given twice" if known.path == trace.path else f"and {known.path} are one trace"
            raise UsageError(
                f"{trace.path} {again}; give the trace of each process once. Nothing is merged.",
                rule="U-MERGE",
            )


def placed(traces: list[Trace], apart: bool) -> list[Part]:
    """Give each trace its place; traces that name none are data-parallel, as far as that can be."""
    shares = [trace.recording.share for trace in traces]
    if any(shares) and not all(shares):
        silent = next(trace for trace, share in zip(traces, shares, strict=True) if share is None)
        raise refuse(
            "R-MERGE-SHARE",
            f"{silent.path.name} does not say which rank it is, and others do; merge it by itself",
        )
    if all(shares):
        return [Part(trace, share) for trace, share in zip(traces, shares, strict=True) if share is not None]
    ordered = sorted(traces, key=lambda trace: trace.content_digest)
    seen: dict[RequestKey, Trace] = {}
    for trace in [] if apart else ordered:
        for key in {key for head in trace.heads for key in head.requests}:
            if key in seen:
                raise refuse(
                    "R-MERGE-SHARE",
                    f"{seen[key].path.name} and {trace.path.name} both hold request {key}, and do not say "
                    "whether they are replicas, heads of one call, or two requests with one prompt; record "
                    "with share=",
                )
            seen[key] = trace
    count = len(ordered)
    return [Part(trace, Share(n, count, n, count)) for n, trace in enumerate(ordered)]


def grouped(parts: list[Part]) -> list[Group]:
    """Sort the parts by their place, and prove replicas equal."""
    first = parts[0]
    for part in parts:
        sizes = [
            (one.share.world, one.share.data_size, one.share.tensor_size, one.share.kv_heads)
            for one in (first, part)
        ]
        if sizes[0] != sizes[1]:
            raise refuse(
                "R-MERGE-SHARE",
                f"{first.name} and {part.name} are of different jobs: world, data, tensor sizes and KV heads "
                f"are {sizes[0]} and {sizes[1]}",
            )
    groups: dict[int, dict[int, list[Part]]] = {}
    for part in sorted(parts, key=lambda p: (p.share.rank, p.trace.content_digest)):
        cell = groups.setdefault(part.share.data, {}).setdefault(part.share.tensor, [])
        if not any(_replica(known, part) for known in cell):
            cell.append(part)
    wanted = range(first.share.tensor_size)
    return [
        Group(data, cells, tuple(number for number in wanted if number not in cells))
        for data, cells in sorted(groups.items())
    ]


def _replica(known: Part, part: Part) -> bool:
    """Whether two traces of one place say the same bits; they may instead be of other layers."""
    if known.trace.content_digest == part.trace.content_digest:
        return True
    layers = [{head.layer for head in one.trace.heads} for one in (known, part)]
    if layers[0].isdisjoint(layers[1]):
        return False
    raise refuse(
        "R-MERGE-REPLICA",
        f"{known.name} and {part.name} have one place in the job and differ in bits in layers "
        f"{sorted(layers[0] & layers[1])}; see `tracekit diff`",
    )


def refuse(rule: str, text: str) -> InvalidCall:
    """Return the error of traces that contradict each other."""
    return InvalidCall(f"{text}; nothing is merged.", rule=rule)
