"""What the evidence of a binding says, and what it does not (B19, A21): printed with every verdict."""

from collections.abc import Mapping, Sequence
from typing import Any

from tracekit.contract.readback import AttentionRuntimeReadback
from tracekit.contract.topology import TopologyPolicy

INPUTS = "core_inputs"
"""What a readback records under this name its engine did not compute itself."""


def claim_boundary(
    rollout: Sequence[AttentionRuntimeReadback],
    training: Sequence[AttentionRuntimeReadback],
    topology: TopologyPolicy,
    bits: Mapping[str, Any] | None,
) -> tuple[str, ...]:
    """Return sentences, each true of this evidence."""
    said = [_ran("rollout", rollout), _ran("training", training)]
    scopes = sorted({readback.scope for readback in (*rollout, *training)})
    if scopes == ["core"]:
        said.append(
            "Bound is the attention core on the queries, keys and values that it was given; norms, RoPE and "
            "projections are not."
        )
    for side, readbacks in (("rollout", rollout), ("training", training)):
        for given in sorted({readback.recorded.get(INPUTS, "") for readback in readbacks} - {""}):
            said.append(f"In the {side} side {given} were put in the place of its own.")
    if topology is TopologyPolicy.MAY_DIFFER:
        said.append("The sides may be cut unlike: each covers its heads and tokens once.")
    elements = (bits or {}).get("elements", 0)
    if elements:
        said.append(f"{elements:,} values that both sides computed were compared in bits.")
    else:
        said.append("No value of the two sides was compared: this speaks of contracts only.")
    said += [f"Not compared: {note}." for note in (bits or {}).get("notes", ())]
    said.append(
        "Nothing is said of other shapes, builds, devices or numbers of ranks, nor of several machines."
    )
    return tuple(said)


def _ran(side: str, readbacks: Sequence[AttentionRuntimeReadback]) -> str:
    if not readbacks:
        return f"Nothing is known of the {side} side."
    engines = ", ".join(sorted({readback.engine for readback in readbacks}))
    tp_size, cp_size = readbacks[0].sharding.world
    modes = ", ".join(sorted({mode for readback in readbacks for mode in readback.modes}))
    return (
        f"The {side} side: {engines}, {len(readbacks)} of {tp_size * cp_size} ranks "
        f"(tp {tp_size}, cp {cp_size}), {modes}."
    )
