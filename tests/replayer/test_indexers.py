"""Claims about indexers, on the committed golden of DeepSeek-V4."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import tracekit
from tracekit.controls.indexers import FirstChunkOnly, IndexerSlots, UnstableTies
from tracekit.errors import UsageError
from tracekit.model import Bits, Lists
from tracekit.providers.indexer_ref import IndexerRef
from tracekit.providers.indexers import IndexerLaunch, IndexerProvider, create
from tracekit.relations.indexers import claims
from tracekit.verdict import Status

GOLDEN = Path(__file__).parents[2] / "traces" / "deepseek-v4.eager.h5"


@pytest.fixture(scope="module")
def call():
    """The prefill: 126 rows, up to 31 keys, 8 chosen."""
    with tracekit.open(GOLDEN) as trace:
        return trace.indexer_call(0)


def test_the_reference_keeps_its_promises_and_each_twin_is_refuted():
    report = tracekit.replay(GOLDEN, provider="indexer-ref")

    assert report.exit_code == 0
    assert {v.claim: v.status for v in report.verdicts} == dict.fromkeys(
        ("rows", "chunks", "ties"), Status.HELD
    )
    assert {v.claim: v.control for v in report.verdicts} == {
        "rows": "twin-indexer-rows refuted",
        "chunks": "twin-indexer-chunks refuted",
        "ties": "twin-ties refuted",
    }


def test_torch_settles_ties_by_the_size_of_the_launch():
    """`torch.topk` says that ties may go either way, and they do: a row alone chooses other keys."""
    report = tracekit.replay(GOLDEN, provider="transformers-indexer", claims=["ties"])

    assert report.exit_code == 1
    (verdict,) = report.verdicts
    assert verdict.status is Status.REFUTED
    assert verdict.first.tensor == "top_k"
    assert "--calls 1" in verdict.next_command


def test_nothing_is_judged_that_was_not_promised():
    report = tracekit.replay(GOLDEN, provider="transformers-indexer", claims=["rows"], layers=[1], probe=True)
    assert [v.status for v in report.verdicts] == [Status.HELD]  # named, with the kernel: judged
    probed = tracekit.replay(GOLDEN, provider="transformers-indexer", probe=True)
    assert {v.status for v in probed.verdicts} <= {Status.OBSERVED_SAME, Status.OBSERVED_VARIES}
    assert probed.exit_code == 0


def test_a_replay_without_names_judges_the_reference_too():
    report = tracekit.replay(GOLDEN, claims=["ties"])
    assert {v.provider for v in report.verdicts if v.status is Status.HELD} == {"indexer-ref"}


def test_filters_reach_the_indexers():
    report = tracekit.replay(GOLDEN, provider="indexer-ref", claims=["ties"], calls=[1])
    assert [v.calls for v in report.verdicts] == [1]


def test_an_unknown_claim_is_still_refused():
    with pytest.raises(UsageError, match="no claim 'tie'"):
        tracekit.replay(GOLDEN, claims=["tie"])


@pytest.mark.parametrize("claim", ["rows", "chunks", "ties"])
def test_variants_hold_every_row_once_and_the_same_numbers(call, claim):
    relation = claims()[claim]()
    for subject in relation.subjects(call):
        for variant in relation.variants(subject, 0):
            rows = [row for part in variant.launch.calls for row in part.rows.ids]
            assert sorted(rows) == sorted(subject.rows.ids), variant.name
            for part in variant.launch.calls:
                place = [subject.rows.ids.index(row) for row in part.rows.ids]
                assert part.query.same(subject.query.take(np.array(place)))
                (keys,) = part.keys.values()
                (whole,) = subject.keys.values()
                seen = int(part.visible.max())
                assert keys.part(slice(seen)).same(whole.part(slice(seen)))


@pytest.mark.parametrize("twin", [UnstableTies, FirstChunkOnly, IndexerSlots])
def test_a_twin_is_right_on_its_first_launch(call, twin):
    (right,), (wrong,) = (made.run(IndexerLaunch((call,))).chosen for made in (IndexerRef(), twin()))
    assert right.top_k.ids.tolist() == wrong.top_k.ids.tolist()
    assert right.scores.same(wrong.scores)


def test_the_reference_gives_ties_to_the_lowest_id(call):
    """Public bugs (SGLang #31115): 20 of 32 scores are exact zeros, and 16 are chosen."""
    row = call.take(np.array([125]))
    data = np.zeros((31, 16), np.float32)
    data[[3, 9, 30], 0] = (2.0, 5.0, 5.0)
    (key,) = row.keys
    query = np.zeros((1, 2, 16), np.float32)
    query[..., 0] = 1.0
    planted = replace(
        row,
        query=Bits.from_float32(query, row.query.dtype),
        weights=Bits.from_float32(np.ones((1, 2), np.float32), row.weights.dtype),
        keys={key: Bits.from_float32(data, row.query.dtype)},
        top_k=Lists.of([np.zeros(0, np.int64)]),
        scores=None,
    )
    (chosen,) = IndexerRef().run(IndexerLaunch((planted,))).chosen
    assert chosen.top_k.ids.tolist() == [9, 30, 3, 0, 1, 2, 4, 5]


@pytest.mark.parametrize("name", ["indexer-ref", "transformers-indexer"])
def test_they_are_indexers(name):
    assert isinstance(create(name), IndexerProvider)
