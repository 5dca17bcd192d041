"""An engine that nobody has tested shows its conventions before it is recorded: some rows, again in binary64.

Every recording is held against its conventions when it ends (`recorder/conventions.py`). Where the version or
the kernel of an engine is not one that was tested, the first launches of each layer are asked as well, before
anything of them is kept: where scale, window, sink or the order of a cache mean something else, nothing that
is read of them can be trusted. The bound is the envelope of docs/verdicts.md.
"""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from tracekit.errors import ConventionContradicted
from tracekit.model import (
    Array,
    AttentionCall,
    Bits,
    Conventions,
    DType,
    IndexerCall,
    KVFamily,
    KVRows,
    Ranges,
    RequestKey,
    Rows,
    Selection,
    scale_to_bits,
)
from tracekit.model.rows import UNKNOWN_TOKEN
from tracekit.recorder.assemble import call_of, indexer_call_of
from tracekit.recorder.conventions import hold
from tracekit.recorder.observation import Borrowed, Handle, IndexerObservation, Observation, SeenKV

_ROWS = 8
"""The last rows of so many requests are asked, and as many rows spread over the second half of the launch.

Rows that read few keys say little of a window, and much of what a kernel makes of single codes near zero
(docs/findings.md, DeepSeek-V4), which is no convention.
"""

_WINDOWED = (KVFamily.DENSE, KVFamily.RECENT)


class FirstLaunches:
    """What the layers of an untested engine have shown so far.

    A layer is asked launch by launch until its rows have gone past its window: before that, no launch tells
    one window from another. A layer whose attention was not believed has no indexer that is.
    """

    def __init__(self) -> None:
        self._believed: set[tuple[int, str]] = set()
        self._shown: set[tuple[int, str]] = set()

    def check(self, seen: Observation) -> None:
        """Hold a launch against what it declares, unless its layer and kernel have shown it already.

        Raises:
            ConventionContradicted: `R-CONVENTION`, naming the readings that would fit where there are some;
                `R-UNSHOWN` where nothing of the launch could be judged.
        """
        which = (seen.layer, seen.provenance.executed.kernel)
        if which in self._shown:
            return
        call = _some_rows(seen)
        _believe(call, seen.provenance.engine)
        self._believed.add(which)
        window = seen.conventions.window
        if window is None or bool((call.rows.positions >= window).any()):
            self._shown.add(which)

    def check_indexer(self, seen: IndexerObservation) -> None:
        """Hold the scores and the choice of an indexer against binary64, unless it was asked before.

        Raises:
            ConventionContradicted: as `check`.
        """
        which = (seen.layer, seen.provenance.executed.kernel)
        if which in self._shown:
            return
        if all(layer != seen.layer for layer, _ in self._believed):
            raise ConventionContradicted(
                f"the attention of layer {seen.layer} has not shown its conventions, so its indexer is not "
                "recorded.",
                rule="R-UNSHOWN",
                layer=seen.layer,
            )
        _believe_indexer(seen)
        self._believed.add(which)
        self._shown.add(which)


def _believe(call: AttentionCall, engine: str) -> None:
    found = hold(call)
    if found.judged == 0:
        raise ConventionContradicted(
            f"nothing of a launch of layer {call.layer} can be held against its conventions, and this "
            f"{engine} is not a version that was tested. Install one that was (docs/engines.md).",
            rule="R-UNSHOWN",
            layer=call.layer,
        )
    place = found.place
    if place is None:
        return
    fitting = [found.fits] if found.fits else []
    fitting += [f"it fits {name}" for name, other in _readings(call) if hold(other).place is None]
    raise ConventionContradicted(
        f"layer {call.layer}, position {place.position}: {place.tensor} is {place.actual!r} where the "
        f"declared conventions give {place.expected!r} "
        f"({' and '.join(fitting) or 'no other reading fits'}); this {engine} "
        "is not what the recorder was made for. Install a tested version (docs/engines.md).",
        rule="R-CONVENTION",
        layer=call.layer,
        fits=fitting,
        place=place.to_dict(),
    )


def _some_rows(seen: Observation) -> AttentionCall:
    """The rows that are asked, as a call. Who the requests are is not known yet; they are numbered."""
    last = [int(np.flatnonzero(seen.request == place)[-1]) for place in np.unique(seen.request)[-_ROWS:]]
    rows = seen.positions.size
    spread = np.linspace(rows // 2, rows - 1, _ROWS).astype(np.int64)
    some = seen.take(np.unique(np.concatenate([np.array(last, np.int64), spread])))
    kv = {
        _key(handle): {family: _kv(rows) for family, rows in some.kv[handle].items()}
        for handle in some.requests
    }
    return call_of(some, _rows(some), kv)


def _rows(seen: Observation | IndexerObservation) -> Rows:
    keys = tuple(_key(handle) for handle in seen.requests)
    return Rows(keys, seen.request, seen.positions, np.full(seen.positions.size, UNKNOWN_TOKEN, np.int64))


def _key(handle: Handle) -> RequestKey:
    return RequestKey.of_prompt([], handle)


def _kv(rows: SeenKV) -> KVRows:
    return KVRows(_by_row(rows.keys), None if rows.values is None else _by_row(rows.values), rows.first)


def _by_row(part: Borrowed) -> Bits:
    return Bits(np.ascontiguousarray(part.data.transpose(1, 0, 2)), part.dtype)


def _readings(call: AttentionCall) -> Iterator[tuple[str, AttentionCall]]:
    """Other readings of a launch; that of its sink is a matter of `compare.diagnose`."""
    declared = call.conventions
    if declared.window is not None:
        for name, window in (
            ("no window", None),
            (f"a window of {declared.window + 1}", declared.window + 1),
            (f"a window of {declared.window - 1}", declared.window - 1),
        ):
            if window != 0 and (other := _windowed(call, window)) is not None:
                yield name, other
    scale = scale_to_bits(declared.scale * float(np.log(2.0)))
    yield "scores in base 2", replace(call, conventions=replace(declared, scale_bits=scale))


def _windowed(call: AttentionCall, window: int | None) -> AttentionCall | None:
    """The call under another window; None where rows that it would read are not held."""
    families = dict(call.selection.families)
    for family in _WINDOWED:
        part = families.get(family)
        if not isinstance(part, Ranges):
            continue
        positions = call.rows.positions
        low = np.zeros_like(positions) if window is None else np.maximum(positions + 1 - window, 0)
        first = np.array([call.kv[row.request][family].first for row in call.rows.ids])
        if (low < first).any():
            return None
        families[family] = Ranges(low, part.hi)
    conventions: Conventions = replace(call.conventions, window=window)
    return replace(call, selection=Selection(families), conventions=conventions)


def _believe_indexer(seen: IndexerObservation) -> None:
    """Scores lie within what binary32 sums allow, and no key was left out that scores above a chosen one."""
    asked = np.unique(np.linspace(0, seen.positions.size - 1, _ROWS).astype(np.int64))
    keys = {_key(handle): _kv(rows) for handle, rows in seen.keys.items()}
    call = indexer_call_of(seen, _rows(seen), keys).take(asked)
    wrong, judged = "", 0
    for t in range(call.num_rows):
        exact, radius = _scores(call, t)
        ids = call.top_k.row(t)
        if call.scores is not None and ids.size:
            found = call.scores.part(slice(*call.top_k.offsets[t : t + 2].tolist())).to_float64()
            judged += ids.size
            if not (np.abs(found - exact[ids]) <= radius[ids]).all():
                wrong = wrong or "scores keys otherwise than it declares"
        left = np.setdiff1d(np.arange(exact.size), ids)
        if ids.size and left.size and (exact - radius)[left].max() > (exact + radius)[ids].min():
            wrong = wrong or "leaves out a key that scores above one that it chose"
    if not wrong and judged:
        return
    raise ConventionContradicted(
        f"the indexer of layer {seen.layer} {wrong or 'shows no scores that could be judged'}; this "
        f"{seen.provenance.engine} is not what the recorder was made for. Install a tested version "
        "(docs/engines.md).",
        rule="R-CONVENTION" if wrong else "R-UNSHOWN",
        layer=seen.layer,
    )


def _scores(call: IndexerCall, t: int) -> tuple[Array, Array]:
    """Float64 `[visible]`: the exact scores of the keys of row t, and how far binary32 may be from them.

    A sum of D products, its scale, its weight, and a sum of H of them: D + H + 4 roundings of what they add.
    """
    held = call.keys[call.rows.requests[int(call.rows.request[t])]]
    keys = held.part(slice(int(call.visible[t]))).to_float64()
    query, weights = call.query.part(t).to_float64(), call.weights.part(t).to_float64()
    scale = float(np.array(call.scale_bits, np.uint32).view(np.float32))
    exact = np.maximum(query @ keys.T * scale, 0.0).T @ weights
    size = (np.abs(query) @ np.abs(keys.T) * scale).T @ np.abs(weights)
    roundings = keys.shape[1] + weights.size + 4
    return exact, 1.01 * roundings * DType.FLOAT32.unit_roundoff * size
