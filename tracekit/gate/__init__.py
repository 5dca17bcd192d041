"""The request-mode gate: what may come next for each request, and what is proved of it (docs/gate.md)."""

from tracekit.gate.gate import RequestGate
from tracekit.gate.launch import Slots
from tracekit.gate.machine import transition
from tracekit.gate.refusal import CODES
from tracekit.gate.state import Ledger, Phase, RequestState, Stream

__all__ = ["CODES", "Ledger", "Phase", "RequestGate", "RequestState", "Slots", "Stream", "transition"]
