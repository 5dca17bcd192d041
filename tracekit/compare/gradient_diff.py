"""The gradients of one layer of two traces.

Those of keys and sinks are sums over queries: they are compared where the queries are the same.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence

from tracekit.compare.alignment import Pair
from tracekit.compare.layer_diff import ABSENT, Launches, Part, Total, launches_of, row_part
from tracekit.compare.layer_view import LayerView
from tracekit.model import Bits


def gradient_parts(layer: int, ours: LayerView, theirs: LayerView, pairs: Sequence[Pair]) -> Iterator[Part]:
    """Yield dO, and the gradients of Q, keys, values and sink, where both traces have gradients."""
    matches = [(pair, ours.matches(pair.base, theirs, pair.target, pair.tokens)) for pair in pairs]
    launches = launches_of(matches)
    if not any(launch.base.grads and launch.target.grads for launch in launches):
        return
    for name in ("d_out", "d_q"):
        yield row_part(layer, name, matches)
    for name in ("d_keys", "d_values"):
        yield _kv(layer, name, launches)
    yield _sink(layer, launches)


def _kv(layer: int, name: str, launches: Sequence[Launches]) -> Part:
    total = Total()
    for launch in launches:
        pair, ours, theirs = launch.pair, launch.base.grads, launch.target.grads
        mine = {} if ours is None else ours.d_kv.get(pair.base, {})
        other = {} if theirs is None else theirs.d_kv.get(pair.target, {})
        if not mine or set(mine) != set(other):
            total.leave_out(f"{name} was not recorded")
        elif not _same_queries(launch):
            total.leave_out("other queries read the keys")
        else:
            for family in sorted(mine):
                base, target = (
                    held.keys if name == "d_keys" else held.value_bits
                    for held in (mine[family], other[family])
                )
                rows = range(mine[family].first, mine[family].end)
                total.add(layer, name, base, target, pair.base, rows)
    return total.part(layer, name)


def _sink(layer: int, launches: Sequence[Launches]) -> Part:
    """A sum over all requests of a call."""
    total, calls = Total(), defaultdict(list)
    for launch in launches:
        calls[id(launch.base), id(launch.target)].append(launch)
    for requests in calls.values():
        one = requests[0]
        mine, other = (None if call.grads is None else call.grads.d_sink for call in (one.base, one.target))
        if mine is None and other is None:
            continue
        counts = {len(requests), len(one.base.rows.requests), len(one.target.rows.requests)}
        if mine is None or other is None:
            total.leave_out("d_sink was not recorded")
        elif len(counts) > 1 or not all(map(_same_queries, requests)):
            total.leave_out("it is a sum over other queries")
        else:
            base, target = (Bits(sink.data[None], sink.dtype) for sink in (mine, other))
            total.add(layer, "d_sink", base, target, one.pair.base, [0])
    if not total.left_out and not total.found.compared.elements:
        return Part(layer, "d_sink", ABSENT)
    return total.part(layer, "d_sink")


def _same_queries(launch: Launches) -> bool:
    """Whether two calls have the same rows of a request, all over the same tokens."""
    base, target = (
        sorted(row.position for row in call.rows.ids if row.request == key)
        for call, key in ((launch.base, launch.pair.base), (launch.target, launch.pair.target))
    )
    return base == target and max(base, default=0) < launch.pair.tokens
