"""Filters and budgets: what is kept, what the ledger says of the rest, and that nothing else changes."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tracekit.errors import InvalidCall, NothingSelected, UsageError
from tracekit.model import Mode, StepRecord, Tag
from tracekit.recorder.api import CaptureIncomplete, record
from tracekit.recorder.filters import parse_filters
from tracekit.recorder.manual import ManualSession
from tracekit.recorder.session import Session
from tracekit.store import open_trace, verify_trace
from tracekit.testing.build import dense_call

KV = np.random.default_rng(0).standard_normal((12, 2, 8), np.float32)


def run(path="unused.h5", *, depth=2, decodes=2, names=None, **options):
    """A prefill of 4 rows of `a` and 2 of `b`, then decode steps of both; what was written."""
    written = {}

    def keep(_, recording, calls):
        written.update(recording=recording, calls=calls)

    if path == "unused.h5":
        options["write"] = keep
    with record(path, **options) as session:
        session.names.update(names or {})
        counts = {"a": 0, "b": 0}
        for step in range(1 + decodes):
            new = {"a": 4, "b": 2} if step == 0 else {"a": 1, "b": 1}
            with session.step({name: [5] * n for name, n in new.items()}, calls=depth):
                for name, n in new.items():
                    counts[name] += n
                held = {name: KV[:n] + (name == "b") for name, n in counts.items()}
                rows = sum(new.values())
                q = np.random.default_rng(step).standard_normal((rows, 4, 8), np.float32)
                for layer in range(depth):
                    session.attention(layer=layer, q=q, keys=held, values=held, scale=0.5)
    return written.get("recording"), written.get("calls"), session


def rows(calls):
    """Layer, step, request number and position of every row."""
    return {
        (call.layer, call.step, call.rows.requests[r].ordinal, int(p))
        for call in calls
        for r, p in zip(call.rows.request, call.rows.positions, strict=True)
    }


def test_rows_at_some_positions_with_the_kv_that_they_read():
    recording, calls, _ = run(rows=range(1, 4))
    whole = run()[1]
    assert {position for *_, position in rows(calls)} == {1, 2, 3}
    first = calls[0]
    assert first.rows.positions.tolist() == [1, 2, 3, 1]
    assert first.q.data.tobytes() == whole[0].q.take(np.array([1, 2, 3, 5])).data.tobytes()
    assert [rows.count for kv in first.kv.values() for rows in kv.values()] == [4, 2]
    assert [(line.recorded, line.filtered, line.left_out) for line in recording.ledger] == [
        (2, 0, 4),
        (2, 0, 2),
        (2, 0, 2),
    ]
    assert all(line.complete and line.written < line.wanted for line in recording.ledger)


@settings(deadline=None)
@given(
    layers=st.none() | st.sets(st.integers(0, 1), min_size=1),
    steps=st.none() | st.sets(st.integers(0, 2), min_size=1),
    positions=st.none() | st.sets(st.integers(0, 5), min_size=1),
    include=st.lists(st.sampled_from(["model.layers.1.*", "*layers*", "a", "b", "c*"]), max_size=2),
    exclude=st.lists(st.sampled_from(["model.layers.1.*", "a", "?", "c*"]), max_size=1),
)
def test_what_is_kept_is_what_the_rule_says(layers, steps, positions, include, exclude):
    names = {layer: f"model.layers.{layer}.attn" for layer in (0, 1)}
    filters = parse_filters(layers, steps, positions, include, exclude)
    alias = {0: "a", 1: "b"}
    _, calls, _ = run()
    wanted = set()
    for call in calls:
        for r, p in zip(call.rows.request, call.rows.positions, strict=True):
            kept = filters.keeps(call.layer, names[call.layer], alias[int(r)]) and filters.keeps_step(
                call.step
            )
            if kept and (positions is None or int(p) in positions):
                wanted.add((call.layer, call.step, alias[int(r)], int(p)))
    options = {"layers": layers, "steps": steps, "rows": positions, "include": include, "exclude": exclude}
    if not wanted:
        with pytest.raises(NothingSelected):
            run(names=names, **options)
        return
    recording, calls, _ = run(names=names, **options)
    who = {request.key: request.alias for request in recording.requests}
    found = {
        (call.layer, call.step, who[call.rows.requests[r]], int(p))
        for call in calls
        for r, p in zip(call.rows.request, call.rows.positions, strict=True)
    }
    assert found == wanted
    assert all(line.complete for line in recording.ledger)


@pytest.mark.parametrize(
    "wrong",
    [{"layers": [-1]}, {"rows": []}, {"include": [""]}, {"max_size_gb": 0}, {"max_size_gb": float("nan")}],
)
def test_filters_that_say_nothing_are_refused(wrong):
    with pytest.raises(UsageError):
        run(**wrong)


def test_a_budget_ends_the_recording_and_not_the_engine(tmp_path):
    path = tmp_path / "x.h5"
    with pytest.warns(CaptureIncomplete, match="budget of 2,000 bytes is used up") as told:
        run(path, max_size_gb=2e-6)
    assert len(told) == 1
    assert verify_trace(path) == []
    with open_trace(path) as trace:
        lines = trace.recording.ledger
        assert len(trace) == 1
    assert [(line.fired, line.recorded, line.filtered) for line in lines] == [(2, 1, 0), (2, 0, 0), (2, 0, 0)]
    assert all(line.cut == "cut: budget of 2,000 bytes" for line in lines)
    assert not any(line.complete for line in lines)


def test_a_description_is_asked_for_only_at_the_end():
    """A step pays for copies; nothing is described while it runs."""
    asked = []
    session = ManualSession(derive=None)

    def capture(launch):
        described = launch.describe
        Session.capture(session, replace(launch, describe=lambda: asked.append(launch.layer) or described()))

    session.capture = capture
    with session.step({"a": [5, 6]}):
        session.attention(layer=3, q=KV[:2], keys=KV[:2], values=KV[:2], scale=0.5)
    assert asked == []
    session.finish()
    assert asked == [3]


def test_other_runs_are_lines_of_their_own():
    session = Session()
    session.other(Tag.PROFILE, expected=4, fired=3)
    handle = session.requests.open("a")
    session.begin({handle: np.array([5])}, expected=0, mode=Mode.PREFILL)
    session.end()
    session.other(Tag.CAPTURE)
    session.other(Tag.CAPTURE)
    lines = session._ledger.lines
    assert [(line.tag, line.step) for line in lines] == [
        (Tag.PROFILE, 0),
        (Tag.NORMAL, 0),
        (Tag.CAPTURE, 0),
        (Tag.CAPTURE, 1),
    ]
    assert session.current == 1


@pytest.mark.parametrize(
    "fields", [{"tag": Tag.WARMUP, "recorded": 1}, {"written": 2, "wanted": 1}, {"left_out": -1}]
)
def test_a_line_that_cannot_be(fields):
    with pytest.raises(InvalidCall):
        StepRecord(**{"step": 0, "expected": 1, "fired": 1, "recorded": 0, "filtered": 0, **fields})


def test_lines_survive_the_file_and_short_ones_are_read(tmp_path):
    from tracekit.model import Recording, Share
    from tracekit.store import write_trace
    from tracekit.store.nouns import parse_recording, recording_to_json

    lines = (
        StepRecord(0, 3, 2, 0, 0, tag=Tag.PROFILE),
        StepRecord(0, 1, 1, 1, 0, "why", Tag.NORMAL, 10, 9, 2),
    )
    share = Share(1, 4, 1, 2, 0, 2, 8)
    write_trace(tmp_path / "x.h5", Recording(ledger=lines, share=share), [dense_call()])
    with open_trace(tmp_path / "x.h5") as trace:
        assert (trace.recording.ledger, trace.recording.share) == (lines, share)
    told = recording_to_json(Recording(ledger=lines[1:]))
    told["ledger"] = [line[:6] for line in told["ledger"]]
    assert parse_recording(told).ledger == (StepRecord(0, 1, 1, 1, 0, "why"),)


@pytest.mark.parametrize("layers", ["12", [0.5], [True], 3, [-1], []], ids=repr)
def test_what_is_no_list_of_numbers_is_refused(layers):
    """Read as int() reads it, 0.5 is layer 0 and the text "12" are the layers 1 and 2."""
    with pytest.raises(UsageError, match="layers is a list of numbers from 0"):
        parse_filters(layers)
