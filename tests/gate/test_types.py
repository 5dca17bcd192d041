"""An event of the wrong types is none: rules compare modes by identity and versions by order."""

from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest

import tracekit
from tracekit.errors import GateRefused
from tracekit.gate.machine import transition
from tracekit.gate.state import Ledger
from tracekit.model import KVFamily
from tracekit.model.events import (
    Adopt,
    Attend,
    Capture,
    Evict,
    Fork,
    GateMode,
    GraphUse,
    NewWeights,
    Preempt,
    Read,
    Rollback,
    Sleep,
    Span,
)
from tracekit.providers.portable import Tka1
from tracekit.testing import dense_call

READ = Read(KVFamily.DENSE)
SPAN = Span("a", 0, 3, GateMode.PREFILL, (READ,))


@pytest.mark.parametrize(
    "event",
    [
        Attend(0, (SPAN._replace(mode="eager decode"),)),
        Attend(0, (SPAN._replace(mode="recompute"),)),
        Attend(0, (SPAN._replace(first=0.0),)),
        Attend(0, (SPAN._replace(end=np.int64(3)),)),
        Attend(0, (SPAN._replace(end=True),)),
        Attend(0, (SPAN._replace(request=5),)),
        Attend(0, (SPAN._replace(reads=(READ._replace(family="dense"),)),)),
        Attend(0, (SPAN._replace(reads=(READ._replace(cache_version=float("nan")),)),)),
        Attend(0, (SPAN,), model_version=0.0),
        Attend(True, (SPAN,)),
        NewWeights(float("nan")),
        NewWeights(np.int64(2)),
        NewWeights("2"),
        Preempt(7),
        Rollback("a", 1.5),
        Fork("b", "a", True),
        Adopt("b", 1, None),
        Evict("a", "1"),
        Sleep(1),
        Capture("graph"),
    ],
    ids=repr,
)
def test_an_event_of_other_types_moves_nothing(event):
    with pytest.raises(TypeError, match=" no "):
        transition(transition(Ledger(), Attend(0, (SPAN,))), event)


@pytest.mark.parametrize("event", [Evict("a", None), Capture(GraphUse("g", (1,), 4)), Rollback("a", 2)])
def test_sound_ones_are_looked_at_by_the_rules(event):
    after = transition(Ledger(), Attend(0, (SPAN,)))
    with suppress(GateRefused):
        transition(after, event)


def test_a_ledger_has_a_digest_whatever_integers_a_call_is_made_of():
    gate, call = tracekit.RequestGate(), dense_call(lengths=(3,))
    kv = {key: {family: replace(rows, generation=np.int64(1)) for family, rows in families.items()}
          for key, families in call.kv.items()}  # fmt: skip
    gate.run(replace(call, kv=kv), Tka1(), model_version=np.int64(0))

    assert len(gate.digest) == 64


def test_flags_that_say_nothing_let_nothing_through():
    gate = tracekit.RequestGate()
    before = gate.digest

    with pytest.raises(GateRefused, match="no finite flag") as refused:
        gate.run(dense_call(lengths=(3,)), Tka1(), flags=list)

    assert (refused.value.rule, gate.digest) == ("G-FLAG", before)
