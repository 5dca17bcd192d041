"""Functions with the documented signatures of GPU libraries, in float32 on the CPU, for the host side alone.

They say what a library's documentation says: argument order, shapes, alignment of the causal mask, what the
LSE is. A test that passes with them shows that a provider calls its library as documented; it is no
evidence about the library's kernels.
"""

import torch


def one(q, k, v, scale, window=(-1, -1), sink=None):
    """O `[S, H, D]` and the natural LSE `[S, H]` of one sequence, causal aligned to the last key."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.float().repeat_interleave(group, 1) for x in (k, v))
    x = torch.einsum("qhd,khd->hqk", q.float(), k) * scale
    at = torch.arange(len(q))[:, None] + len(k) - len(q)
    keys = torch.arange(len(k))[None]
    seen = keys <= at
    if window[0] >= 0:
        seen = seen & (keys >= at - window[0])
    x = x.masked_fill(~seen, -torch.inf)
    lse = torch.logsumexp(x, -1)
    total = lse if sink is None else torch.logaddexp(lse, sink[:, None])
    p = torch.exp(x - total[..., None]).to(q.dtype).float()
    return torch.einsum("hqk,khd->qhd", p, v).to(q.dtype), lse.T


def varlen(q, k, v, starts_q, starts_k, scale, window):
    answers = [
        one(q[a:b], k[c:d], v[c:d], scale, window)
        for a, b, c, d in zip(starts_q[:-1], starts_q[1:], starts_k[:-1], starts_k[1:], strict=True)
    ]
    out, lse = (torch.cat(parts) for parts in zip(*answers, strict=True))
    return out, lse.T.contiguous()


def flash_attn_varlen_func(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
    block_table=None,
):
    """flash_attn 2.8.4."""
    assert causal
    assert return_attn_probs
    assert max_seqlen_q == int(cu_seqlens_q.diff().max())
    assert max_seqlen_k == int(cu_seqlens_k.diff().max())
    return (*varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, softmax_scale, window_size), None)


def aiter_varlen(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    min_seqlen_q=0,
    dropout_p=0.0,
    softmax_scale=None,
    logits_soft_cap=0.0,
    causal=False,
    window_size=(-1, -1, 0),
    bias=None,
    alibi_slopes=None,
    deterministic=False,
    return_lse=False,
    return_attn_probs=False,
):
    """AITER e404860."""
    assert causal
    assert return_lse
    assert window_size[2] == 0
    return varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, softmax_scale, window_size[:2])


class BatchPrefillWithPagedKVCacheWrapper:
    """FlashInfer 0.6.18: LSE in base 2."""

    def __init__(self, float_workspace_buffer, kv_layout="NHD", use_cuda_graph=False, backend="auto"):
        assert (kv_layout, backend) == ("NHD", "fa2")

    def plan(
        self,
        qo_indptr,
        paged_kv_indptr,
        paged_kv_indices,
        paged_kv_last_page_len,
        num_qo_heads,
        num_kv_heads,
        head_dim_qk,
        page_size,
        head_dim_vo=None,
        custom_mask=None,
        packed_custom_mask=None,
        causal=False,
        pos_encoding_mode="NONE",
        use_fp16_qk_reduction=False,
        sm_scale=None,
        window_left=-1,
        logits_soft_cap=None,
        q_data_type="float16",
        fixed_split_size=None,
        disable_split_kv=False,
    ):
        assert causal
        assert fixed_split_size
        self.starts, self.pages, self.page = qo_indptr, paged_kv_indices, page_size
        self.indptr, self.last = paged_kv_indptr, paged_kv_last_page_len
        self.scale, self.window = sm_scale, (window_left, 0)

    def run(self, q, paged_kv_cache, *args, return_lse=False, sinks=None):
        assert return_lse
        found = []
        for s in range(len(self.starts) - 1):
            pages = self.pages[self.indptr[s] : self.indptr[s + 1]].long()
            count = (len(pages) - 1) * self.page + int(self.last[s])
            k, v = (cache[pages].flatten(0, 1)[:count] for cache in paged_kv_cache)
            found.append(one(q[self.starts[s] : self.starts[s + 1]], k, v, self.scale, self.window))
        out, lse = (torch.cat(parts) for parts in zip(*found, strict=True))
        return out, lse * 1.4426950408889634


def flash_mla_sparse_fwd(q, kv, indices, sm_scale, d_v=512, attn_sink=None, topk_length=None):
    """FlashMLA 9241ae3: LSE without the sink, +inf for a row without keys."""
    assert indices.shape[2] % 128 == 0
    outs, lses = [], []
    for t in range(len(q)):
        rows = kv[indices[t, 0][indices[t, 0] >= 0].long(), 0].float()
        x = q[t].float() @ rows.T * sm_scale
        lse = torch.logsumexp(x, -1)
        total = lse if attn_sink is None else torch.logaddexp(lse, attn_sink)
        p = torch.exp(x - total[:, None]).to(q.dtype).float()
        outs.append((p @ rows[:, :d_v]).to(q.dtype))
        lses.append(torch.where(torch.isneginf(lse), torch.inf, lse))
    return torch.stack(outs), None, torch.stack(lses)
