"""What an adapter says of a step becomes a pass: rows, modes and cache versions request by request."""

import numpy as np
import pytest

from tracekit.model import Mode
from tracekit.model.events import GateMode
from tracekit.model.history import Pass, Unproven
from tracekit.recorder.history import Computed
from tracekit.recorder.session import Session


@pytest.fixture
def session():
    return Session()


def begin(session, tokens, spans, **options):
    session.begin(
        {handle: np.asarray(new, np.int64) for handle, new in tokens.items()}, spans=spans, **options
    )
    session.end()


def rows(session):
    requests = {str(r.key): number for number, r in enumerate(session.requests.resolve())}
    entries = session.history.resolve(session.requests.key)
    assert all(isinstance(entry, Pass) for entry in entries)
    return [tuple((requests[row.request], *row[1:]) for row in entry.rows) for entry in entries]


def test_each_request_of_a_step_has_its_own_mode_and_cache_version(session):
    """A mixed batch: a chunk of a prompt, a row that is decoded, and rows that were lost and come again."""
    for prompt_length in (8, 2, 3):
        session.requests.open(prompt_length=prompt_length)
    begin(
        session, {0: [5] * 4, 1: [6, 7], 2: [8, 9, 10]}, {h: Computed(0, n) for h, n in enumerate((4, 2, 3))}
    )
    begin(
        session,
        {0: [5] * 4, 1: [6], 2: []},
        {0: Computed(4, 8), 1: Computed(2, 3, Mode.DECODE), 2: Computed(0, 3, Mode.RECOMPUTE, 1)},
        mode=Mode.RECOMPUTE,
    )
    assert rows(session) == [
        ((0, 0, 4, GateMode.PREFILL, 0), (1, 0, 2, GateMode.PREFILL, 0), (2, 0, 3, GateMode.PREFILL, 0)),
        ((0, 4, 8, GateMode.RECOMPUTE, 0), (1, 2, 3, GateMode.EAGER, 0), (2, 0, 3, GateMode.RECOMPUTE, 1)),
    ]


def test_modes_are_told_by_the_tokens_where_nobody_says_them(session):
    session.requests.open(prompt_length=4)
    session.requests.open(prompt_length=1)
    begin(session, {0: [5, 6], 1: [7]}, {0: Computed(0, 2), 1: Computed(0, 1)})
    begin(session, {0: [7, 8], 1: [9]}, {0: Computed(2, 4), 1: Computed(1, 2)})
    assert [[row[3] for row in each] for each in rows(session)] == [
        [GateMode.PREFILL, GateMode.PREFILL],
        [GateMode.PREFILL, GateMode.EAGER],
    ]


def test_a_request_without_rows_is_in_no_pass(session):
    session.requests.open(prompt_length=2)
    begin(session, {0: [5, 6]}, {0: Computed(0, 2)})
    begin(session, {0: []}, {0: Computed(2, 2)})
    assert len(rows(session)) == 1


def test_a_step_that_says_nothing_ends_the_history(session):
    session.requests.open(prompt_length=2)
    begin(session, {0: [5, 6]}, {0: Computed(0, 2)})
    begin(session, {0: [7]}, None)
    session.requests.resolve()
    told = session.history.resolve(session.requests.key)
    assert told == (Unproven("step 1 does not say which rows it computed"),)


def test_a_history_that_nobody_follows_is_none(session):
    session.requests.open(prompt_length=2)
    begin(session, {0: [5, 6]}, None)
    session.requests.resolve()
    assert session.history.resolve(session.requests.key) is None
