"""A tiny GPT with MLA under a sparse indexer, on layers of plain torch in place of Transformer Engine's."""

from unittest.mock import patch

import torch
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt import experimental_attention_variant_module_specs as specs
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.experimental_attention_variant import absorbed_mla
from megatron.core.transformer.transformer_config import MLATransformerConfig

from tracekit.engines import megatron_tiny as tiny


class Linear(torch.nn.Linear):
    """What Transformer Engine's linear layer is called with."""

    def __init__(self, input_size, output_size, *, config, bias=False, **_):
        super().__init__(input_size, output_size, bias=bias, dtype=config.params_dtype)

    def forward(self, x):
        return super().forward(x), None


class Provider(LocalSpecProvider):
    def linear(self):
        return Linear

    def column_parallel_layer_norm_linear(self):
        return None


def gpt(dtype=torch.bfloat16, **options):
    """Two layers; latents of 32 + 16, 8 keys a row."""
    fields = {
        "num_layers": 2,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "ffn_hidden_size": 128,
        "init_method_std": 0.2,
        "use_cpu_initialization": True,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype is torch.bfloat16,
        "multi_latent_attention": True,
        "q_lora_rank": 32,
        "kv_lora_rank": 32,
        "qk_head_dim": 16,
        "qk_pos_emb_head_dim": 16,
        "v_head_dim": 16,
        "rope_type": "rope",
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "add_bias_linear": False,
        "activation_func": torch.nn.functional.silu,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "qk_layernorm": True,
        "bias_dropout_fusion": False,
        "bias_activation_fusion": False,
        "apply_rope_fusion": False,
        "gradient_accumulation_fusion": False,
        "masked_softmax_fusion": False,
        "experimental_attention_variant": "dsa",
        "dsa_indexer_n_heads": 2,
        "dsa_indexer_head_dim": 32,
        "dsa_indexer_topk": 8,
        # The rotation is orthogonal, and needs a CUDA package.
        "dsa_indexer_rotate_activation": False,
        "transformer_impl": "local",
    }
    config = MLATransformerConfig(**(fields | options))
    with (
        patch.object(absorbed_mla, "TELinear", Linear),
        patch.object(specs, "_get_backend_spec_provider", lambda **_: Provider()),
        torch.random.fork_rng(devices=[]),
    ):
        torch.manual_seed(tiny.SEED)
        spec = specs.get_transformer_block_with_experimental_attention_variant_spec(config, vp_stage=None)
        model = GPTModel(
            config=config,
            transformer_layer_spec=spec,
            vocab_size=tiny.VOCABULARY,
            max_sequence_length=128,
            position_embedding_type="rope",
            share_embeddings_and_output_weights=False,
        )
        return model.to(dtype).eval()
