"""One layer of a trace by identity: rows by (request, position), and the call that each row came from."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from tracekit.model import AttentionCall, RequestKey

Layer = tuple[int, int]
"""Layer and rank: two ranks of one layer hold other heads and are two things."""


@dataclass
class LayerView:
    """What the calls of one layer say about each row.

    A row that was computed more than once (a recompute, a preempted request) is taken from its first call.
    """

    rows: dict[RequestKey, dict[int, tuple[AttentionCall, int]]] = field(
        default_factory=lambda: defaultdict(dict)
    )
    calls: list[AttentionCall] = field(default_factory=list)

    @classmethod
    def of_trace(cls, trace: Iterable[AttentionCall]) -> dict[Layer, "LayerView"]:
        """Return a view a layer and rank."""
        layers: dict[Layer, LayerView] = defaultdict(cls)
        for call in trace:
            layers[call.layer, call.rank].add(call)
        return dict(layers)

    def add(self, call: AttentionCall) -> None:
        """Enter the rows of a call."""
        self.calls.append(call)
        for t, row in enumerate(call.rows.ids):
            self.rows[row.request].setdefault(row.position, (call, t))

    @property
    def any_call(self) -> AttentionCall:
        """The first call."""
        return self.calls[0]

    def common(self, key: RequestKey, other: "LayerView", target: RequestKey, tokens: int) -> list[int]:
        """Return the positions before `tokens` that both views have a row at, ascending."""
        return sorted(p for p in self.rows[key] if p < tokens and p in other.rows[target])

    def keys_of(self, key: RequestKey, position: int) -> list[tuple[str, int]]:
        """Return the (family, id) pairs that a row read, in executed order."""
        call, t = self.rows[key][position]
        return [(family.value, int(i)) for family, ids in call.selection.row(t) for i in ids]
