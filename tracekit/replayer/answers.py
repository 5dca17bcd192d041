"""An answer beside what it is held against: the outputs in a trace, the bits of a baseline, what ran."""

from collections.abc import Mapping

from tracekit.compare import Comparison, compare_bits
from tracekit.model import Array, AttentionCall, Bits, LseBase, Origin
from tracekit.relations.base import Relation
from tracekit.replayer.messages import Answered
from tracekit.replayer.tally import Tally


def recorded(call: AttentionCall) -> dict[str, Bits | None]:
    """Return the executed outputs of a call; the LSE only where it means what a provider gives."""
    assert call.out is not None
    means = call.conventions
    same = means.lse_base is LseBase.NATURAL and not (means.sink_in_lse and call.sink is not None)
    lse = call.lse if call.lse is not None and call.lse.origin is Origin.EXECUTED and same else None
    return {"out": call.out.bits, "lse": None if lse is None else lse.bits}


def compare_answer(
    call: AttentionCall, expected: Mapping[str, Bits | None], answered: Answered
) -> tuple[Comparison, Array]:
    """Compare answers with what was expected, row by row; also return the rows that were answered."""
    places, rows = answered.aligned(call.rows)
    pairs = {
        name: (wanted.take(rows), given.take(places))
        for name, given in (("out", answered.out), ("lse", answered.lse))
        if given is not None and (wanted := expected.get(name)) is not None
    }
    return compare_bits(pairs, call.rows, call.layer, rows), rows


def is_another(tally: Tally[Relation], call: AttentionCall, answered: Answered) -> bool:
    """Whether something else answered than what the trace recorded; says so in the tally.

    Another kernel has nothing to do with the claim; the same kernel in another build could not be tested.
    """
    there, here = call.provenance.executed, answered.executed
    if there.kernel != here.kernel:
        tally.not_applicable[f"the recorded answers are those of {there.kernel}, not of {here.kernel}"] += 1
        return True
    changes = there.differences(here)
    if changes:
        tally.not_run[f"another build answered: {', '.join(changes)}"] += 1
    return bool(changes)
