"""A tiny DeepSeek-V4 in real vLLM: one layer of each kind. Import it in a process of its own."""

import json
import os
from pathlib import Path
from typing import Any

os.environ.update(
    HF_HUB_OFFLINE="1",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_NO_USAGE_STATS="1",
    VLLM_LOGGING_LEVEL="ERROR",
)

from tests.engines_vllm.interpreted_triton import complete_metadata

RATIOS = (0, 4, 128)
VOCABULARY = 256
HEADS = 4
CHUNK = 256
# Sizes that vLLM's operators have compiled in: heads of 512 with 64 rotary elements, an indexer of 128 that
# chooses 512 rows, 256 experts.
CONFIG: dict[str, Any] = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "moe_intermediate_size": 64,
    "num_hidden_layers": len(RATIOS),
    "num_attention_heads": HEADS,
    "num_key_value_heads": 1,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 128,
    "o_lora_rank": 64,
    "o_groups": 2,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 6,
    "num_hash_layers": 1,
    "scoring_func": "sqrtsoftplus",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "topk_method": "noaux_tc",
    "sliding_window": 128,
    "index_n_heads": 4,
    "index_head_dim": 128,
    "index_topk": 512,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000,
    "compress_rope_theta": 160000,
    "compress_ratios": [*RATIOS, 0],
    "swiglu_limit": 10.0,
    "hidden_act": "silu",
    "max_position_embeddings": 4096,
    "num_nextn_predict_layers": 1,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.02,
    "use_cache": True,
    "rope_scaling": {
        "type": "yarn",
        "factor": 16,
        "beta_fast": 32,
        "beta_slow": 1,
        "original_max_position_embeddings": 65536,
    },
}


def engine(folder: Path, **options: Any) -> Any:
    """Start vLLM on made-up weights, the same ones every time, written large enough to matter."""
    import torch
    from vllm import LLM

    complete_metadata()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    llm = LLM(
        model=str(folder),
        **{
            "enforce_eager": True,
            "skip_tokenizer_init": True,
            "load_format": "dummy",
            "max_model_len": 4096,
            "max_num_seqs": 4,
            "max_num_batched_tokens": CHUNK,
            "dtype": "bfloat16",
            "seed": 0,
            "enable_prefix_caching": False,
            **options,
        },
    )
    model = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.get_model()
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if name.endswith("attn_sink"):
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator))
        elif "norm" in name:
            parameter.data.fill_(1.0)
        elif "weight" in name and parameter.dtype == torch.bfloat16:
            parameter.data.mul_(50)
    return llm


def generate(llm: Any, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
    """Return the new token ids of each prompt."""
    from vllm import SamplingParams

    sampling = SamplingParams(max_tokens=max_tokens, temperature=0, detokenize=False, ignore_eos=True)
    answers = llm.generate([{"prompt_token_ids": p} for p in prompts], sampling, use_tqdm=False)
    return [list(answer.outputs[0].token_ids) for answer in answers]
