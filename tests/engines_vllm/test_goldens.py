"""The committed goldens of vLLM on vLLM's own operator, without an engine."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import tracekit
from tracekit.model import Bits, KVFamily, Mode
from tracekit.providers import vllm_dsv4
from tracekit.providers.indexers import IndexerLaunch
from tracekit.providers.vllm_cpu import VllmCpu
from tracekit.providers.vllm_dsv4_indexer import VllmDsv4Indexer
from tracekit.verdict import Status

OWN = sorted((Path(__file__).parents[2] / "traces").glob("vllm-*.cpu.h5"))


def calls(name):
    with tracekit.open(next(path for path in OWN if name in path.name)) as trace:
        return [call for call in trace if call.layer == 0]


def test_qwen3_holds_what_moves_rows_about():
    """Chunked prefill, a decode beside a prefill, a prefix hit, a preemption."""
    first, chunked, mixed = {}, False, False
    for call in calls("qwen3"):
        counts = [int((call.rows.request == i).sum()) for i in range(len(call.rows.requests))]
        mixed |= min(counts) == 1 < max(counts)
        for index, key in enumerate(call.rows.requests):
            start = int(call.rows.positions[call.rows.request == index][0])
            chunked |= counts[index] > 1 and start > 0 and first.get(key) == 0
            first.setdefault(key, start)
            assert call.kv[key][KVFamily.DENSE].first == 0
    assert (chunked, mixed) == (True, True)
    assert sorted(set(first.values())) == [0, 32]
    assert [call.mode for call in calls("qwen3")].count(Mode.RECOMPUTE) == 1


def test_gpt_oss_holds_sinks_and_pages_that_were_used_again():
    call = calls("gpt-oss")[-1]
    assert call.sink is not None
    assert call.conventions.window == 16
    assert any(len(set(table.tolist())) < table.size for table in call.launch.block_tables)


@pytest.mark.parametrize("path", OWN, ids=lambda path: path.stem)
def test_recorded_is_held_where_the_same_build_runs(path):
    with tracekit.open(path) as trace:
        recorded = trace.call(0).provenance.executed
        here = VllmCpu().identity_of(trace.call(0))
    report = tracekit.replay(path, provider="vllm-cpu")
    if recorded.differences(here):
        assert report.find("recorded").status is Status.NOT_RUN
    else:
        assert {verdict.claim for verdict in report.verdicts} == VllmCpu().advertised()
        assert {verdict.status for verdict in report.verdicts} == {Status.HELD}


@pytest.mark.parametrize("path", OWN, ids=lambda path: path.stem)
def test_without_split_kv_the_kernel_keeps_its_promises(path):
    """The goldens are of split-KV, so `recorded` says nothing of this kernel."""
    report = tracekit.replay(path, provider="vllm-cpu-nosplit", layers=[0])
    found = {verdict.claim: verdict.status for verdict in report.verdicts}
    assert found.pop("recorded") is Status.NOT_APPLICABLE
    assert set(found.values()) == {Status.HELD}


INDEXER = Path(__file__).parents[2] / "traces" / "deepseek-v4-indexer.vllm-cpu.h5"
needs_bf16 = pytest.mark.skipif(
    not torch.cpu._is_avx512_bf16_supported(), reason="this processor has no avx512_bf16"
)


@needs_bf16
def test_the_launches_around_an_indexer_come_again():
    """Decodes that read the rows that their indexer chose."""
    with tracekit.open(INDEXER) as trace:
        other = trace.call(0).provenance.executed.differences(vllm_dsv4.executed())
    report = tracekit.replay(INDEXER, provider="vllm-dsv4-cpu", claims=["recorded"])
    (verdict,) = (v for v in report.verdicts if v.provider == "vllm-dsv4-cpu")
    assert verdict.status is (Status.NOT_RUN if other else Status.HELD)
    assert other or (verdict.control, verdict.calls) == ("twin-recorded refuted", 2)


@needs_bf16
def test_the_indexer_chooses_and_scores_again_as_recorded():
    """Its own operators, from the file alone; a query with one other code scores otherwise."""
    with tracekit.open(INDEXER) as trace:
        calls = list(trace.indexer_calls())
    assert calls
    for call in calls:
        if call.provenance.executed.differences(VllmDsv4Indexer().identity()):
            continue
        (again,) = VllmDsv4Indexer().run(IndexerLaunch((call,))).chosen
        assert np.array_equal(again.top_k.ids, call.top_k.ids)
        assert again.scores.same(call.scores)
        data = call.query.data.copy()
        data[:, 0, 0] ^= 0x8000
        other = replace(call, query=Bits(data, call.query.dtype))
        (wrong,) = VllmDsv4Indexer().run(IndexerLaunch((other,))).chosen
        assert not wrong.scores.same(call.scores)
