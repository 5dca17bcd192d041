"""One test a rule: the smallest noun that breaks it and nothing else."""

from dataclasses import replace

import numpy as np
import pytest

from tracekit.errors import InvalidCall
from tracekit.model import (
    AttentionCall,
    Bits,
    Conventions,
    DType,
    ExecutedIdentity,
    Gradients,
    IndexerCall,
    KVFamily,
    KVRows,
    LaunchPlan,
    Lists,
    Mode,
    Origin,
    Output,
    Provenance,
    Ranges,
    Request,
    RequestKey,
    Rows,
    Selection,
    StepRecord,
    scale_to_bits,
)

KEY, OTHER = RequestKey.of_prompt([1, 2, 3]), RequestKey.of_prompt([4])


def zeros(*shape: int, dtype: DType = DType.BFLOAT16) -> Bits:
    return Bits(np.zeros(shape, dtype.container), dtype)


def rows(count: int = 3, key: RequestKey = KEY) -> Rows:
    return Rows((key,), np.zeros(count), np.arange(count), np.arange(count))


def call(**changes) -> AttentionCall:
    whole = AttentionCall(
        layer=0,
        step=0,
        mode=Mode.PREFILL,
        rows=rows(),
        q=zeros(3, 4, 8),
        kv={KEY: {KVFamily.DENSE: KVRows(zeros(3, 2, 8), zeros(3, 2, 8))}},
        sink=None,
        selection=Selection({KVFamily.DENSE: Ranges(np.zeros(3), np.arange(1, 4))}),
        conventions=Conventions(scale_to_bits(0.25)),
        provenance=Provenance("test", "test", ExecutedIdentity("test")),
    )
    return replace(whole, **changes)


def dense(part: Ranges | Lists) -> Selection:
    return Selection({KVFamily.DENSE: part})


BROKEN = {
    "M-REQUEST-KEY": lambda: RequestKey("xyz"),
    "M-ROWS-SHAPE": lambda: Rows((KEY,), np.zeros(2), np.arange(3), np.arange(3)),
    "M-ROWS-REQUEST": lambda: Rows((KEY,), np.ones(1), np.zeros(1), np.zeros(1)),
    "M-ROWS-POSITION": lambda: Rows((KEY,), np.zeros(1), np.array([-1]), np.zeros(1)),
    "M-ROWS-DUPLICATE": lambda: Rows((KEY,), np.zeros(2), np.array([7, 7]), np.zeros(2)),
    "M-KV-SHAPE": lambda: KVRows(zeros(3, 2, 8), zeros(4, 2, 8)),
    "M-KV-DTYPE": lambda: KVRows(zeros(3, 2, 8), zeros(3, 2, 8, dtype=DType.FLOAT16)),
    "M-KV-FIRST": lambda: KVRows(zeros(3, 2, 8), None, first=-1),
    "M-SEL-SHAPE": lambda: Ranges(np.zeros((2, 2)), np.zeros(2)),
    "M-SEL-RANGE": lambda: Ranges(np.array([-1]), np.array([1])),
    "M-SEL-OFFSETS": lambda: Lists(np.arange(3), np.array([0, 2])),
    "M-SEL-NEGATIVE": lambda: Lists(np.array([-1]), np.array([0, 1])),
    "M-SEL-DUPLICATE": lambda: Lists(np.array([5, 1, 5]), np.array([0, 3])),
    "M-SEL-EMPTY": lambda: Selection({}),
    "M-SEL-ROWS": lambda: Selection(
        {KVFamily.C4: Ranges(np.zeros(1), np.zeros(1)), KVFamily.RECENT: Ranges(np.zeros(2), np.zeros(2))}
    ),
    "M-SEL-OUTSIDE": lambda: call(
        rows=Rows((KEY,), np.zeros(3), np.arange(9, 12), np.arange(3)),
        selection=dense(Ranges(np.zeros(3), np.arange(2, 5))),
    ),
    "M-SEL-CAUSAL": lambda: call(selection=dense(Ranges(np.zeros(3), np.array([2, 2, 3])))),
    "M-CONV-SCALE": lambda: Conventions(scale_to_bits(-1.0)),
    "M-CONV-WINDOW": lambda: Conventions(scale_to_bits(1.0), window=0),
    "M-CALL-SHAPE": lambda: call(q=zeros(4, 4, 8)),
    "M-CALL-DTYPE": lambda: call(q=zeros(3, 4, 8, dtype=DType.FLOAT16)),
    "M-CALL-HEADS": lambda: call(q=zeros(3, 3, 8)),
    "M-CALL-KV": lambda: call(rows=rows(key=OTHER)),
    "M-CALL-SINK": lambda: call(sink=zeros(4)),
    "M-CALL-OUT": lambda: call(out=Output(zeros(3, 4, 9), Origin.EXECUTED)),
    "M-CALL-LSE": lambda: call(lse=Output(zeros(3, 4), Origin.DERIVED)),
    "M-CALL-NUMBER": lambda: call(step=-1),
    "M-CALL-GRADS": lambda: call(grads=Gradients(zeros(3, 4, 9))),
    "M-SEL-WINDOW": lambda: call(conventions=Conventions(scale_to_bits(0.25), window=2)),
    "M-LAUNCH-SLOTS": lambda: LaunchPlan("k", np.array([0, 0]), 4),
    "M-LAUNCH-PAGES": lambda: paged([3, -1]),
    "M-LAUNCH-SEQUENCES": lambda: packed([0, 3, 2]),
    "M-LEDGER": lambda: StepRecord(0, 2, 2, 2, 1),
    "M-REQUEST": lambda: Request(KEY, np.array([1, 2, 3]), 2),
    "M-INDEX-SHAPE": lambda: indexer(weights=zeros(3, 5)),
    "M-INDEX-K": lambda: indexer(k=1),
}


def paged(table, dtype=np.int32, page_size=16, tables=1) -> LaunchPlan:
    return LaunchPlan(
        "k", np.arange(3), 4, page_size=page_size, block_tables=(np.array(table, dtype),) * tables
    )


def packed(starts, dtype=np.int32) -> LaunchPlan:
    return LaunchPlan("k", np.arange(3), 4, cu_seqlens=np.array(starts, dtype))


def grads(**changes) -> Gradients:
    whole = Gradients(
        zeros(3, 4, 8),
        zeros(3, 4, 8, dtype=DType.FLOAT32),
        {KEY: {KVFamily.DENSE: KVRows(zeros(3, 2, 8), zeros(3, 2, 8))}},
        zeros(4, dtype=DType.FLOAT32),
    )
    return replace(whole, **changes)


MORE = [
    ("M-CALL-NUMBER", lambda: call(layer=-1)),
    ("M-CALL-NUMBER", lambda: call(rank=-1)),
    ("M-CALL-GRADS", lambda: call(grads=grads(d_out=zeros(3, 4, 8, dtype=DType.FLOAT8_E5M2)))),
    ("M-CALL-GRADS", lambda: call(grads=grads(d_q=zeros(2, 4, 8)))),
    ("M-CALL-GRADS", lambda: call(grads=grads(d_sink=zeros(4)))),
    ("M-CALL-GRADS", lambda: call(grads=grads(d_sink=zeros(5, dtype=DType.FLOAT32)))),
    ("M-CALL-GRADS", lambda: call(grads=grads(d_kv={OTHER: grads().d_kv[KEY]}))),
    ("M-CALL-GRADS", lambda: call(grads=grads(d_kv={KEY: {KVFamily.DENSE: KVRows(zeros(2, 2, 8), None)}}))),
    ("M-SEL-WINDOW", lambda: call(
        conventions=Conventions(scale_to_bits(0.25), window=2),
        selection=dense(Lists.of([np.array([0]), np.array([1, 0]), np.array([2, 0])])),
    )),
    ("M-LAUNCH-SLOTS", lambda: LaunchPlan("k", np.arange(3), 4, head_padding=-1)),
    ("M-LAUNCH-PAGES", lambda: paged([3, 1], np.int64)),
    ("M-LAUNCH-PAGES", lambda: paged([[3, 1]])),
    ("M-LAUNCH-PAGES", lambda: paged([3, 1], page_size=None)),
    ("M-LAUNCH-PAGES", lambda: paged([3, 1], page_size=0)),
    ("M-LAUNCH-PAGES", lambda: call(launch=paged([3, 1], tables=2))),
    ("M-LAUNCH-SEQUENCES", lambda: packed([0, 3], np.int64)),
    ("M-LAUNCH-SEQUENCES", lambda: packed([1, 3])),
    ("M-LAUNCH-SEQUENCES", lambda: packed([0, 5])),
    ("M-LAUNCH-SEQUENCES", lambda: call(launch=packed([0, 1, 3]))),
    ("M-LEDGER", lambda: StepRecord(-1, 0, 0, 0, 0)),
    ("M-LEDGER", lambda: StepRecord(0, 2, 2, -1, 0)),
]  # fmt: skip


@pytest.mark.parametrize(("rule", "broken"), MORE)
def test_each_part_of_a_rule(rule, broken):
    with pytest.raises(InvalidCall) as caught:
        broken()
    assert caught.value.rule == rule


def indexer(**changes) -> IndexerCall:
    whole = IndexerCall(
        layer=0,
        step=0,
        rows=rows(),
        query=zeros(3, 2, 8),
        weights=zeros(3, 2),
        keys={KEY: zeros(4, 8)},
        top_k=Lists.of([np.array([0]), np.array([1, 0]), np.array([2])]),
        provenance=Provenance("test", "test", ExecutedIdentity("test")),
        k=2,
        family=KVFamily.DENSE,
    )
    return replace(whole, **changes)


@pytest.mark.parametrize("rule", BROKEN)
def test_broken_noun_is_refused_by_its_rule(rule):
    with pytest.raises(InvalidCall) as caught:
        BROKEN[rule]()
    assert caught.value.rule == rule
    assert isinstance(caught.value, ValueError)


def test_the_sound_nouns_are_not_refused():
    assert call().num_rows == 3
    assert call(grads=grads(), launch=paged([3, 1])).grads is not None
    assert call(launch=packed([0, 3]), conventions=Conventions(scale_to_bits(0.25), window=3)).num_rows == 3
    assert StepRecord(0, 2, 3, 2, 1).step == 0
    assert indexer().top_k.rows == 3


def test_a_list_past_what_is_visible_names_row_and_family():
    part = Lists.of([np.array([0]), np.array([0, 2]), np.array([1])])
    with pytest.raises(InvalidCall) as caught:
        call(selection=dense(part))
    assert caught.value.rule == "M-SEL-CAUSAL"
    assert (caught.value.fields["position"], caught.value.fields["family"]) == (1, "dense")


@pytest.mark.parametrize(
    ("family", "position", "count"),
    [(KVFamily.C4, 2, 0), (KVFamily.C4, 3, 1), (KVFamily.C128, 126, 0), (KVFamily.C128, 127, 1)],
)
def test_compressed_rows_are_visible_when_complete(family, position, count):
    assert family.visible(position) == count


def test_take_moves_rows_and_leaves_kv():
    whole = call()
    part = whole.take(np.array([2, 0]))
    assert [row.position for row in part.rows.ids] == [2, 0]
    assert part.selection.families[KVFamily.DENSE].hi.tolist() == [3, 1]
    assert part.kv[KEY][KVFamily.DENSE] is whole.kv[KEY][KVFamily.DENSE]


def test_take_drops_requests_without_rows_in_order_of_appearance():
    both = Rows((KEY, OTHER), np.array([0, 1, 0]), np.array([0, 0, 1]), np.array([1, 4, 2]))
    assert both.take(np.array([1, 2])).requests == (OTHER, KEY)
    assert both.take(np.array([2])).requests == (KEY,)


def test_visible_kv_holds_what_a_shorter_run_would_hold():
    part = call().take(np.array([0])).visible_kv()
    assert part.kv[KEY][KVFamily.DENSE].count == 1


def test_request_keys_come_from_content_and_round_trip():
    assert RequestKey.of_prompt([1, 2, 3]) == KEY != RequestKey.of_prompt([1, 2])
    assert RequestKey.parse(str(KEY)) == KEY
    with pytest.raises(InvalidCall):
        RequestKey.parse("nonsense")
