"""A tiny DeepSeek-V3 without experts in real vLLM: latent attention on either implementation for the CPU."""

import json
from pathlib import Path
from typing import Any

import torch

from tests.engines_vllm.tiny_engine import LLM, SamplingParams
from tracekit.engines.vllm_points import runner_of

LATENT, ROPE, HEADS = 512, 64, 4


def start(folder: Path, **options: Any) -> Any:
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
        dtype="bfloat16",
        seed=0,
        enable_prefix_caching=False,
        **{"max_num_seqs": 4, **options},
    )
    model = runner_of(llm).model
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.data.fill_(1.0)
        elif parameter.dtype == torch.bfloat16:
            parameter.data.mul_(100)
    return llm


def on_cpu_mla(folder: Path) -> Any:
    """Without AMX. vLLM cuts no prompt there; two requests run at a time, and a third one waits."""
    return start(folder, attention_config={"backend": "CPU_MLA"}, max_num_seqs=2)


def decode(llm: Any, prompts: list[list[int]], tokens: list[int]) -> list[list[int]]:
    """Return the new token ids of each prompt, so many each."""
    each = [
        SamplingParams(max_tokens=count, temperature=0, detokenize=False, ignore_eos=True) for count in tokens
    ]
    answers = llm.generate([{"prompt_token_ids": ids} for ids in prompts], each, use_tqdm=False)
    return [list(answer.outputs[0].token_ids) for answer in answers]
