"""Latent attention in real vLLM: cached latents are the rows, and the first part of a key is its value."""

from collections import defaultdict

import numpy as np
import pytest
import torch

from tests.engines_vllm.histories import legal
from tests.engines_vllm.mla_engine import HEADS, LATENT, ROPE, decode, on_cpu_mla, start
from tests.engines_vllm.tiny_engine import Recorded, dense, generate
from tracekit.compare import Roundings, compare_envelope, envelope
from tracekit.engines.vllm_points import attention_layers, runner_of
from tracekit.gate.recorded import Legality, judge
from tracekit.model import Bits, KVFamily, KVRows, RequestKey, RowId
from tracekit.providers.base import Launch
from tracekit.providers.vllm_mla import VllmMla
from tracekit.recorder.api import CaptureIncomplete, record

needs_amx = pytest.mark.skipif(not torch.cpu._is_amx_tile_supported(), reason="this processor has no AMX")


@pytest.fixture(scope="session")
def amx_mla(gpt_oss, tmp_path_factory):
    return start(tmp_path_factory.mktemp("tiny-deepseek-v3"), max_num_batched_tokens=64)


@pytest.fixture(scope="session")
def cpu_mla(gpt_oss, tmp_path_factory):
    return on_cpu_mla(tmp_path_factory.mktemp("tiny-deepseek-v3"))


@pytest.fixture
def written(monkeypatch):
    """What each layer writes to its cache, `[n, 576]`, in the order of the calls."""

    def spy(llm):
        taken = defaultdict(list)
        for number, layer in enumerate(attention_layers(runner_of(llm)).values()):

            def update(latent, rope, *args, _n=number, _f=layer.impl.do_kv_cache_update, **kwargs):
                row = torch.cat([latent, rope.reshape(len(latent), -1)], dim=-1)
                taken[_n].append(row.contiguous().view(torch.int16).numpy().view(np.uint16).copy())
                return _f(latent, rope, *args, **kwargs)

            monkeypatch.setattr(layer.impl, "do_kv_cache_update", update, raising=False)
        return taken

    return spy


def assert_latents(call):
    keys, values = dense(call).keys.data, dense(call).values.data
    assert keys.shape[1:] == (1, LATENT + ROPE)
    assert np.array_equal(values, keys[..., :LATENT])
    assert call.out.bits.shape == (call.num_rows, HEADS, LATENT)
    assert call.conventions.output_boundary == "latent, before the value projection"


def assert_written(got, taken, steps):
    """Every row of every call is what its layer wrote at that position, all of them told apart."""
    for layer in (0, 1):
        assert [len(rows) for rows in taken[layer]] == [len(ids) for ids in steps]
        wrote = {
            row: bits
            for ids, rows in zip(steps, taken[layer], strict=True)
            for row, bits in zip(ids, rows, strict=True)
        }
        # Only rows of one token may be equal: a row in the place of another shows.
        assert len({bits.tobytes() for bits in wrote.values()}) > len(wrote) // 2
        for call in got.of(layer):
            for index, key in enumerate(call.rows.requests):
                held = dense(call, index)
                last = int(call.rows.positions[call.rows.request == index].max())
                assert (held.first, held.end) == (0, last + 1)
                wanted = np.stack([wrote[RowId(key, p)] for p in range(last + 1)])
                assert np.array_equal(held.keys.data[:, 0], wanted), (layer, call.step)


def outside(call):
    """The first element of O outside its envelope."""
    bound = envelope(call, Roundings(call.conventions.score_dtype, call.conventions.probability_dtype))
    verdict = compare_envelope(call, bound, call.out.bits, None)
    assert verdict.inside.compared.elements
    return verdict.outside.first


def assert_inside(call):
    """And outside it over the rows of a cache that is read one element off."""
    assert outside(call) is None, (call.layer, call.step)
    key = call.rows.requests[0]
    rows = dense(call)
    keys = Bits(np.roll(rows.keys.data, 1, axis=2), rows.keys.dtype)
    shifted = {**call.kv, key: {KVFamily.DENSE: KVRows(keys, keys.part((..., slice(LATENT))))}}
    assert outside(call.with_kv(shifted)) is not None, (call.layer, call.step)


@needs_amx
def test_with_amx_prefills_and_decodes_read_latents(amx_mla, run, prompt, written):
    """Chunked prefill, a decode beside a prefill (two launches of a layer in one step), decodes."""
    prompts = [prompt(7, 2), prompt(100, 1)]
    plain = generate(amx_mla, prompts, 5)
    taken = written(amx_mla)
    got = run(amx_mla, prompts, 5)

    assert got.tokens == plain
    assert got.session.problems == []
    assert all(line.complete for line in got.recording.ledger)
    assert {line.recorded for line in got.recording.ledger} == {2, 4}
    legal(got)
    kernels = {call.provenance.executed.kernel for call in got.calls}
    assert kernels == {"vllm.extend_attention_cpu", "vllm.decode_attention_cpu"}
    for call in got.calls:
        assert_latents(call)
        assert_inside(call)
    # One write a step and layer, of all its rows; those of decodes stand first.
    steps = defaultdict(list)
    for call in sorted(got.of(0), key=lambda call: "decode" not in call.provenance.executed.kernel):
        steps[call.step] += call.rows.ids
    assert_written(got, taken, [steps[step] for step in sorted(steps)])


def test_a_recorded_decode_comes_again_from_the_trace_alone(cpu_mla, run, prompt):
    """By its own operator; one bit of a key that a row reads, and the bits are others."""
    with pytest.warns(CaptureIncomplete):
        got = run(cpu_mla, [prompt(60, 1), prompt(20, 2)], 4)
    for call in got.calls:
        answer = VllmMla().run(Launch((call,)))
        assert answer.executed == call.provenance.executed
        assert answer.tensors[0].out.same(call.out.bits)
    key = call.rows.requests[0]
    data = dense(call).keys.data.copy()
    data[3, 0, 5] ^= 0x100
    keys = Bits(data, call.dtype)
    other = {**call.kv, key: {KVFamily.DENSE: KVRows(keys, keys.part((..., slice(LATENT))))}}
    assert not VllmMla().run(Launch((call.with_kv(other),))).tensors[0].out.same(call.out.bits)


def test_without_amx_decodes_are_recorded_and_prefills_refused_by_name(cpu_mla, prompt, written):
    """The third prompt waits for the first to end, and is prefilled beside a decode, which is recorded."""
    prompts, counts = [prompt(40, 1), prompt(7, 2), prompt(30, 3)], [2, 6, 4]
    plain = decode(cpu_mla, prompts, counts)
    taken, got = written(cpu_mla), Recorded()
    with (
        pytest.warns(CaptureIncomplete, match="expands the keys and values of a prefill"),
        record("unused.h5", engine="vllm", llm=cpu_mla, write=got.write),
    ):
        got.tokens = decode(cpu_mla, prompts, counts)

    assert got.tokens == plain
    ledger = got.recording.ledger
    launches = [(line.expected, line.fired, line.recorded) for line in ledger]
    assert launches == [(2, 2, 0), (2, 2, 2), (4, 4, 2), (2, 2, 2), (2, 2, 2), (2, 2, 2)]
    assert ["expands" in line.cut for line in ledger] == [True, False, True, False, False, False]
    assert [call.step for call in got.of(0)] == [1, 2, 3, 4, 5]
    judgement = judge(got.recording, got.calls)
    assert judgement.status is Legality.UNKNOWN
    assert "step 0 lost calls" in judgement.reason
    for call in got.calls:
        assert call.provenance.executed.kernel == "vllm.mla_decode_kvcache"
        assert_latents(call)
        assert_inside(call)
    one, two, three = ([RowId(RequestKey.of_prompt(ids), p) for p in range(len(ids))] for ids in prompts)
    first, mixed, *rest = (call.rows.ids for call in got.of(0))
    assert_written(got, taken, [[*one, *two], first, [*mixed, *three], *rest])
