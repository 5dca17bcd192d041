"""Megatron-core's own `TEDotProductAttention` on the CPU.

Its class is taken out of the installed source, which does not define it without Transformer Engine, and put
on a module with the constructor, the attributes and the forward of Transformer Engine 2: the scale lies in
the three kernels, the window and the sink in the module.
"""

import ast
import math
from pathlib import Path
from types import SimpleNamespace

import torch
from megatron.core.extensions import transformer_engine as installed
from packaging.version import Version


class Kernel(torch.nn.Module):
    def __init__(self, softmax_scale):
        super().__init__()
        self.softmax_scale = softmax_scale


class DotProductAttention(torch.nn.Module):
    """What Megatron inherits from: `transformer_engine.pytorch.DotProductAttention`."""

    def __init__(
        self,
        num_attention_heads,
        kv_channels,
        num_gqa_groups=None,
        attention_dropout=0.0,
        qkv_format="sbhd",
        attn_mask_type="causal",
        window_size=None,
        bottom_right_diagonal=None,
        sequence_parallel=False,
        tp_size=1,
        get_rng_state_tracker=None,
        tp_group=None,
        layer_number=None,
        attention_type="self",
        cp_group=None,
        cp_global_ranks=None,
        cp_stream=None,
        cp_comm_type="p2p",
        softmax_scale=None,
        softmax_type="vanilla",
        return_max_logit=False,
        name=None,
    ):
        super().__init__()
        self.qkv_format, self.attn_mask_type = qkv_format, attn_mask_type
        self.window_size = self.set_window(attn_mask_type, window_size)
        self.layer_number, self.attention_type = layer_number, attention_type
        self.attention_dropout, self.cp_group = attention_dropout, cp_group
        self.softmax_type, self.softmax_offset = softmax_type, None
        if softmax_type == "learnable":
            del self.softmax_offset
            self.softmax_offset = torch.nn.Parameter(torch.zeros(num_attention_heads))
        scale = 1.0 / math.sqrt(kv_channels) if softmax_scale is None else softmax_scale
        self.flash_attention = Kernel(scale)
        self.fused_attention = Kernel(scale)
        self.unfused_attention = Kernel(scale)

    @staticmethod
    def set_window(attn_mask_type, window_size):
        """A causal launch sees nothing behind a row."""
        if "causal" in attn_mask_type:
            return (-1 if window_size is None else window_size[0], 0)
        return window_size or (-1, -1)

    def forward(
        self,
        query_layer,
        key_layer,
        value_layer,
        attention_mask=None,
        qkv_format=None,
        cu_seqlens_q=None,
        cu_seqlens_kv=None,
        cu_seqlens_q_padded=None,
        cu_seqlens_kv_padded=None,
        max_seqlen_q=None,
        max_seqlen_kv=None,
        attn_mask_type=None,
        window_size=None,
        pad_between_seqs=None,
    ):
        kind = attn_mask_type or self.attn_mask_type
        before, _ = self.set_window(kind, window_size or self.window_size)
        parts = (query_layer, key_layer, value_layer)
        if (qkv_format or self.qkv_format) == "thd":
            assert kind == "padding_causal"
            spans = zip(cu_seqlens_q[:-1].tolist(), cu_seqlens_q[1:].tolist(), strict=True)
            return torch.cat([self.attend(*(p[a:b] for p in parts), before) for a, b in spans])
        assert kind == "causal"
        return torch.stack(
            [self.attend(*(p[:, b] for p in parts), before) for b in range(query_layer.shape[1])], 1
        )

    def attend(self, q, k, v, before):
        """`[s, heads, size]` each: scores, softmax and sums in FP32, P in the dtype of the model."""
        rows, heads, _ = q.shape
        k, v = (part.repeat_interleave(heads // part.shape[1], 1) for part in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q.float(), k.float()) * self.unfused_attention.softmax_scale
        far = torch.arange(rows)[:, None] - torch.arange(rows)
        hidden = (far < 0) | ((far > before) if before >= 0 else torch.zeros(rows, rows, dtype=torch.bool))
        scores = scores.masked_fill(hidden, -torch.inf)
        if self.softmax_offset is not None:
            extra = self.softmax_offset.float()[:, None, None].expand(heads, rows, 1)
            scores = torch.cat([scores, extra], -1)
        p = scores.softmax(-1)[..., :rows].to(v.dtype)
        return torch.einsum("hqk,khd->qhd", p.float(), v.float()).to(q.dtype).flatten(1)


def te_dot_product_attention(base=DotProductAttention):
    """Return the installed class on another base."""
    tree = ast.parse(Path(installed.__file__).read_text())
    node = next(
        n for n in ast.walk(tree) if isinstance(n, ast.ClassDef) and n.name == "TEDotProductAttention"
    )
    space = vars(installed) | {
        "te": SimpleNamespace(pytorch=SimpleNamespace(DotProductAttention=base)),
        "HAVE_TE": True,
        "get_te_version": lambda: Version("2.9.0"),
        "is_te_min_version": lambda version, check_equality=True: True,
    }
    source = compile("from __future__ import annotations\n" + ast.unparse(node), installed.__file__, "exec")
    exec(source, space)
    return space["TEDotProductAttention"]
