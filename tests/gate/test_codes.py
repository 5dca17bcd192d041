"""Each rule of the ledger by itself: a legal history, one event that breaks the rule, its code and place."""

import re
from itertools import pairwise
from pathlib import Path

import pytest

from tracekit.errors import GateRefused
from tracekit.gate import CODES, Ledger, transition
from tracekit.model import KVFamily
from tracekit.model.events import (
    Adopt,
    Attend,
    Backward,
    Capture,
    Evict,
    Fence,
    Finish,
    Fork,
    GateMode,
    GraphUse,
    Migrate,
    NewWeights,
    Pages,
    Preempt,
    Read,
    Rescale,
    ResetCache,
    Rollback,
    Scales,
    Sleep,
    Span,
    Wake,
)

DENSE, C4, RECENT = KVFamily.DENSE, KVFamily.C4, KVFamily.RECENT
PREFILL, EAGER, GRAPH, TRAINING, RECOMPUTE = (
    GateMode.PREFILL,
    GateMode.EAGER,
    GateMode.GRAPH,
    GateMode.TRAINING,
    GateMode.RECOMPUTE,
)
USE = GraphUse("g", (10, 20), 2)


def run(
    first,
    end,
    mode=PREFILL,
    *,
    request="a",
    layer=0,
    weights=0,
    window=None,
    graph=None,
    reads=None,
    oldest=0,
    **read,
):
    """A launch of one request over dense rows, or over `reads`."""
    reads = reads if reads is not None else (Read(DENSE, first=oldest, **read),)
    return Attend(layer, (Span(request, first, end, mode, reads),), weights, window, graph)


def paged(first, end, *table, mode=PREFILL, request="a", size=4, version=0):
    return run(first, end, mode, request=request, pages=Pages(size, table), cache_version=version)


def scaled(first, end, *generations, mode=PREFILL, size=4):
    return run(first, end, mode, scales=Scales(size, generations))


BOTH = (run(0, 4), run(0, 4, layer=1))
TRAINED = Attend(0, (Span("a", 0, 4, TRAINING, (Read(DENSE),)),), kernel="k")
FORKED = (paged(0, 6, 1, 2), Fork("b", "a", 6))

BROKEN = [
    ("G-EMPTY", [], Attend(0, ())),
    ("G-EMPTY", [], run(3, 3)),
    ("G-EMPTY", [], run(0, 3, reads=())),
    ("G-ROWS-TWICE", [], Attend(0, (Span("a", 0, 2, PREFILL, (Read(DENSE),)),) * 2)),
    ("G-ROWS-TWICE", [], run(0, 3, reads=(Read(DENSE), Read(DENSE)))),
    ("G-POSITION-GAP", [run(0, 4)], run(5, 6, EAGER)),
    ("G-POSITION-GAP", [], run(2, 4)),
    ("G-POSITION-REWIND", [run(0, 4), run(4, 5, EAGER)], run(4, 5, EAGER)),
    ("G-POSITION-REWIND", [run(0, 4)], run(3, 5, EAGER)),
    ("G-POSITION-REPEAT", [*BOTH, run(4, 5, EAGER)], run(4, 5, EAGER)),
    ("G-PASS-END", [*BOTH, run(4, 6)], run(4, 7, layer=1)),
    ("G-PASS-OPEN", [*BOTH, run(4, 5, EAGER)], run(5, 6, EAGER)),
    ("G-PASS-OPEN", [*BOTH, run(4, 5), NewWeights(1)], Migrate("a", 1)),
    ("G-STREAM-NEW", [run(0, 4), run(4, 5, EAGER)], run(5, 6, EAGER, layer=7)),
    ("G-DECODE-FIRST", [], run(0, 1, EAGER)),
    ("G-FINISHED", [run(0, 4), Finish("a")], run(4, 5, EAGER)),
    ("G-TRAINING-START", [], run(2, 4, TRAINING)),
    ("G-TRAINING-CACHE", [run(0, 4)], run(0, 4, TRAINING)),
    ("G-TRAINING-CACHE", [run(0, 4, TRAINING)], run(4, 5, EAGER)),
    ("G-RECOMPUTE-UNKNOWN", [], run(0, 4, RECOMPUTE)),
    ("G-RECOMPUTE-UNKNOWN", [run(0, 4)], run(2, 5, RECOMPUTE)),
    ("G-RECOMPUTE-VERSION", [run(0, 4), Finish("a"), NewWeights(1)], run(0, 4, RECOMPUTE, weights=1)),
    (
        "G-RECOMPUTE-VERSION",
        [run(0, 4), Preempt("a"), NewWeights(1)],
        run(0, 4, RECOMPUTE, weights=1, cache_version=1),
    ),
    ("G-MODEL-STALE", [NewWeights(1)], run(0, 4, weights=0)),
    ("G-MODEL-UNKNOWN", [], run(0, 4, weights=1)),
    ("G-KV-MODEL", [run(0, 4), NewWeights(1)], run(4, 5, EAGER, weights=1)),
    ("G-VERSION-BACK", [NewWeights(2)], NewWeights(1)),
    ("G-VERSION-BACK", [Rescale(1)], Rescale(1)),
    ("G-VERSION-BACK", [ResetCache(3)], ResetCache(2)),
    ("G-MIGRATE", [run(0, 4)], Migrate("a", 1)),
    ("G-MIGRATE", [run(0, 4), NewWeights(1)], Migrate("a", 0)),
    ("G-CACHE-STALE", [run(0, 4, cache_version=3)], run(4, 5, EAGER, cache_version=2)),
    ("G-CACHE-STALE", [run(0, 4), Preempt("a")], run(0, 4)),
    ("G-CACHE-NEWER", [run(0, 4)], run(4, 5, EAGER, cache_version=1)),
    ("G-CACHE-RESET", [run(0, 4), ResetCache(1)], run(4, 5, EAGER)),
    ("G-CACHE-RESET", [run(0, 4), ResetCache(1, 0, DENSE)], run(4, 5, EAGER)),
    ("G-CACHE-RESET", [run(0, 4), ResetCache(1)], Adopt("b", 4, 0, "a")),
    ("G-PREFIX-VERSION", [run(0, 4), NewWeights(1)], Adopt("b", 4, 1, "a")),
    ("G-PREFIX-STALE", [run(0, 4), NewWeights(1)], Adopt("b", 4, 0, "a")),
    ("G-SCALE-MISSING", [scaled(0, 4, 0)], run(4, 5, EAGER)),
    ("G-SCALE-MISSING", [], scaled(0, 5, 0)),
    ("G-SCALE", [scaled(0, 4, 0)], scaled(4, 5, 1, 0, mode=EAGER)),
    ("G-SCALE-STALE", [scaled(0, 4, 0), Rescale(1)], scaled(4, 5, 0, 0, mode=EAGER)),
    ("G-SCALE-STALE", [scaled(0, 3, 0), Rescale(1)], scaled(3, 4, 0, mode=EAGER)),
    ("G-SLOT-MISSING", [], paged(0, 5, 1)),
    ("G-SLOT-MISSING", [paged(0, 4, 1)], run(4, 5, EAGER)),
    ("G-SLOT-MOVED", [paged(0, 4, 1)], paged(4, 5, 2, 3, mode=EAGER)),
    ("G-SLOT-REUSED", [paged(0, 4, 1)], paged(0, 4, 1, request="b")),
    ("G-SLOT-REUSED", [paged(0, 4, 1)], paged(4, 5, 1, 1, mode=EAGER)),
    ("G-SLOT-SHARED", FORKED, paged(6, 7, 1, 2, mode=EAGER, request="b")),
    ("G-KV-MISSING", [run(0, 4)], run(4, 5, EAGER, oldest=1)),
    ("G-KV-MISSING", [run(0, 9, window=4)], run(9, 10, EAGER, window=4, oldest=7)),
    (
        "G-EVICTED",
        [run(0, 9, window=4), run(9, 10, EAGER, window=4, oldest=6)],
        run(10, 11, EAGER, window=4, oldest=5),
    ),
    ("G-EVICTED", [run(0, 9), Evict("a", 3)], run(9, 10, EAGER)),
    ("G-NOT-VISIBLE", [Adopt("a", 8)], run(8, 9, EAGER)),
    ("G-ASLEEP", [Sleep()], run(0, 4)),
    ("G-ASLEEP", [Sleep()], Sleep()),
    ("G-ASLEEP", [], Wake()),
    ("G-GRAPH-MODE", [run(0, 4)], run(4, 5, GRAPH)),
    ("G-GRAPH-MODE", [run(0, 4), Capture(USE)], run(4, 5, EAGER, graph=USE)),
    ("G-GRAPH-UNKNOWN", [run(0, 4)], run(4, 5, GRAPH, graph=USE)),
    ("G-GRAPH-ADDRESS", [run(0, 4), Capture(USE)], run(4, 5, GRAPH, graph=USE._replace(addresses=(10, 21)))),
    ("G-GRAPH-SHAPE", [run(0, 4), Capture(USE)], run(4, 5, GRAPH, graph=USE._replace(rows=1))),
    ("G-GRAPH-SHAPE", [run(0, 4), Capture(USE)], run(4, 7, GRAPH, graph=USE)),
    (
        "G-GRAPH-VERSION",
        [run(0, 4), Capture(USE), NewWeights(1), Migrate("a", 1)],
        run(4, 5, GRAPH, graph=USE, weights=1),
    ),
    ("G-GRAPH-VERSION", [], Capture(USE, 1)),
    ("G-REQUEST-UNKNOWN", [], Preempt("a")),
    ("G-REQUEST-UNKNOWN", [run(0, 4), Finish("a"), Evict("a")], Fork("b", "a", 4)),
    ("G-REQUEST-STATE", [run(0, 4), Finish("a")], Preempt("a")),
    ("G-REQUEST-STATE", [run(0, 4)], Evict("a")),
    ("G-REQUEST-EXISTS", [run(0, 4), run(0, 4, request="b")], Fork("b", "a", 4)),
    ("G-REQUEST-EXISTS", [run(0, 4)], Adopt("a", 4, 0, "a")),
    ("G-AHEAD", [run(0, 4)], Rollback("a", 5)),
    ("G-AHEAD", [run(0, 4)], Fork("b", "a", 5)),
    ("G-AHEAD", [run(0, 4)], Evict("a", 5)),
    ("G-AHEAD", [paged(0, 8, 1, 2), Finish("a"), paged(0, 4, 2, request="b")], Adopt("c", 5, 0, "a")),
    ("G-BACKWARD", [], Backward(1, "k")),
    ("G-BACKWARD", [TRAINED], Backward(1, "another")),
    ("G-BACKWARD", [TRAINED, Backward(1, "k")], Backward(1, "k")),
    ("G-BACKWARD-STALE", [TRAINED, NewWeights(1)], Backward(1, "k", 1)),
    ("G-BACKWARD-STALE", [TRAINED, NewWeights(1)], Backward(1, "k")),
    ("G-BACKWARD", [TRAINED, NewWeights(1), NewWeights(2)], Backward(1, "k", 2)),
    ("G-WINDOW-GONE", [run(0, 9, window=4), run(9, 10, EAGER, window=4, oldest=6)], Rollback("a", 8)),
]

LIVE = {
    *("G-ROWS-GAP", "G-SHAPE", "G-NON-FINITE", "G-FLAG", "G-RETRY-SLOTS", "G-RETRY-BYTES", "G-BYTES"),
    *("G-CONCURRENT", "G-TRACE-CALL", "G-BACKWARD-TWICE"),
    *("G-PLAN-FAMILIES", "G-PLAN-SHARED", "G-PLAN-WINDOW", "G-PLAN-ROWS", "G-PLAN-SINK", "G-PLAN-SCALE"),
}
"""Codes around a ledger: test_gate, test_failures, test_owed; histories and joint plans in tests/engines."""


def after(events):
    ledger = Ledger()
    for event in events:
        ledger = transition(ledger, event)
    return ledger


@pytest.mark.parametrize(
    ("code", "history", "event"), BROKEN, ids=lambda value: value if isinstance(value, str) else ""
)
def test_each_rule_refuses_with_its_code_and_moves_nothing(code, history, event):
    ledger = after(history)
    before = ledger.digest
    with pytest.raises(GateRefused) as refused:
        transition(ledger, event)

    assert refused.value.rule == code
    assert code in str(refused.value)
    assert ledger.digest == before
    if isinstance(event, Attend) and event.spans and not code.startswith(("G-GRAPH-", "G-ASLEEP", "G-ROWS")):
        assert refused.value.fields["layer"] == event.layer
        assert refused.value.fields["request"] == event.spans[0].request


def test_every_code_is_tried():
    assert {code for code, _, _ in BROKEN} | LIVE == set(CODES)


def test_the_page_lists_every_code_with_its_rule():
    text = (Path(__file__).parents[2] / "docs" / "gate.md").read_text()
    listed = dict(re.findall(r"^\| (G-[A-Z-]+) \| (.+) \|$", text, re.MULTILINE))
    assert listed == CODES


LEGAL = {
    "chunks, then decode": [run(0, 4), run(4, 9), run(9, 10, EAGER)],
    "two layers in any order": [run(0, 4, layer=1), run(0, 4), run(4, 5, EAGER), run(4, 5, EAGER, layer=1)],
    "drafts rejected": [run(0, 4), run(4, 8, EAGER), Rollback("a", 5), run(5, 8, EAGER)],
    "preempted and given back": [
        run(0, 4),
        run(4, 5, EAGER),
        Preempt("a"),
        run(0, 6, RECOMPUTE, cache_version=1),
        run(6, 7, EAGER, cache_version=1),
    ],
    "preempted, resumed from its own pages": [
        paged(0, 4, 1),
        Preempt("a"),
        Adopt("a", 3, 0, "a"),
        paged(3, 6, 1, 2, version=1),
    ],
    "n > 1 with copy on write": [
        *FORKED,
        paged(6, 7, 1, 3, mode=EAGER, request="b"),
        paged(6, 7, 1, 2, mode=EAGER),
    ],
    "a prefix of a finished request": [run(0, 4), Finish("a"), Adopt("b", 3, 0, "a"), run(3, 5, request="b")],
    "rows from another engine": [Adopt("a", 8), Fence(), run(8, 9, EAGER)],
    "new weights, new prefill": [
        run(0, 4),
        NewWeights(1),
        Preempt("a"),
        run(0, 4, weights=1, cache_version=1),
    ],
    "new weights, KV kept on purpose": [
        run(0, 4),
        NewWeights(1),
        Migrate("a", 1),
        run(4, 5, EAGER, weights=1),
    ],
    "trained, with activations recomputed": [
        run(0, 4, TRAINING),
        run(0, 4, TRAINING, layer=1),
        run(0, 4, RECOMPUTE, layer=1),
        run(0, 4, RECOMPUTE),
        NewWeights(1),
        run(0, 4, TRAINING, weights=1),
    ],
    "recomputed by a trainer after the rollout": [run(0, 4), Finish("a"), run(1, 3, RECOMPUTE)],
    "a window slides": [
        run(0, 9, window=4),
        run(9, 10, EAGER, window=4, oldest=6),
        run(10, 11, EAGER, window=4, oldest=7),
    ],
    "sleep, wake, prefill": [run(0, 4), Sleep(), Wake(), run(0, 4, cache_version=1)],
    "sleep that keeps the cache": [run(0, 4), Sleep(True), Wake(), run(4, 5, EAGER)],
    "a graph": [run(0, 4), Capture(USE), run(4, 5, GRAPH, graph=USE), run(5, 6, GRAPH, graph=USE)],
    "captured again after new weights": [
        run(0, 4),
        Capture(USE),
        NewWeights(1),
        Capture(USE, 1),
        Migrate("a", 1),
        run(4, 5, GRAPH, graph=USE, weights=1),
    ],
    "C4 rows complete at 3": [
        run(0, 3, reads=(Read(RECENT), Read(C4))),
        run(3, 4, EAGER, reads=(Read(RECENT), Read(C4))),
    ],
    "gradients, and again of the graph that was kept": [
        TRAINED,
        Backward(1, "k", retained=True),
        Backward(1, "k", retained=True),
        Backward(1, "k"),
    ],
    "another turn": [run(0, 4), run(4, 5, EAGER), run(5, 9)],
}


@pytest.mark.parametrize("history", LEGAL.values(), ids=LEGAL)
def test_what_engines_legally_do_passes(history):
    digests = [after(history[:count]).digest for count in range(len(history) + 1)]
    assert all(before != now for before, now in pairwise(digests))
