"""`vllm-cpu` runs vLLM's own operator from the trace alone; no engine is asked."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import vllm.envs

import tracekit
from tests.engines_vllm.tiny_engine import dense
from tracekit.engines import tiny
from tracekit.errors import InvalidCall, Unsupported
from tracekit.model import Bits, DType
from tracekit.providers import vllm_cpu
from tracekit.providers.base import Execution, Launch, Provider
from tracekit.providers.placement import Layout, Padding, Placement
from tracekit.providers.vllm_cpu import VllmCpu, VllmCpuNoSplit
from tracekit.providers.vllm_cpu_cache import decode, encode
from tracekit.providers.vllm_cpu_ops import NO_SPLIT, SPLIT, chosen_isa, operators
from tracekit.providers.vllm_cpu_packing import packing
from tracekit.recorder.api import record
from tracekit.replayer import replay
from tracekit.testing import MemoryTrace, ProviderSuite, dense_call
from tracekit.testing import record as in_memory
from tracekit.verdict import Status


class TestVllmCpu(ProviderSuite):
    def provider(self) -> Provider:
        return VllmCpu()

    def calls(self):
        """The calls of the suite, with heads of a size that vLLM takes."""
        return [
            *(
                dense_call(dtype=dtype, lengths=(7, 4), head_dim=32, seed=1)
                for dtype in (DType.BFLOAT16, DType.FLOAT16, DType.FLOAT32)
            ),
            dense_call(lengths=(9, 5, 200), new=(1, 1, 1), head_dim=64, seed=2),
            dense_call(lengths=(40,), window=4, head_dim=80, seed=3),
            dense_call(lengths=(6,), heads=2, kv_heads=2, head_dim=32, sink=True, seed=4),
            *super().calls(),
        ]


class TestVllmCpuNoSplit(TestVllmCpu):
    def provider(self) -> Provider:
        return VllmCpuNoSplit()


def rerun(calls, provider):
    for call in calls:
        answer = provider.run(Launch((call,)))
        assert answer.tensors[0].out.same(call.out.bits), (call.layer, call.step)
        assert answer.executed == call.provenance.executed == provider.identity_of(call)


@pytest.mark.parametrize("name", ["qwen3", "gpt_oss"])
def test_the_recorded_launch_gives_the_recorded_bits(name, request, run, prompt):
    """Chunks, mixed batches, decode past the window; the plan is needed for none of it but held to."""
    got = run(request.getfixturevalue(name), [prompt(100, 1), prompt(7, 2), prompt(300, 3)], 4)
    assert {call.provenance.executed.kernel for call in got.calls} == {SPLIT}
    rerun(got.calls, VllmCpu())


def test_recorded_is_held_from_the_file_alone(qwen3, prompt, tmp_path):
    from tests.engines_vllm.tiny_engine import generate

    path = tmp_path / "run.h5"
    with record(path, engine="vllm", llm=qwen3):
        generate(qwen3, [prompt(70, 1), prompt(7, 2)], 3)
    assert tracekit.verify(path) == []
    report = tracekit.replay(path, provider="vllm-cpu", claims=["recorded", "rerun"])
    assert report.status is Status.HELD


def test_without_split_kv_the_batch_claims_are_held(gpt_oss, prompt, tmp_path, monkeypatch):
    from tests.engines_vllm.tiny_engine import generate

    monkeypatch.setattr(vllm.envs, "VLLM_CPU_ATTN_SPLIT_KV", False)  # it reads the environment once
    gpt_oss.reset_prefix_cache()
    path = tmp_path / "run.h5"
    with record(path, engine="vllm", llm=gpt_oss):
        generate(gpt_oss, [prompt(150, 1), prompt(7, 2)], 3)
    with tracekit.open(path) as trace:
        assert {call.provenance.executed.kernel for call in trace} == {NO_SPLIT}
    report = tracekit.replay(path, provider="vllm-cpu-nosplit", layers=[0])
    held = {verdict.claim for verdict in report.verdicts if verdict.status is Status.HELD}
    assert held >= {
        "recorded",
        "rerun",
        "threads",
        "requests",
        "rows",
        "solo",
        "subbatch",
        "chunks",
        "decode",
        "page-ids",
        "page-size",
        "layout",
        "padding",
    }
    assert report.status is Status.HELD


def test_an_fp8_cache_is_recorded_as_exact_values_and_its_bytes(qwen3_fp8, run, prompt):
    got = run(qwen3_fp8, [prompt(70, 1), prompt(9, 2)], 3)

    assert got.session.problems == []
    for call in got.calls:
        assert call.launch.scalars["kv_dtype"] == "fp8_e4m3"
        stored = call.launch.arrays["k_storage"]
        exact = Bits(stored, DType.FLOAT8_E4M3FN).to_float32()
        rows = np.concatenate([dense(call, i).keys.to_float32() for i in range(len(call.rows.requests))])
        assert np.array_equal(rows, exact)
    rerun(got.calls, VllmCpu())
    fresh = VllmCpu().run(Launch((replace(got.calls[0], launch=None),)))
    assert fresh.tensors[0].out.same(got.calls[0].out.bits)


@pytest.mark.parametrize("kind", [DType.FLOAT8_E4M3FN, DType.FLOAT8_E5M2])
@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_fp8_values_are_exact_or_refused(kind, scale):
    codes = np.arange(256, dtype=np.uint8)
    finite = codes[np.isfinite(Bits(codes, kind).to_float32())]
    values = decode(finite, kind, scale, DType.BFLOAT16)
    assert np.array_equal(encode(values, kind, scale), finite)
    assert decode(finite, kind, 0.1, DType.BFLOAT16) is None
    with pytest.raises(Unsupported):
        encode(Bits.from_float32([1.0625 * 3.14159], DType.BFLOAT16), kind, scale)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_packing_is_what_the_writer_stores(dtype):
    """Random rows through vLLM's writer, read back through the order that was found with coded pages."""
    page, heads, dim = 32, 2, 64
    isa = chosen_isa(dtype, page, dim)
    rows = torch.randn(2, page, heads, dim, dtype=dtype)
    cache = torch.zeros(2, heads, 2 * page, dim, dtype=dtype)
    keys, values = cache.chunk(2, dim=2)
    flat = rows.view(2 * page, heads, dim)
    operators().cpu_attn_reshape_and_cache(
        flat, flat.flip(0).contiguous(), keys, values, torch.arange(2 * page), isa, 1.0, 1.0, "auto"
    )
    words = torch.int16 if dtype is torch.bfloat16 else torch.int32
    stored = cache.view(words).numpy().reshape(2, heads, -1)
    order = packing(isa, dtype, "auto", page, dim)
    k, v = order.unpack(stored, dim)
    want = flat.view(words).numpy()
    assert np.array_equal(k.transpose(0, 2, 1, 3).reshape(-1, heads, dim), want)
    assert np.array_equal(v.transpose(0, 2, 1, 3).reshape(-1, heads, dim), want[::-1])
    assert np.array_equal(order.pack(k, v), stored)


def test_split_kv_depends_on_the_batch_or_the_threads():
    """A long row is cut where the plan has threads to spare (docs/findings.md)."""
    call = dense_call(
        lengths=(700, 500, 3000),
        new=(1, 33, 1),
        heads=8,
        kv_heads=2,
        head_dim=64,
        dtype=DType.FLOAT32,
        seed=1,
    )
    last = call.take(np.array([call.num_rows - 1]))
    same = {}
    for provider in (VllmCpu(), VllmCpuNoSplit()):
        whole = provider.run(Launch((call,), Execution(threads=2))).tensors[0].out
        single = provider.run(Launch((last,), Execution(threads=2))).tensors[0].out
        same[provider.id] = whole.part(slice(-1, None)).same(single)
    assert same == {"vllm-cpu": False, "vllm-cpu-nosplit": True}


def test_split_kv_depends_on_padded_heads():
    """More heads are more work for the plan to deal out; pages are none of its business."""
    call = dense_call(
        lengths=(300, 700, 90), new=(1, 5, 64), heads=8, kv_heads=2, head_dim=64, sink=True, seed=1
    )
    for provider, status in ((VllmCpu(), Status.REFUTED), (VllmCpuNoSplit(), Status.HELD)):
        trace = MemoryTrace((in_memory(call, provider),))
        report = replay([trace], providers=[provider.id], claims=["padding"], threads=2)
        assert report.status is status
        report = replay([trace], providers=[provider.id], claims=["page-ids", "page-size", "layout"])
        assert report.status is Status.HELD


def test_a_cache_of_rows_first_is_read_wrongly_without_a_word():
    """Through vLLM's own writer and reader: heads outside pages are fine, rows outside heads are not."""
    page, dim, rows = 32, 64, 70
    table, random = torch.tensor([[1, 2, 3]], dtype=torch.int32), torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(rows, heads, dim, generator=random).bfloat16() for heads in (4, 2, 2))
    slots = torch.arange(page, page + rows)
    starts, lengths = torch.tensor([0, rows], dtype=torch.int32), torch.tensor([rows], dtype=torch.int32)
    isa = chosen_isa(torch.bfloat16, page, dim)

    def attend(cache):
        keys, values = cache.chunk(2, dim=2)
        operators().cpu_attn_reshape_and_cache(k, v, keys, values, slots, isa, 1.0, 1.0, "auto")
        plan = operators().get_scheduler_metadata(
            1, 4, 2, dim, lengths, torch.bfloat16, starts, True, -1, isa, False, None, "auto"
        )
        out = torch.zeros_like(q)
        operators().cpu_attention_with_kv_cache(
            q, keys, values, out, starts, lengths, 0.125, True, None, -1, table, 0.0, plan, None, None
        )
        return out

    own = attend(torch.zeros(4, 2, 2 * page, dim, dtype=torch.bfloat16))
    heads_first = attend(torch.zeros(2, 4, 2 * page, dim, dtype=torch.bfloat16).transpose(0, 1))
    rows_first = attend(torch.zeros(4, 2 * page, 2, dim, dtype=torch.bfloat16).transpose(1, 2))
    assert torch.equal(own, heads_first)
    assert not torch.equal(own, rows_first)


def test_a_place_that_it_does_not_take_is_refused():
    call = dense_call(lengths=(9,), head_dim=32)
    for where in (Placement(page_size=7), Placement(layout=Layout.JOINED_NHD)):
        with pytest.raises(Unsupported, match="takes no pages"):
            VllmCpu().run(Launch((call,), Execution(placement=where)))


def test_a_plan_that_does_not_fit_is_refused(qwen3, run, prompt):
    call = run(qwen3, [prompt(40), prompt(9)], 1).calls[0]
    plan, provider = call.launch, VllmCpu()

    def refused(**change):
        return provider.refuses(replace(call, launch=replace(plan, **change)))

    assert provider.refuses(call) is None
    lacking = {name: value for name, value in plan.scalars.items() if name != "isa"}
    assert refused(scalars=lacking) == "its launch plan lacks isa"
    assert "path sse" in refused(scalars=plan.scalars | {"isa": "sse"})
    assert "True for threads" not in (refused(scalars=plan.scalars | {"threads": 4}) or "")
    assert "threads" in refused(scalars=plan.scalars | {"threads": 10**9})
    assert "fewer pages" in refused(block_tables=tuple(table[:0] for table in plan.block_tables))
    with pytest.raises(InvalidCall, match="leave unused pages out"):
        refused(block_tables=tuple(table - 10**6 for table in plan.block_tables))
    assert "other positions" in refused(arrays={"seq_lens": plan.arrays["seq_lens"] + 1})
    assert "number of requests" in refused(arrays={"seq_lens": plan.arrays["seq_lens"][:1]})
    assert "pages of 7 rows" in refused(page_size=7)
    with pytest.raises(Unsupported, match="9999999"):
        provider.run(
            Launch((replace(call, launch=replace(plan, scalars=plan.scalars | {"plan_bytes": 9999999})),))
        )


def test_the_tiny_window_is_the_one_that_was_declared(gpt_oss, run, prompt):
    got = run(gpt_oss, [prompt(40)], 1)
    assert [call.conventions.window for call in got.calls] == [tiny.WINDOW, None]


@pytest.mark.parametrize("place", [0, 1, 2])
def test_an_empty_request_spoils_those_behind_it(place):
    """docs/findings.md: so none is offered as padding. Behind all others one changes nothing."""
    call = dense_call(lengths=(40, 33), new=(1, 1), head_dim=64, seed=5)
    for kernel in (VllmCpu(), VllmCpuNoSplit()):
        wanted = kernel.run(Launch((call,))).tensors[0].out
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(vllm_cpu, "placed", lambda at, _: with_empty(at, place))
            found = kernel.run(Launch((call,), Execution(placement=Placement()))).tensors[0].out
        assert found.same(wanted) == (place == 2)
        assert Padding.REQUESTS not in kernel.capabilities().padding


def with_empty(at, place):
    """A launch with a request of no rows and no KV before request `place`."""
    return replace(
        at,
        starts=np.insert(at.starts, place, at.starts[place]),
        seq_lens=np.insert(at.seq_lens, place, 0),
        tables=np.insert(at.tables, place, 0, axis=0),
    )
