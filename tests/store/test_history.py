"""A history as bytes: every entry comes back as it was, and no two spellings are read as one entry."""

import json
from dataclasses import fields

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tracekit.errors import TraceCorrupt
from tracekit.model import KVFamily
from tracekit.model.events import GateMode, GraphUse
from tracekit.model.history import Pass, PassBackward, PassRows
from tracekit.store.history import KINDS, history_to_bytes, parse_history

numbers = st.integers(0, 2**40)
texts = st.text("ab-0", max_size=4)
lists = st.lists(numbers, max_size=3).map(tuple)
OF_TYPE = {
    int: numbers,
    str: texts,
    bool: st.booleans(),
    int | None: st.none() | numbers,
    KVFamily: st.sampled_from(KVFamily),
    KVFamily | None: st.none() | st.sampled_from(KVFamily),
    GraphUse: st.builds(GraphUse, texts, lists, numbers),
    tuple[int, ...]: lists,
    tuple[PassRows, ...]: st.lists(
        st.builds(PassRows, texts, numbers, numbers, st.sampled_from(GateMode), numbers), max_size=2
    ).map(tuple),
}
entries = st.sampled_from(sorted(KINDS)).flatmap(
    lambda name: st.builds(KINDS[name], *(OF_TYPE[field.type] for field in fields(KINDS[name])))
)


@settings(deadline=None)
@given(st.lists(entries, max_size=4).map(tuple))
def test_every_entry_comes_back(history):
    assert parse_history(history_to_bytes(history)) == history


def test_a_pass_of_all_layers_is_written_as_before_layers_were_named():
    rows = (PassRows("a", 0, 2, GateMode.TRAINING),)
    assert json.loads(history_to_bytes((Pass(3, rows),))) == [
        ["pass", 3, [["a", 0, 2, "training", 0]], 0, False]
    ]
    assert json.loads(history_to_bytes((Pass(3, rows, owing=(1,)),)))[0][5:] == [[], [1]]


@pytest.mark.parametrize(
    "line",
    [
        ["pass", 0, [], 0],
        ["pass", 0, [], 0, False, []],
        ["pass", 0, [], 0, False, [1], []],
        ["pass", 0, [], 0, False, [], [1], []],
        ["pass", 0, [], 0, False, ["1"]],
        ["backward", 0, 1, "k", 0, False],
        ["backward", 0, [1], 2, 0, False],
        ["backward", 0, [1], "k", 0, 1],
        ["backward", 0, [1], "k", 0],
    ],
)
def test_an_entry_that_no_writer_writes_is_refused(line):
    with pytest.raises(TraceCorrupt) as refused:
        parse_history(json.dumps([line], separators=(",", ":")).encode())
    assert refused.value.rule == "E-15"


def test_gradients_name_their_launch():
    entry = PassBackward(4, (1, 0), "kernel", 2, True)
    assert json.loads(history_to_bytes((entry,))) == [["backward", 4, [1, 0], "kernel", 2, True]]
