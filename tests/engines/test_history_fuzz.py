"""A stored history, changed in one place: refused, illegal or unknown, and never legal."""

import json
from dataclasses import replace

import pytest

from tests.edits import edited
from tracekit.engines.driver import greedy
from tracekit.errors import TraceCorrupt
from tracekit.gate.recorded import Legality, judge
from tracekit.gate.trace_launch import Launch
from tracekit.store.history import history_to_bytes, parse_history

MODELS = {"qwen3": (20, 13), "deepseek_v4": (126,)}


@pytest.fixture(scope="module", params=MODELS)
def stored(request, _models, recorded, prompt):
    """A recording, what its calls read, and its history as stored."""
    model = _models["tiny-" + request.param.replace("_", "-")]
    model.set_attn_implementation("sdpa" if request.param == "qwen3" else "eager")
    prompts = [prompt(length, seed) for seed, length in enumerate(MODELS[request.param])]
    got = recorded(model, lambda m: greedy(m, prompts, 3))
    launches = [Launch.of(call) for call in got.calls]
    assert judge(got.recording, launches).status is Legality.LEGAL
    return got.recording, launches, json.loads(history_to_bytes(got.recording.history))


def leaves(document, at=()):
    if not isinstance(document, list):
        yield at, document
        return
    for index, part in enumerate(document):
        yield from leaves(part, (*at, index))


def others(value):
    """Values of the same type, and of others that Python takes for equal."""
    if isinstance(value, bool):
        return [not value, int(value), None, "x"]
    if isinstance(value, int):
        return [value + 1, value - 1, 1 << 40, -(1 << 70), float(value), str(value), True, None]
    if isinstance(value, str):
        return [value + "x", value[:-1], "", 0, None, [value]]
    return [0, 1, "x", [], False]


def legal(stored, document):
    """Whether a changed document is still a legal history; whatever else happens is one of our errors."""
    recording, launches, _ = stored
    try:
        history = parse_history(json.dumps(document, sort_keys=True, separators=(",", ":")).encode())
    except TraceCorrupt:
        return False
    assert history_to_bytes(history) == json.dumps(document, sort_keys=True, separators=(",", ":")).encode()
    return judge(replace(recording, history=history), launches).status is Legality.LEGAL


def says_the_same(document, at, after):
    """What a pass says of a cache version counts only for layers without a call: others say it themselves.

    And a history may say that its last pass failed, which claims less of the same calls.
    """
    version = len(at) == 4 and at[1] == 2 and at[3] == 4 and type(after) is int
    return version or (at == (len(document) - 1, 4) and after is True)


def test_no_other_leaf_is_legal(stored):
    document = stored[2]
    changes = [(at, after) for at, before in leaves(document) for after in others(before)]
    passed = [change for change in changes if legal(stored, edited(document, *change))]

    assert [change for change in passed if not says_the_same(document, *change)] == []


def test_no_other_order_is_legal(stored):
    document = stored[2]
    for at, entry in enumerate(document):
        assert not legal(stored, [*document[:at], *document[at + 1 :]])
        assert not legal(stored, [*document[: at + 1], entry, *document[at + 1 :]])
    for at in range(len(document) - 1):
        assert not legal(stored, [*document[:at], document[at + 1], document[at], *document[at + 2 :]])
