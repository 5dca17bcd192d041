"""One layer of a trace by identity: rows by (request, position), and the call that each row came from."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from tracekit.model import AttentionCall, RequestKey

Layer = tuple[int, int]
"""Layer and rank: two ranks of one layer hold other heads and are two things."""


Row = tuple[AttentionCall, int]
"""A call and the index of a row in it."""


@dataclass(frozen=True)
class Match:
    """A row that two traces have in common, as each of them computed it."""

    position: int
    base: Row
    target: Row


@dataclass
class LayerView:
    """What the calls of one layer say about each row: every time that it was computed, in order."""

    rows: dict[RequestKey, dict[int, list[Row]]] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(list))
    )

    @classmethod
    def of_trace(cls, trace: Iterable[AttentionCall]) -> dict[Layer, "LayerView"]:
        """Return a view a layer and rank."""
        layers: dict[Layer, LayerView] = defaultdict(cls)
        for call in trace:
            view = layers[call.layer, call.rank]
            for t, row in enumerate(call.rows.ids):
                view.rows[row.request][row.position].append((call, t))
        return dict(layers)

    @property
    def has_gradients(self) -> bool:
        """Whether some call has gradients."""
        rows = (row for positions in self.rows.values() for times in positions.values() for row in times)
        return any(call.grads is not None for call, _ in rows)

    def matches(self, key: RequestKey, other: "LayerView", target: RequestKey, tokens: int) -> list[Match]:
        """Return the rows before position `tokens` that both have, ascending.

        A row that was computed several times (a recompute, a preempted request) is matched time by time;
        where one side has fewer, its last answer stands for the rest, so that a recompute with other bits is
        a difference.
        """
        found = []
        for position in sorted(self.rows[key]):
            theirs = other.rows[target].get(position)
            if position >= tokens or theirs is None:
                continue
            ours = self.rows[key][position]
            for i in range(max(len(ours), len(theirs))):
                found.append(Match(position, ours[min(i, len(ours) - 1)], theirs[min(i, len(theirs) - 1)]))
        return found


def keys_of(row: Row) -> list[tuple[str, int]]:
    """Return the (family, id) pairs that a row read, in executed order."""
    call, t = row
    return [(family.value, int(i)) for family, ids in call.selection.row(t) for i in ids]
