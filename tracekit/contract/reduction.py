"""How partial states became one answer (B5 to B8): what ran, and what the mandate allows."""

from collections.abc import Iterator, Mapping

from tracekit.contract.codes import Issue
from tracekit.model import ReductionSpec


def check_reduction(
    rollout: Mapping[str, ReductionSpec | None], training: Mapping[str, ReductionSpec | None]
) -> Iterator[Issue]:
    """Yield the issues of the reductions that the ranks of two sides ran, by rank name; None where nobody
    observed one, and then no two are compared.
    """
    unseen = False
    for side, ranks in (("rollout", rollout), ("training", training)):
        for name, spec in ranks.items():
            place = f"{side}.{name}.reduction"
            if spec is None:
                unseen = True
                yield Issue(
                    "RUNTIME_UNOBSERVABLE",
                    place,
                    f"nobody observed in which order and dtype the {side} side summed its keys.",
                )
                continue
            for field, how in spec.violations().items():
                yield Issue(
                    "REDUCTION_MANDATE_VIOLATION",
                    f"{place}.{field}",
                    f"{how}; a binding takes FP32, global block order, one downcast and the sink once only.",
                    **{side: str(getattr(spec, field))},
                )
    if unseen or not rollout or not training:
        return
    told = [[spec.to_dict() for spec in side.values() if spec is not None] for side in (rollout, training)]
    for field in told[0][0]:
        theirs, ours = (sorted({str(spec[field]) for spec in side}) for side in told)
        if theirs != ours or len(theirs) > 1:
            yield Issue(
                "REDUCTION_SEMANTIC_MISMATCH",
                f"reduction.{field}",
                f"{field} is not one on all ranks of both sides.",
                theirs,
                ours,
            )


def schedule(ran: ReductionSpec) -> str:
    """Return how a reduction cut and merged its keys, in words."""
    return f"leaves of {ran.leaf} rows, {ran.tree.replace('_', ' ')}"


SUPPORTED_REQUESTS: Mapping[str, frozenset[str]] = {
    "attention.reduction_merge": frozenset({"online_softmax_lse"}),
    "attention.reduction_order": frozenset({"global_block_index"}),
    "attention.reduction_acc_dtype": frozenset({"fp32"}),
    "attention.reduction_downcast_at": frozenset({"final_write"}),
    "attention.reduction_tree": frozenset({"aligned_binary"}),
}
"""Requests about the reduction that TKA-1 can serve. Others are refused and never coerced to these."""


def unsupported_reduction_reason(requested: Mapping[str, str]) -> str | None:
    """Return why a reduction that is asked for cannot be had, or None.

    Args:
        requested: knob -> value; knobs that are not about the reduction are not looked at.
    """
    for knob, value in requested.items():
        allowed = SUPPORTED_REQUESTS.get(knob)
        if allowed is None and knob.startswith("attention.reduction_"):
            return f"{knob} is no knob of the reduction; there are {', '.join(sorted(SUPPORTED_REQUESTS))}"
        if allowed is not None and value not in allowed:
            return f"{knob}={value} is not supported; the kernel does {', '.join(sorted(allowed))} only"
    return None
