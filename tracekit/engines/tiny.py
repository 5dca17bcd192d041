"""Tiny models with random weights from fixed seeds: real architectures, milliseconds a forward, no tokenizer.

`tiny-qwen3` has two KV heads and QK-norm; `tiny-gpt-oss` has sinks and alternates a window of 16 tokens
with full attention.
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


CONFIGS: dict[str, Callable[[], Any]] = {"tiny-qwen3": _qwen3, "tiny-gpt-oss": _gpt_oss}


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
