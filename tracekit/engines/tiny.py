"""Tiny models with random weights from fixed seeds: real architectures, milliseconds a forward, no tokenizer.

`tiny-qwen3` has two KV heads and QK-norm; `tiny-gpt-oss` has sinks and alternates a window of 16 tokens
with full attention; `tiny-deepseek-v4` has one layer of each kind (window alone, window and sparse C4 rows,
window and C128 rows) with the window and the ratios of the real model; `tiny-deepseek-v32` is MLA under a
sparse indexer.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tracekit.engines import cached

SEED = 20
VOCABULARY = 256
WINDOW = 16
_LAYOUT = 1
"""Raise when the checkpoints change."""


def _qwen3() -> Any:
    from transformers import Qwen3Config

    return Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=1024,
        initializer_range=0.1,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )


def _gpt_oss() -> Any:
    from transformers import GptOssConfig

    return GptOssConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=WINDOW,
        max_position_embeddings=1024,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        initializer_range=0.1,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )


def _deepseek_v4() -> Any:
    from transformers import DeepseekV4Config

    return DeepseekV4Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        moe_intermediate_size=32,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        q_lora_rank=32,
        qk_rope_head_dim=8,
        o_groups=2,
        o_lora_rank=16,
        num_experts_per_tok=2,
        n_routed_experts=4,
        num_hash_layers=1,
        layer_types=["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"],
        compress_rates={"compressed_sparse_attention": 4, "heavily_compressed_attention": 128},
        sliding_window=128,
        index_n_heads=2,
        index_head_dim=16,
        index_topk=8,
        hc_mult=2,
        max_position_embeddings=1024,
        initializer_range=0.1,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )


def _deepseek_v32() -> Any:
    from transformers import DeepseekV32Config

    return DeepseekV32Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        moe_intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        n_shared_experts=1,
        n_routed_experts=4,
        n_group=1,
        topk_group=1,
        num_experts_per_tok=2,
        kv_lora_rank=32,
        q_lora_rank=32,
        qk_rope_head_dim=16,
        qk_nope_head_dim=16,
        v_head_dim=16,
        index_topk=8,
        index_head_dim=32,
        index_n_heads=2,
        first_k_dense_replace=1,
        max_position_embeddings=1024,
        initializer_range=0.1,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )


CONFIGS: dict[str, Callable[[], Any]] = {
    "tiny-qwen3": _qwen3,
    "tiny-gpt-oss": _gpt_oss,
    "tiny-deepseek-v4": _deepseek_v4,
    "tiny-deepseek-v32": _deepseek_v32,
}


def build(name: str) -> Any:
    """Make a tiny model in memory, in bf16; the generator of the caller is left alone."""
    from transformers import AutoModelForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        model = AutoModelForCausalLM.from_config(CONFIGS[name](), dtype=torch.bfloat16).eval()
        for parameter, tensor in sorted(model.named_parameters()):
            # transformers starts sinks near 0, where leaving one out would hardly show.
            if parameter.endswith("sinks"):
                torch.nn.init.normal_(tensor, std=1.0)
    return model


def write(name: str, folder: Path) -> None:
    """Write a tiny model as a checkpoint folder."""
    from transformers.utils import logging

    progress = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        build(name).save_pretrained(folder)
    finally:
        if progress:
            logging.enable_progress_bar()


def prepared(name: str) -> Path:
    """Return the folder of a tiny checkpoint, written at the first use."""
    return cached.prepared(f"{name}-{_LAYOUT}", lambda folder: write(name, folder))
