"""Find a relation by its claim: built in, or installed by another package."""

import difflib
import importlib
from collections.abc import Mapping
from functools import cache
from importlib.metadata import entry_points

from tracekit.errors import UsageError
from tracekit.relations.base import Relation
from tracekit.verdict import ClaimId

BUILTIN: Mapping[ClaimId, str] = {
    "recorded": "tracekit.relations.recorded:Recorded",
    "rerun": "tracekit.relations.rerun:Rerun",
    "threads": "tracekit.relations.threads:Threads",
    "requests": "tracekit.relations.requests:Requests",
    "rows": "tracekit.relations.rows:RowOrder",
    "solo": "tracekit.relations.solo:Solo",
    "subbatch": "tracekit.relations.subbatch:Subbatch",
    "chunks": "tracekit.relations.chunks:Chunks",
    "decode": "tracekit.relations.decode:Decode",
    "page-ids": "tracekit.relations.page_ids:PageIds",
    "page-size": "tracekit.relations.page_size:PageSize",
    "layout": "tracekit.relations.layout:PageOrder",
    "padding": "tracekit.relations.padding:Padded",
    "splits": "tracekit.relations.splits:Splits",
    "cp": "tracekit.relations.cp:ContextRanks",
    "tp": "tracekit.relations.tp:TensorRanks",
    "grad": "tracekit.relations.grad:TrainingForward",
    "backward": "tracekit.relations.backward:BackwardOrder",
    "slack": "tracekit.relations.slack:Slack",
    "after": "tracekit.relations.after:After",
    "schedule": "tracekit.relations.schedule:Schedule",
    "host-graph": "tracekit.relations.host_graph:HostGraph",
    "graph": "tracekit.relations.graph:DeviceGraph",
    "control": "tracekit.relations.control:Control",
}
"""Claim id -> `module:class`, in the order of reports."""

GROUP = "tracekit.relations"


@cache
def claims() -> dict[ClaimId, str]:
    """Return every claim that can be replayed here, with its `module:class`, in the order of reports."""
    found = dict(BUILTIN)
    for entry in sorted(entry_points(group=GROUP), key=lambda entry: entry.name):
        found.setdefault(entry.name, entry.value)
    return found


def relation(claim: ClaimId) -> Relation:
    """Return the relation of a claim.

    Raises:
        UsageError: `R-UNKNOWN` for no such claim, `R-IMPORT` for a class that cannot be imported.
    """
    known = claims()
    if claim not in known:
        close = difflib.get_close_matches(claim, known, 1)
        hint = f" Did you mean {close[0]}?" if close else ""
        raise UsageError(
            f"there is no claim {claim!r}; there are {', '.join(known)}.{hint}",
            rule="R-UNKNOWN",
            claim=claim,
            valid=list(known),
        )
    module, _, attribute = known[claim].partition(":")
    try:
        found: Relation = getattr(importlib.import_module(module), attribute)()
    except (ImportError, AttributeError) as error:
        raise UsageError(
            f"claim {claim} cannot be imported from {known[claim]}: {error}. "
            "Install the package that holds it, or correct its entry point.",
            rule="R-IMPORT",
            claim=claim,
        ) from error
    return found
