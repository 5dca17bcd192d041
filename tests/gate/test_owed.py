"""Gradients in a history, judged on calls of the small engine: each launch has its own, once."""

from dataclasses import replace

import pytest

from tests.gate.engine import KEYS, Engine
from tracekit.gate.recorded import Legality, judge
from tracekit.model import Mode, Recording
from tracekit.model.events import GateMode, NewWeights
from tracekit.model.history import Pass, PassBackward, PassRows

NAME = str(KEYS["a"])
ENGINE = Engine()


def of(mode, end=4):
    return (PassRows(NAME, 0, end, mode),)


def gradients(step, *layers, **fields):
    return PassBackward(step, layers, "tka1", **fields)


def made(*history):
    """Judge passes over rows 0 to 3 of one request; a step has the launches of its pass."""
    calls = []
    for entry in history:
        if not isinstance(entry, Pass):
            continue
        mode = Mode(entry.rows[0].mode.value)
        for layer in entry.layers or (0, 1):
            calls.append(replace(ENGINE.call(layer, [("a", 0, 4)], mode), step=entry.step))
    return judge(Recording(history=history), calls)


FORWARD = Pass(0, of(GateMode.TRAINING), owing=(1,))
AGAIN = Pass(1, of(GateMode.RECOMPUTE), layers=(0,), owing=(0,))


def test_each_launch_has_its_gradients_once():
    judgement = made(FORWARD, gradients(0, 1), AGAIN, gradients(1, 0))
    assert (judgement.status, judgement.calls) == (Legality.LEGAL, 3)


def test_a_graph_that_was_kept_gives_them_again():
    kept = gradients(0, 1, retained=True)
    assert made(FORWARD, kept, kept, gradients(0, 1)).status is Legality.LEGAL


@pytest.mark.parametrize(
    ("code", "history"),
    [
        ("G-BACKWARD", (gradients(0, 1), FORWARD)),
        ("G-BACKWARD", (FORWARD, gradients(0, 1, 0))),
        ("G-BACKWARD", (FORWARD, gradients(1, 1))),
        ("G-BACKWARD", (FORWARD, PassBackward(0, (1,), "another"))),
        ("G-BACKWARD-TWICE", (FORWARD, gradients(0, 1), gradients(0, 1))),
        ("G-BACKWARD-TWICE", (FORWARD, gradients(0, 1, 1))),
        ("G-BACKWARD-STALE", (FORWARD, NewWeights(1), gradients(0, 1))),
        ("G-BACKWARD-STALE", (FORWARD, NewWeights(1), gradients(0, 1, model_version=1))),
        ("G-BACKWARD", (replace(FORWARD, failed=True), gradients(0, 1))),
    ],
)
def test_gradients_that_may_not_be(code, history):
    judgement = made(*history)
    assert (judgement.status, judgement.code) == (Legality.ILLEGAL, code)
    assert {"step", "layer"} <= judgement.place.keys()


def test_of_layers_that_no_call_is_of_nothing_is_said():
    """A filter left the layer out of the whole trace: it has no launch, and its gradients are no claim."""
    assert made(FORWARD, gradients(0, 7, 1)).status is Legality.LEGAL
