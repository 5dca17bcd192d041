"""A tiny GPT of Megatron-core with random weights from a fixed seed, on the CPU, for tests and goldens.

Megatron-core is written for GPUs. Three things are given to it here that a GPU would give: the name of the
current device, which rotary embeddings and sinks ask for; a random state tracker that forks nothing
(Megatron's own, made for inference), because the ordinary one keeps states of CUDA generators; and an empty
state in place of those that activation checkpointing saves. None of them takes part in the arithmetic of
attention without dropout.
"""

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch

SEED = 20
VOCABULARY = 256


@contextmanager
def on_cpu(rank: int = 0, ranks: int = 1, port: int | None = None) -> Iterator[None]:
    """Let Megatron-core run on the CPU of this process, as one rank of a tensor parallel group over gloo.

    Args:
        rank: of this process.
        ranks: tensor parallel size.
        port: where rank 0 listens; None takes a free one, which only a group of one can.
    """
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import random

    place = f"tcp://127.0.0.1:{port or free_port()}"
    with (
        patch.object(torch.cuda, "current_device", lambda: "cpu"),
        patch.object(random, "_get_cuda_rng_state", lambda *_, **__: torch.empty(0)),
        patch.object(random, "_set_cuda_rng_state", lambda *_, **__: None),
    ):
        torch.distributed.init_process_group("gloo", init_method=place, rank=rank, world_size=ranks)
        try:
            parallel_state.initialize_model_parallel(tensor_model_parallel_size=ranks)
            random.initialize_rng_tracker(inference_rng_tracker=True, force_reset=True)
            yield
        finally:
            parallel_state.destroy_model_parallel()
            torch.distributed.destroy_process_group()


def gpt(*, core_attention: Any = None, dtype: torch.dtype = torch.bfloat16, **options: Any) -> Any:
    """Make a `GPTModel` of two layers, four query and two KV heads of 16; call it inside `on_cpu`.

    Args:
        core_attention: in place of `DotProductAttention` in the layer spec.
        dtype: of weights and attention.
        options: fields of `TransformerConfig`, such as `softmax_type="learnable"`.
    """
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel

    spec = get_gpt_layer_local_spec(qk_layernorm=True, normalization="RMSNorm")
    if core_attention is not None:
        spec.submodules.self_attention.submodules.core_attention = core_attention
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        model = GPTModel(
            config=config(dtype, **options),
            transformer_layer_spec=spec,
            vocab_size=VOCABULARY,
            max_sequence_length=256,
            position_embedding_type="rope",
            share_embeddings_and_output_weights=False,
        ).to(dtype)
        with torch.no_grad():
            for name, parameter in sorted(model.named_parameters()):
                # Megatron starts sinks near 0, where leaving one out would hardly show.
                if name.endswith("softmax_offset"):
                    parameter.normal_()
    return model.eval()


def config(dtype: torch.dtype, **options: Any) -> Any:
    """Return the `TransformerConfig` of `gpt`: no dropout, and nothing that is fused on a GPU."""
    from megatron.core.parallel_state import get_tensor_model_parallel_world_size
    from megatron.core.transformer.transformer_config import TransformerConfig

    fields: dict[str, Any] = {
        "num_layers": 2,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_query_groups": 2,
        "kv_channels": 16,
        "ffn_hidden_size": 128,
        "init_method_std": 0.2,
        "tensor_model_parallel_size": get_tensor_model_parallel_world_size(),
        "use_cpu_initialization": True,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype is torch.bfloat16,
        "fp16": dtype is torch.float16,
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "add_bias_linear": False,
        "activation_func": torch.nn.functional.silu,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "attention_softmax_in_fp32": True,
        "masked_softmax_fusion": False,
        "bias_dropout_fusion": False,
        "bias_activation_fusion": False,
        "apply_rope_fusion": False,
        "gradient_accumulation_fusion": False,
        "qk_layernorm": True,
    }
    return TransformerConfig(**(fields | options))


def causal(length: int) -> torch.Tensor:
    """The mask of Megatron's data loaders, bool `[1, 1, S, S]`: True hides a key."""
    return torch.ones(1, 1, length, length, dtype=torch.bool).triu(1)


def free_port() -> int:
    """Return a port that nobody listened on a moment ago."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
