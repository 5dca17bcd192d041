"""Latent attention in real vLLM: cached latents are the rows, and the first part of a key is its value."""

import json
from collections import defaultdict

import numpy as np
import pytest
import torch
from vllm import LLM

from tests.engines_vllm.tiny_engine import dense, generate
from tracekit.compare import Roundings, compare_envelope, envelope
from tracekit.engines.vllm_points import attention_layers, runner_of
from tracekit.model import Bits, KVFamily, KVRows, Mode, RequestKey, RowId
from tracekit.recorder.api import CaptureIncomplete

needs_amx = pytest.mark.skipif(not torch.cpu._is_amx_tile_supported(), reason="this processor has no AMX")
LATENT, ROPE, HEADS = 512, 64, 4


def start(folder, **options):
    """A tiny DeepSeek-V3 without experts, on made-up weights; sizes that vLLM's kernels have compiled in."""
    config = {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "vocab_size": 256,
        "hidden_size": 128,
        "intermediate_size": 256,
        "moe_intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "n_shared_experts": 1,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 2,
        "kv_lora_rank": LATENT,
        "q_lora_rank": 64,
        "qk_rope_head_dim": ROPE,
        "qk_nope_head_dim": 32,
        "v_head_dim": 32,
        "max_position_embeddings": 512,
        "rope_theta": 10000.0,
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    (folder / "config.json").write_text(json.dumps(config))
    llm = LLM(
        model=str(folder),
        enforce_eager=True,
        skip_tokenizer_init=True,
        load_format="dummy",
        max_model_len=256,
        max_num_seqs=4,
        dtype="bfloat16",
        seed=0,
        enable_prefix_caching=False,
        **options,
    )
    model = runner_of(llm).model
    for name, parameter in model.named_parameters():
        if "norm" not in name and parameter.dtype == torch.bfloat16:
            parameter.data.mul_(50)
    return llm


@pytest.fixture(scope="session")
def amx_mla(gpt_oss, tmp_path_factory):
    return start(tmp_path_factory.mktemp("tiny-deepseek-v3"), max_num_batched_tokens=64)


@pytest.fixture(scope="session")
def cpu_mla(gpt_oss, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny-deepseek-v3")
    # No chunks: a prompt waits until all of it fits into a step.
    return start(
        folder,
        attention_config={"backend": "CPU_MLA"},
        enable_chunked_prefill=False,
        max_num_batched_tokens=256,
    )


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
        assert len({bits.tobytes() for bits in wrote.values()}) == len(wrote)
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


def test_without_amx_decodes_are_recorded_and_prefills_refused_by_name(cpu_mla, run, prompt, written):
    """The second prompt does not fit beside the first: it is prefilled beside a decode, which is recorded."""
    prompts = [prompt(200, 1), prompt(90, 2)]
    plain = generate(cpu_mla, prompts, 4)
    taken = written(cpu_mla)
    with pytest.warns(CaptureIncomplete, match="expands the keys and values of a prefill"):
        got = run(cpu_mla, prompts, 4)

    assert got.tokens == plain
    first, mixed, *rest = got.recording.ledger
    assert (first.recorded, "expands" in first.cut) == (0, True)
    assert (mixed.expected, mixed.fired, mixed.recorded) == (4, 4, 2)
    assert "expands" in mixed.cut
    assert all(line.complete and line.recorded == 2 for line in rest)
    assert [call.step for call in got.of(0)][:1] == [1]
    assert {call.mode for call in got.calls[2:]} == {Mode.DECODE}
    for call in got.calls:
        assert call.provenance.executed.kernel == "vllm.mla_decode_kvcache"
        assert_latents(call)
        assert_inside(call)
    one, two = (RequestKey.of_prompt(ids) for ids in prompts)
    prefills = [
        [RowId(key, p) for p in range(len(ids))] for key, ids in ((one, prompts[0]), (two, prompts[1]))
    ]
    decodes = [call.rows.ids for call in got.of(0)]
    steps = [prefills[0], [*decodes[0], *prefills[1]], *decodes[1:]]
    assert_written(got, taken, steps)
