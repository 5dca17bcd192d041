"""Gradients in a recorded history: which launches are to have some, and whether each had them once."""

from collections.abc import Container

from tracekit.gate.machine import transition
from tracekit.gate.refusal import refuse
from tracekit.gate.state import Ledger
from tracekit.model.events import Backward
from tracekit.model.history import PassBackward


class Owed:
    """The launches of a history that are to have gradients, by step and layer."""

    def __init__(self) -> None:
        self._epochs: dict[tuple[int, int], int] = {}
        self._paid: set[tuple[int, int]] = set()

    def owe(self, step: int, layer: int, epoch: int) -> None:
        """Note a launch that is to have gradients, and the epoch of its commit."""
        self._epochs[step, layer] = epoch

    def failed(self, step: int) -> None:
        """The pass of a step failed: its launches were never committed."""
        self._epochs = {place: epoch for place, epoch in self._epochs.items() if place[0] != step}

    def paid(self, ledger: Ledger, entry: PassBackward, known: Container[int]) -> Ledger:
        """Return the ledger after the gradients of some layers.

        Args:
            ledger: the ledger before them.
            entry: what the history says.
            known: the layers of the trace; of others nothing is said.

        Raises:
            GateRefused: `G-BACKWARD`, `G-BACKWARD-TWICE`, `G-BACKWARD-STALE`, with step and layer.
        """
        for layer in entry.layers:
            if layer not in known:
                continue
            place = entry.step, layer
            epoch = self._epochs.get(place)
            where = {"step": entry.step, "layer": layer}
            if epoch is None:
                refuse("G-BACKWARD", "no launch there waits for gradients", **where)
            if place in self._paid:
                refuse(
                    "G-BACKWARD-TWICE", "its gradients were computed before, and no graph was kept", **where
                )
            event = Backward(epoch, entry.kernel, entry.model_version, entry.retained)
            ledger = transition(ledger, event)
            if not entry.retained:
                self._paid.add(place)
        return ledger
