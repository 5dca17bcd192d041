"""Partial states of any kernel, merged by a declared reduction.

TKA-1's partial is (acc, l, M). Other kernels send the normalised O and its LSE; that is the same state, since
numerators are O * e^LSE and the denominator is e^LSE = l * 2^M. So one merge serves both, in operations that
give the same bits on every machine (docs/tka1.md, S5 and S7), and one downcast ends it.
"""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from tracekit.errors import InvalidCall
from tracekit.model import Array, DType, LseBase, PartialState, ReductionSpec, SinkPlace, Tree
from tracekit.providers import tka1
from tracekit.providers.tka1 import arithmetic as ar
from tracekit.providers.tka1 import numpy_form

_LN2 = np.float32(np.log(2.0))


def of_lse(out: ar.F32, lse: ar.F32, base: LseBase = LseBase.NATURAL) -> tka1.Partials:
    """Return an (O, LSE) partial as (acc, l, M).

    Args:
        out: binary32 `[T, H, Dv]`, normalised over the keys of the partial, the sink not counted.
        lse: binary32 `[T, H]` over the same keys; -inf where there are none.
        base: of the LSE; one of base 2 is multiplied by ln 2, once.
    """
    nats = lse * _LN2 if base is LseBase.TWO else lse
    empty = np.isneginf(nats)
    l, m = ar.exp_parts(np.where(np.isfinite(nats), nats, np.float32(0)))  # noqa: E741 - the name in TKA-1
    l = np.where(empty, np.float32(0), np.where(np.isfinite(nats), l, np.float32(np.nan)))  # noqa: E741
    acc = np.where(empty[..., None], np.float32(-0.0), out * l[..., None])
    m = np.where(empty, np.int32(ar.EMPTY), m).astype(np.int32)
    return tka1.Partials(ar.one_nan(acc), ar.one_nan(l), m)


def to_lse(part: tka1.Partials) -> tuple[ar.F32, ar.F32]:
    """Return the (O, LSE) of a partial, binary32: what a kernel that normalises would have sent."""
    whole = numpy_form.merge([(0, part)], None, DType.FLOAT32)
    return whole.out.view(np.float32), whole.lse.view(np.float32)


def merge_blocks(
    parts: Mapping[int, tka1.Partials], spec: ReductionSpec, sink: Array | None, dtype: DType
) -> tka1.Outputs:
    """Merge the partials of blocks, by global block index, in the declared tree.

    Args:
        parts: by block index, in any order; a block that no row sees may be left out.
        spec: the reduction. Partials of an `aligned_binary` tree may be its nodes, by their first block. The
            sink of `first_partial` is in a partial already, and is not applied again.
        sink: binary32 bits `[H]`, or None.
        dtype: of O, rounded once.

    Raises:
        InvalidCall: `P-REDUCTION` for a reduction outside the mandate, `P-BLOCKS` for no blocks.
        Unsupported: `S1-FLUSH`, as the numpy form of TKA-1.
    """
    if reason := spec.unsupported():
        raise InvalidCall(
            f"{reason}; a merge accumulates in float32, by global block index, rounds once, and counts the "
            "sink once.",
            rule="P-REDUCTION",
        )
    if not parts:
        raise InvalidCall("a merge needs the partial of one block at least.", rule="P-BLOCKS")
    once = sink if spec.sink is SinkPlace.AFTER_MERGE else None
    ordered = sorted(parts.items())
    return numpy_form.merge(ordered, once, dtype, left_fold=spec.tree is Tree.LEFT_FOLD)


def merge_lse_blocks(
    parts: Mapping[int, tuple[ar.F32, ar.F32]], spec: ReductionSpec, sink: Array | None, dtype: DType
) -> tka1.Outputs:
    """Merge (O, LSE) partials of blocks; arguments and errors as `merge_blocks` and `of_lse`."""
    if spec.partial is not PartialState.OUT_LSE:
        raise InvalidCall(f"the reduction exchanges {spec.partial}, not out_lse.", rule="P-REDUCTION")
    states = {index: of_lse(out, lse, spec.lse_base) for index, (out, lse) in parts.items()}
    return merge_blocks(states, replace(spec, lse_base=LseBase.NATURAL), sink, dtype)
