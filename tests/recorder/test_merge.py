"""Merged in logical words: the parts of a job say what one process that did it all would say."""

import re
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tracekit
from tracekit.canonical.heads import HeadShards
from tracekit.cli.main import run
from tracekit.errors import InvalidCall, NothingSelected, UsageError
from tracekit.gate.recorded import Legality, judge
from tracekit.model import (
    Bits,
    Identity,
    KVRows,
    Output,
    Recording,
    Request,
    RequestKey,
    Share,
    StepRecord,
)
from tracekit.model.events import GateMode
from tracekit.model.history import Pass, PassRows
from tracekit.providers.oracle import Oracle
from tracekit.recorder.merge import merge
from tracekit.store import open_trace, verify_trace, write_trace
from tracekit.testing.build import complete, dense_call, record


def whole(heads=4, kv_heads=2, steps=2, seed=0, lengths=(5, 3)):
    """Calls of one layer in some steps, with executed O and LSE."""
    return [
        record(
            dense_call(lengths=lengths, heads=heads, kv_heads=kv_heads, sink=True, step=step, seed=seed),
            Oracle(),
        )
        for step in range(steps)
    ]


def shard(call, heads, rank):
    """The heads of one tensor-parallel process of a call."""

    def some(bits, part):
        return Bits(bits.data[:, part].copy(), bits.dtype)

    q, k = heads.query_heads(rank), heads.key_heads(rank)
    return replace(
        call,
        rank=rank,
        q=some(call.q, q),
        sink=Bits(call.sink.data[q].copy(), call.sink.dtype),
        out=Output(some(call.out.bits, q), call.out.origin),
        lse=Output(some(call.lse.bits, q), call.lse.origin),
        kv={
            key: {f: KVRows(some(rows.keys, k), some(rows.values, k)) for f, rows in families.items()}
            for key, families in call.kv.items()
        },
    )


def write(path, calls, share=None, ledger=None, **around):
    ledger = complete(calls) if ledger is None else ledger
    write_trace(path, Recording(ledger=ledger, share=share, **around), calls, threads=1)
    return path


def tensor_parallel(folder, calls, ranks, kv_heads=2, **around):
    folder.mkdir(exist_ok=True)
    heads = HeadShards(calls[0].num_heads, kv_heads, ranks)
    return [
        write(
            folder / f"rank{rank}.h5",
            [shard(call, heads, rank) for call in calls],
            Share(rank, ranks, tensor=rank, tensor_size=ranks, kv_heads=kv_heads),
            **around,
        )
        for rank in range(ranks)
    ]


def digest(path):
    assert verify_trace(path) == []
    with open_trace(path) as trace:
        return trace.content_digest


@settings(max_examples=6, deadline=None)
@given(ranks=st.sampled_from([1, 2, 4, 8]), seed=st.integers(0, 9), order=st.randoms())
def test_heads_put_together_are_the_call_of_one_process(tmp_path_factory, ranks, seed, order):
    """KV heads are split over two processes, and held twice or four times by more."""
    folder = tmp_path_factory.mktemp("merge")
    calls = whole(heads=8, seed=seed)
    expected = digest(write(folder / "whole.h5", calls))
    paths = tensor_parallel(folder, calls, ranks)
    order.shuffle(paths)

    assert merge(paths, folder / "once.h5").content_digest == expected
    assert merge([folder / "once.h5"], folder / "again.h5").content_digest == expected
    with open_trace(folder / "once.h5") as trace:
        assert all(line.complete for line in trace.recording.ledger)
        assert {head.rank for head in trace.heads} == {0}


@settings(max_examples=6, deadline=None)
@given(
    lengths=st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=3), min_size=1, max_size=4),
    order=st.randoms(),
)
def test_data_parallel_processes_bring_other_requests(tmp_path_factory, lengths, order):
    """Equal prompts in two processes are two requests."""
    folder = tmp_path_factory.mktemp("merge")
    paths = [
        write(folder / f"{n}.h5", whole(lengths=part), Share(n, len(lengths), n, len(lengths)))
        for n, part in enumerate(lengths)
    ]
    first = merge(paths, folder / "a.h5")
    order.shuffle(paths)
    assert merge(paths, folder / "b.h5").content_digest == first.content_digest
    assert first.requests == sum(map(len, lengths))
    assert digest(folder / "a.h5") == first.content_digest
    with open_trace(folder / "a.h5") as trace:
        assert [line.recorded for line in trace.recording.ledger] == [len(lengths)] * 2


def test_a_rank_that_left_nothing_is_in_the_ledger(tmp_path):
    path = write(tmp_path / "0.h5", whole(), Share(0, 2, 0, 2))
    merge([path], tmp_path / "m.h5", lost={1: "it was killed"})
    with open_trace(tmp_path / "m.h5") as trace:
        lines = trace.recording.ledger
    assert [line.cut for line in lines] == ["rank 1 is missing: it was killed"] * 2
    assert not any(line.complete for line in lines)


def test_without_some_heads_no_call_is_whole(tmp_path):
    paths = tensor_parallel(tmp_path, whole(), 2)
    with pytest.raises(NothingSelected, match="no trace of tensor-parallel number 1;"):
        merge(paths[:1], tmp_path / "m.h5")
    assert not (tmp_path / "m.h5").exists()


def test_a_call_that_one_process_lost_is_left_out_and_told(tmp_path):
    calls = whole()
    heads = HeadShards(4, 2, 2)
    paths = tensor_parallel(tmp_path, calls, 2)
    ledger = (StepRecord(0, 1, 1, 1, 0), StepRecord(1, 1, 1, 0, 0, cut="layer 0: the hook failed"))
    share = Share(1, 2, tensor=1, tensor_size=2, kv_heads=2)
    write(paths[1], [shard(calls[0], heads, 1)], share, ledger)
    merge(paths, tmp_path / "m.h5")
    with open_trace(tmp_path / "m.h5") as trace:
        assert [(line.recorded, bool(line.cut)) for line in trace.recording.ledger] == [(1, False), (0, True)]
        assert "rank 1: layer 0: the hook failed" in trace.recording.ledger[1].cut


def test_processes_with_other_layers_are_one(tmp_path):
    calls = whole()
    late = [replace(call, layer=1) for call in calls]
    both = [call for pair in zip(calls, late, strict=True) for call in pair]
    expected = digest(write(tmp_path / "whole.h5", both))
    paths = [write(tmp_path / f"{n}.h5", part, Share(n, 2)) for n, part in enumerate((calls, late))]
    assert merge(paths, tmp_path / "m.h5").content_digest == expected


def changed(call):
    data = call.out.bits.data.copy()
    data[0, 0, 0] ^= 1
    return replace(call, out=Output(Bits(data, call.out.bits.dtype), call.out.origin))


def changed_kv(call):
    """The last KV head of the first request, by one bit."""
    key, families = next(iter(call.kv.items()))
    ((family, rows),) = families.items()
    data = rows.keys.data.copy()
    data[0, -1, 0] ^= 1
    return replace(call, kv={**call.kv, key: {family: replace(rows, keys=Bits(data, rows.keys.dtype))}})


def refusals(tmp_path):
    calls = whole()
    share = Share(0, 2, tensor=0, tensor_size=2, kv_heads=1)
    one = whole(kv_heads=1)
    heads = HeadShards(4, 1, 2)
    left, right = ([shard(call, heads, rank) for call in one] for rank in (0, 1))
    peer = replace(share, rank=1, tensor=1)
    tokens = np.arange(3)
    request = Request(RequestKey.of_prompt(tokens[:0]), tokens, 0)
    other = Request(RequestKey.of_prompt(tokens[:0]), tokens + 1, 0)
    yield "R-MERGE-REPLICA", [(calls, Share(0, 2), {}), ([changed(c) for c in calls], Share(1, 2), {})]
    yield "R-MERGE-SHARE", [(calls, Share(0, 2, 0, 2), {}), (calls, None, {})]
    yield "R-MERGE-SHARE", [(calls, Share(0, 2, 0, 2), {}), (calls, Share(1, 3, 1, 3), {})]
    yield "R-MERGE-SHARE", [(calls, None, {}), ([changed(c) for c in calls], None, {})]
    yield (
        "R-MERGE-IDENTITY",
        [
            (calls, Share(0, 2, 0, 2), {"identity": Identity("a")}),
            (calls, Share(1, 2, 1, 2), {"identity": Identity("b")}),
        ],
    )
    yield (
        "R-MERGE-IDENTITY",
        [
            (calls, Share(0, 2, 0, 2), {"identity": Identity("a", weights_digest="0" * 64)}),
            (calls, Share(1, 2, 1, 2), {"identity": Identity("a", weights_digest="1" * 64)}),
        ],
    )
    yield "C-TP-COPIES", [(left, share, {}), ([changed_kv(c) for c in right], peer, {})]
    yield "R-MERGE-HEADS", [(left, replace(share, kv_heads=0), {}), (right, replace(peer, kv_heads=0), {})]
    yield "R-MERGE-CALL", [(left, share, {}), ([replace(c, lse=None) for c in right], peer, {})]
    ledger = tuple(StepRecord(step, 1, 2, 1, 1) for step in range(2))
    yield "R-MERGE-LEDGER", [(left, share, {}), (right, peer, {"ledger": ledger})]
    yield "R-MERGE-TOKENS", [(left, share, {"requests": (request,)}), (right, peer, {"requests": (other,)})]


@pytest.mark.parametrize("number", range(11))
def test_what_contradicts_itself_is_refused_by_name(tmp_path, number):
    rule, parts = list(refusals(tmp_path))[number]
    paths = [
        write(tmp_path / f"{n}.h5", calls, share, **around) for n, (calls, share, around) in enumerate(parts)
    ]
    with pytest.raises(InvalidCall) as refused:
        merge(paths, tmp_path / "m.h5")
    assert refused.value.rule == rule
    assert not (tmp_path / "m.h5").exists()


def test_a_trace_that_exists_stays(tmp_path):
    path = write(tmp_path / "0.h5", whole())
    with pytest.raises(UsageError, match="exists"):
        tracekit.merge([path], path)
    with pytest.raises(UsageError, match="nothing to merge"):
        tracekit.merge([], tmp_path / "m.h5")


def of(calls, weights=0):
    """A history of their passes."""
    key = calls[0].rows.requests[0]
    rows = (PassRows(str(key), 0, 5, GateMode.TRAINING),)
    return tuple(Pass(call.step, rows, weights) for call in calls)


def test_a_history_on_which_all_parts_agree_is_kept(tmp_path):
    calls = whole(lengths=(5,))
    paths = tensor_parallel(tmp_path, calls, 2, history=of(calls))
    merge(paths, tmp_path / "m.h5")
    with open_trace(tmp_path / "m.h5") as trace:
        assert trace.recording.history == of(calls)
        legal = judge(trace.recording, [trace.call(index) for index in range(len(trace))])
    assert legal.status is Legality.LEGAL, legal


def test_why_a_merged_trace_has_no_history_is_told(tmp_path, capsys):
    calls = whole(lengths=(5,))
    paths = tensor_parallel(tmp_path, calls, 2, history=of(calls))
    for name, history, reason in (
        ("other", of(calls, 1), r"rank0.h5 \(rank 0\) and rank1.h5 \(rank 1\) tell different ones"),
        ("none", None, r"rank1.h5 \(rank 1\) has none"),
    ):
        paths[1] = tensor_parallel(tmp_path, calls, 2, history=history)[1]
        paths[0] = tensor_parallel(tmp_path / "again", calls, 2, history=of(calls))[0]
        merge(paths, tmp_path / f"{name}.h5")
        judgement = tracekit.history(tmp_path / f"{name}.h5")
        assert judgement.status is Legality.UNKNOWN
        assert re.search(reason, judgement.reason)
        assert run(["inspect", str(tmp_path / f"{name}.h5")]) == 0
        assert "nobody knows whether it was legal: rank" in " ".join(capsys.readouterr().out.split())
    data = [write(tmp_path / f"d{n}.h5", calls, Share(n, 2, n, 2), history=of(calls)) for n in range(2)]
    merge(data, tmp_path / "d.h5")
    assert "data-parallel process has a history of its own" in tracekit.history(tmp_path / "d.h5").reason


def test_different_models_are_told_apart_in_one_sentence(tmp_path):
    paths = [
        write(
            tmp_path / f"{n}.h5",
            whole(),
            Share(n, 2, n, 2),
            identity=Identity(name, weights_digest=name * 64),
        )
        for n, name in enumerate("ab")
    ]
    with pytest.raises(
        InvalidCall, match="of different models: model a and b and weights_digest aaa"
    ) as told:
        merge(paths, tmp_path / "m.h5")
    assert len(str(told.value)) < 250


def parts_that_lack(folder):
    tensor = tensor_parallel(folder, whole(steps=3), 2)
    calls = [shard(call, HeadShards(4, 2, 2), 1) for call in whole()]
    short = write(folder / "short.h5", calls, Share(1, 2, tensor=1, tensor_size=2, kv_heads=2))
    data = [write(folder / f"d{n}.h5", whole(lengths=(n + 2,)), Share(n, 4, n, 4)) for n in range(3)]
    silent = write(folder / "silent.h5", whole(), ledger=())
    return {
        "3 of 4 ranks": (data, "rank 3 is missing"),
        "unequal steps": ([tensor[0], short], "lacks calls of step 2"),
        "no ledger": ([silent], "nobody knows whether calls are missing"),
    }


@pytest.mark.parametrize("name", ["3 of 4 ranks", "unequal steps", "no ledger"])
def test_what_a_merged_trace_lacks_is_said_and_ends_with_3(tmp_path, capsys, name):
    paths, words = parts_that_lack(tmp_path)[name]
    assert run(["merge", *map(str, paths), "-o", str(tmp_path / "m.h5")]) == 3
    assert words in capsys.readouterr().err
    assert verify_trace(tmp_path / "m.h5") == []


@pytest.mark.parametrize("share", [None, Share(0, 4, 0, 4)])
def test_a_trace_given_twice_is_refused(tmp_path, capsys, share):
    """By one name or as a copy: merged in silence it would look like two processes that agree."""
    one = write(tmp_path / "one.h5", whole(), share)
    copy = tmp_path / "copy.h5"
    copy.write_bytes(one.read_bytes())
    for other, words in ((one, "is given twice"), (copy, f"and {one} are one trace")):
        assert run(["merge", str(one), str(other), "-o", str(tmp_path / "m.h5")]) == 2
        told = capsys.readouterr().err
        assert told == f"tracekit: {other} {words}; give the trace of each process once. Nothing is merged.\n"
        assert not (tmp_path / "m.h5").exists()


@pytest.mark.parametrize("keep", [0, 20, 300, -1])
def test_a_part_that_is_cut_or_not_yet_written_is_refused(tmp_path, capsys, keep):
    paths = tensor_parallel(tmp_path, whole(), 2)
    data = paths[1].read_bytes()
    paths[1].write_bytes(data[:keep])
    assert run(["merge", *map(str, paths), "-o", str(tmp_path / "m.h5")]) == 2
    told = capsys.readouterr().err
    assert told.startswith(f"tracekit: {paths[1]}: ")
    assert told.count("\n") == 1
    assert not (tmp_path / "m.h5").exists()
    assert paths[1].read_bytes() == data[:keep]


def test_a_folder_is_no_part(tmp_path, capsys):
    assert run(["merge", str(tmp_path), "-o", str(tmp_path / "m.h5")]) == 2
    assert "is a folder, not a trace" in capsys.readouterr().err
