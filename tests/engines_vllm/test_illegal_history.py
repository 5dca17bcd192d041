"""Violations planted in the history of a real vLLM: each is refused with its code and its place."""

from dataclasses import replace

import pytest

from tests.engines_vllm.histories import Spoiled, legal, passes
from tests.engines_vllm.tiny_engine import PAGE
from tracekit.gate.recorded import Legality
from tracekit.model.events import (
    Adopt,
    Evict,
    Finish,
    GateMode,
    NewWeights,
    Pages,
    Preempt,
    ResetCache,
    Sleep,
)
from tracekit.model.history import Pass


@pytest.fixture(scope="module")
def got(qwen3_shared, run, prompt):
    """A prompt in chunks, a prefix hit, preemptions, rows that are found again, and recomputed ones."""
    prompts = [prompt(90, 1), prompt(60, 2), [*prompt(90, 1)[:70], 3, 4]]
    found = run(qwen3_shared, prompts, 60)
    legal(found)
    return found


# plants: each changes a history and says at which entry it is refused


def stale_cache_version(spoiled):
    """A row that was written again is read as it was before."""
    request = spoiled.history[spoiled.first(Preempt)].request
    at = spoiled.pass_of(request, spoiled.first(Preempt))
    at = spoiled.pass_of(request, at + 1)
    spoiled.held(spoiled.history[at].step, request, lambda held: replace(held, cache_version=0))
    return at


def a_cache_version_that_nobody_wrote(spoiled):
    request = spoiled.history[0].rows[0].request
    at = spoiled.pass_of(request, 2)
    spoiled.held(spoiled.history[at].step, request, lambda held: replace(held, cache_version=7))
    return at


def skipped_position(spoiled):
    at = spoiled.plain()
    spoiled.drop(at)
    return at


def duplicate_position(spoiled):
    """Two steps compute the same rows."""
    at = spoiled.plain()
    step, next_step = spoiled.history[at].step, spoiled.history[at + 1].step
    spoiled.history[at + 1] = replace(spoiled.history[at], step=next_step)
    again = [replace(launch, step=next_step) for launch in spoiled.launches if launch.step == step]
    spoiled.launches = [launch for launch in spoiled.launches if launch.step != next_step] + again
    return at + 1


def a_pass_twice(spoiled):
    spoiled.history.insert(3, spoiled.history[2])
    return 3


def decode_before_prefill(spoiled):
    spoiled.rows(0, mode=GateMode.EAGER)
    return 0


def preemption_that_nobody_told_of(spoiled):
    """The pages of the request go to others while it should still hold its rows."""
    at = spoiled.first(Preempt)
    request = spoiled.history[at].request
    told = [e for e in spoiled.history[at:] if isinstance(e, Preempt | Adopt) and e.request == request]
    spoiled.history[at:] = [e for e in spoiled.history[at:] if e not in told]
    return at


def reused_page(spoiled):
    """A new row is written where another request has rows that it still reads."""
    at, taker = next(
        (at, row)
        for at, entry in enumerate(spoiled.history)
        if isinstance(entry, Pass) and len(entry.rows) > 1
        for row in entry.rows
        if row.mode is GateMode.EAGER and row.first % PAGE == 0
    )
    step = spoiled.history[at].step
    owner = next(row.request for row in spoiled.history[at].rows if row.request != taker.request)
    launch = next(n for n in spoiled.launches if (n.step, n.layer) == (step, 1))
    (theirs,) = (held.pages.table for held in launch.held[owner].values())

    def moved(held):
        return replace(held, pages=Pages(PAGE, (*held.pages.table[:-1], theirs[-1])))

    spoiled.held(step, taker.request, moved)
    return at


def moved_page(spoiled):
    request = spoiled.history[0].rows[0].request
    at = spoiled.pass_of(request, 3)

    def moved(held):
        size, table = held.pages
        return replace(held, pages=Pages(size, (77, *table[1:])))

    spoiled.held(spoiled.history[at].step, request, moved)
    return at


def missing_row(spoiled):
    request = spoiled.history[0].rows[0].request
    at = spoiled.pass_of(request, 3)
    spoiled.held(spoiled.history[at].step, request, lambda held: replace(held, first=1))
    return at


def giver_that_was_evicted(spoiled):
    at = spoiled.first(Adopt, spoiled.first(Finish))
    source = spoiled.history[at].source
    if Finish(source) not in spoiled.history[:at]:
        spoiled.history.insert(at, Finish(source))
        at += 1
    spoiled.history.insert(at, Evict(source))
    return at + 1


def more_rows_than_the_giver_has(spoiled):
    at = spoiled.first(Adopt)
    spoiled.history[at] = replace(spoiled.history[at], at=4096)
    return at


def prefix_hit_that_nobody_told_of(spoiled):
    at = spoiled.first(Adopt)
    request = spoiled.history.pop(at).request
    return spoiled.pass_of(request, at)


def prefix_of_older_weights(spoiled):
    at = spoiled.first(Adopt)
    spoiled.history.insert(at, NewWeights(1))
    return at + 1


def decode_across_a_weight_change(spoiled):
    spoiled.history.insert(6, NewWeights(1))
    for at, entry in enumerate(spoiled.history[6:], 6):
        if isinstance(entry, Pass):
            spoiled.history[at] = replace(entry, model_version=1)
    return spoiled.first(Pass, 6)


def older_weights(spoiled):
    spoiled.history.insert(6, NewWeights(1))
    return spoiled.first(Pass, 6)


def weights_that_go_back(spoiled):
    spoiled.history[6:6] = [NewWeights(3), NewWeights(2)]
    return 7


def rows_from_before_a_reset(spoiled):
    spoiled.history.insert(6, ResetCache(1))
    return spoiled.first(Pass, 6)


def a_request_that_has_finished(spoiled):
    at = spoiled.first(Pass, 6)
    spoiled.history.insert(at, Finish(spoiled.history[at].rows[0].request))
    return at + 1


def a_sleeping_engine(spoiled):
    spoiled.history.insert(6, Sleep(True))
    return spoiled.first(Pass, 6)


def a_layer_that_did_not_run(spoiled):
    at = spoiled.first(Pass, 6)
    step = spoiled.history[at].step
    spoiled.launches = [launch for launch in spoiled.launches if (launch.step, launch.layer) != (step, 1)]
    return at


PLANTED = {
    stale_cache_version: "G-CACHE-STALE",
    a_cache_version_that_nobody_wrote: "G-CACHE-NEWER",
    skipped_position: "G-POSITION-GAP",
    duplicate_position: "G-POSITION-REWIND",
    a_pass_twice: "G-TRACE-CALL",
    decode_before_prefill: "G-DECODE-FIRST",
    preemption_that_nobody_told_of: "G-SLOT-REUSED",
    reused_page: "G-SLOT-REUSED",
    moved_page: "G-SLOT-MOVED",
    missing_row: "G-KV-MISSING",
    giver_that_was_evicted: "G-REQUEST-UNKNOWN",
    more_rows_than_the_giver_has: "G-AHEAD",
    prefix_hit_that_nobody_told_of: "G-POSITION-GAP",
    prefix_of_older_weights: "G-PREFIX-STALE",
    decode_across_a_weight_change: "G-KV-MODEL",
    older_weights: "G-MODEL-STALE",
    weights_that_go_back: "G-VERSION-BACK",
    rows_from_before_a_reset: "G-CACHE-RESET",
    a_request_that_has_finished: "G-FINISHED",
    a_sleeping_engine: "G-ASLEEP",
    a_layer_that_did_not_run: "G-TRACE-CALL",
}


@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__)
def test_a_planted_violation_is_refused_with_its_code_and_place(got, plant):
    spoiled = Spoiled(got)
    at = plant(spoiled)
    judgement = spoiled.judged(got)
    assert (judgement.status, judgement.code) == (Legality.ILLEGAL, PLANTED[plant]), judgement
    assert judgement.place["entry"] == at
    assert PLANTED[plant] in judgement.reason
    if isinstance(spoiled.history[at], Pass):
        assert judgement.place["step"] == spoiled.history[at].step


def test_scales_of_another_generation_are_refused(qwen3_tka1_fp8, run, prompt):
    """A block that was written with one scale is read with another, and no event said so."""
    found = run(qwen3_tka1_fp8, [prompt(70, 1), prompt(9, 2)], 3)
    legal(found)
    spoiled = Spoiled(found)
    step = passes(spoiled.history)[2].step
    assert {launch.scale for launch in spoiled.launches} == {(1.0, 1.0)}
    for at, launch in enumerate(spoiled.launches):
        if (launch.step, launch.layer) == (step, 1):
            spoiled.launches[at] = replace(launch, scale=(0.5, 1.0))
    judgement = spoiled.judged(found)
    assert (judgement.status, judgement.code) == (Legality.ILLEGAL, "G-SCALE")
    assert (judgement.place["step"], judgement.place["layer"]) == (step, 1)
