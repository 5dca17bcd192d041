"""One layer of a trace by identity: rows by (request, position), KV rows by (request, family, id)."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from tracekit.model import AttentionCall, Bits, KVFamily, RequestKey


@dataclass
class LayerView:
    """What the calls of one layer say about each row.

    A row that was computed more than once (a recompute, a preempted request) is taken from its first call.
    """

    rows: dict[RequestKey, dict[int, tuple[AttentionCall, int]]] = field(
        default_factory=lambda: defaultdict(dict)
    )
    kv: dict[tuple[RequestKey, KVFamily], dict[int, tuple[Bits, Bits, int]]] = field(
        default_factory=lambda: defaultdict(dict)
    )
    calls: list[AttentionCall] = field(default_factory=list)

    @classmethod
    def of_trace(cls, trace: Iterable[AttentionCall]) -> dict[int, "LayerView"]:
        """Return a view a layer."""
        layers: dict[int, LayerView] = defaultdict(cls)
        for call in trace:
            layers[call.layer].add(call)
        return dict(layers)

    def add(self, call: AttentionCall) -> None:
        """Enter the rows and KV rows of a call."""
        self.calls.append(call)
        for t, row in enumerate(call.rows.ids):
            self.rows[row.request].setdefault(row.position, (call, t))
        for key, families in call.kv.items():
            for family, held in families.items():
                known = self.kv[key, family]
                for at in range(held.count):
                    known.setdefault(held.first + at, (held.keys, held.value_bits, at))

    @property
    def any_call(self) -> AttentionCall:
        """The first call."""
        return self.calls[0]

    def positions(self, key: RequestKey) -> list[int]:
        """Return the positions that a request has rows at, ascending."""
        return sorted(self.rows[key])

    def families(self, key: RequestKey) -> set[KVFamily]:
        """Return the KV families that a request has."""
        return {family for owner, family in self.kv if owner == key}

    def kv_rows(self, key: RequestKey, family: KVFamily) -> dict[int, tuple[Bits, Bits, int]]:
        """Return KV row id -> (keys, values, index in them)."""
        return self.kv[key, family]

    def keys_of(self, key: RequestKey, position: int) -> list[tuple[str, int]]:
        """Return the (family, id) pairs that a row read, in executed order."""
        call, t = self.rows[key][position]
        return [(family.value, int(i)) for family, ids in call.selection.row(t) for i in ids]
