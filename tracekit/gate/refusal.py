"""The codes of the gate, one a rule, and the error that carries one."""

from typing import Any, NoReturn

from tracekit.errors import GateRefused

CODES = {
    # rows and positions
    "G-EMPTY": "a launch has rows, and each of its requests at least one row and one KV family",
    "G-ROWS-TWICE": "a launch names each request, and of a request each KV family, once",
    "G-ROWS-GAP": "the rows of a request in a launch are consecutive positions",
    "G-POSITION-GAP": "the next rows begin at the committed length",
    "G-POSITION-REWIND": "rows that are committed are not computed again without an event that says so",
    "G-POSITION-REPEAT": "a layer computes the rows of a pass once",
    "G-PASS-END": "the layers of a pass compute the same rows",
    "G-PASS-OPEN": "a pass is complete in all layers before the next one begins",
    "G-STREAM-NEW": "a layer and family that missed the first pass has no rows to go on from",
    "G-DECODE-FIRST": "a decode follows a prefill",
    "G-FINISHED": "a finished request computes no new rows",
    # training and recompute
    "G-TRAINING-START": "a training pass begins at position 0",
    "G-TRAINING-CACHE": "a request is either trained on, without a cache, or served from one",
    "G-RECOMPUTE-UNKNOWN": "only rows that were computed before are computed again",
    "G-RECOMPUTE-VERSION": "rows are recomputed under the weights that they were computed under",
    # versions
    "G-MODEL-STALE": "a launch runs the weights in force, not older ones",
    "G-MODEL-UNKNOWN": "weights come into force by an event before a launch runs them",
    "G-KV-MODEL": "a request goes on under the weights that its KV was written under",
    "G-VERSION-BACK": "versions and generations only rise",
    "G-MIGRATE": "KV migrates to the weights in force, and from older ones",
    "G-CACHE-STALE": "KV is read under the cache version that it was written under, not an older one",
    "G-CACHE-NEWER": "a cache version rises only where rows are written again",
    "G-CACHE-RESET": "KV from before a reset of the cache is void",
    "G-PREFIX-VERSION": "a prefix is adopted under the weights that it was written under",
    "G-PREFIX-STALE": "a prefix of older weights is not reused after a weight update",
    # memory
    "G-SCALE-MISSING": "quantised rows have a scale generation for each block, and others have none",
    "G-SCALE": "a block is read with the scales that it was written with",
    "G-SCALE-STALE": "new rows are written with the scales in force",
    "G-SLOT-MISSING": "each row that is held has a page",
    "G-SLOT-MOVED": "rows stay on their page",
    "G-SLOT-REUSED": "no page holds live rows of two places",
    "G-SLOT-SHARED": "a page that is shared is copied before it is written",
    "G-KV-MISSING": "every row that a window may read is held, unless an event says that it was evicted",
    "G-EVICTED": "rows that were dropped do not come back",
    "G-NOT-VISIBLE": "rows written elsewhere are waited for before they are read",
    # engine and graphs
    "G-ASLEEP": "an engine that sleeps computes nothing",
    "G-GRAPH-MODE": "graph decode replays a graph, and nothing else does",
    "G-GRAPH-UNKNOWN": "a graph is captured before it is replayed",
    "G-GRAPH-ADDRESS": "a graph is replayed on the buffers that it was captured with",
    "G-GRAPH-SHAPE": "a graph is replayed in the shape that it was captured for, with no more rows",
    "G-GRAPH-VERSION": "a graph is replayed under the weights that it was captured under",
    # requests
    "G-REQUEST-UNKNOWN": "an event is about a request that the ledger knows",
    "G-REQUEST-STATE": "an event fits the state of its request",
    "G-REQUEST-EXISTS": "a name is one request's until that is evicted",
    "G-AHEAD": "rows that are shared, adopted, dropped or evicted are committed rows",
    "G-WINDOW-GONE": "a request goes on only where its window still holds the rows that it will read",
    # the live gate
    "G-SHAPE": "an answer has the shape and dtype of its call",
    "G-NON-FINITE": "an answer is finite",
    "G-FLAG": "every finite flag of a launch is true when it is read after completion",
    "G-RETRY-SLOTS": "a retry writes the slots of the launch that failed",
    "G-RETRY-BYTES": "a retry brings the bytes of the launch that failed",
    "G-BYTES": "rows computed again have the bytes of the first time",
    "G-CONCURRENT": "the ledger does not move while a launch runs",
    "G-BACKWARD": "a backward belongs to the forward that it follows, and to the same kernel",
    "G-BACKWARD-STALE": "gradients are computed under the weights of their forward",
    "G-BACKWARD-TWICE": "the gradients of a launch are computed once, unless its graph was kept",
    # the joint plan of DeepSeek-V4
    "G-PLAN-FAMILIES": "a joint plan reads the window, or the window and one family of compressed rows",
    "G-PLAN-SHARED": "in a joint plan a key is its own value",
    "G-PLAN-WINDOW": "a row of a joint plan reads its whole window, ascending, itself last",
    "G-PLAN-ROWS": "a row of a joint plan reads complete compressed rows only, and all of C128",
    "G-PLAN-SINK": "a sink is one binary32 logit a head, without a row of KV",
    "G-PLAN-SCALE": "the scale of a joint plan is one over the root of the head size",
    # a recorded history
    "G-TRACE-CALL": "the calls of a trace are those of its history",
}
"""Each code and its rule."""


def refuse(code: str, problem: str, **place: Any) -> NoReturn:
    """Refuse a transition.

    Args:
        code: one of `CODES`.
        problem: what is wrong, in one clause.
        place: request, layer, family, position, tensor, as far as they are known; the message names them.

    Raises:
        GateRefused: always.
    """
    where = ", ".join(f"{name} {value}" for name, value in place.items())
    text = f"{where}: {problem}." if where else f"{problem}."
    raise GateRefused(f"{text} Rule: {CODES[code]} (docs/gate.md, {code}).", rule=code, **place)
