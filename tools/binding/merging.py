"""How the nodes of all owners become an answer: TKA-1's way, and ways that a binding refuses."""

from dataclasses import replace

import numpy as np

from tools.binding.settings import Settings
from tracekit.model import TKA1_REDUCTION, Array, Bits, Downcast, DType, MergeOrder, ReductionSpec, Tree
from tracekit.parallel.attention import Merge, merged_by_tree
from tracekit.providers import tka1
from tracekit.providers.partials import of_lse, to_lse
from tracekit.providers.tka1 import numpy_form

Parts = dict[tka1.Run, tka1.Partials]


RIGHT = Settings()


def merging(settings: Settings) -> Merge:
    """Return how a side merges."""
    inner = ("accumulate", "downcast", "order", "tree")
    right = all(getattr(settings, name) == getattr(RIGHT, name) for name in inner)
    if right and settings.write is settings.dtype:
        return merged_by_tree
    return lambda parts, dtype: _merged(parts, dtype, settings)


def _merged(parts: Parts, dtype: DType, settings: Settings) -> tuple[tka1.Outputs, ReductionSpec]:
    """Merge another way, and say so beside each step: what is told is what ran."""
    ordered, ran = [parts[run] for run in sorted(parts, key=lambda run: run.key)], TKA1_REDUCTION
    if settings.accumulate is not DType.FLOAT32:
        ordered = [
            tka1.Partials(_through(p.acc, settings.accumulate), _through(p.l, settings.accumulate), p.m)
            for p in ordered
        ]
        ran = replace(ran, accumulate=settings.accumulate)
    if settings.downcast == "per_block":
        ordered = [_rounded(part, dtype) for part in ordered]
        ran = replace(ran, downcast=Downcast.PER_BLOCK)
    if settings.order == "arrival":
        ordered = ordered[1:] + ordered[:1]
        ran = replace(ran, order=MergeOrder.ARRIVAL)
    fold = settings.tree == "left_fold" or settings.order == "arrival"
    answer = numpy_form.merge(list(enumerate(ordered)), None, settings.write, left_fold=fold)
    if fold:
        ran = replace(ran, tree=Tree.LEFT_FOLD)
    if settings.write is not dtype:
        again = Bits.from_float32(Bits(answer.out, settings.write).to_float32(), dtype)
        answer = replace(answer, out=again.data)
    return answer, ran


def _rounded(part: tka1.Partials, dtype: DType) -> tka1.Partials:
    out, lse = to_lse(part)
    return of_lse(Bits.from_float32(out, dtype).to_float32(), lse)


def _through(bits: Array, dtype: DType) -> Array:
    """Round binary32 bits to a narrower dtype and widen them again."""
    narrow = Bits.from_float32(bits.view(np.float32), dtype)
    return narrow.to_float32().view(np.uint32)
