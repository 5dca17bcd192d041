"""`torch-flash-cpu`: torch's flash attention for the CPU.

The operator is `aten::_scaled_dot_product_flash_attention_for_cpu`. One launch is one batch `[B, H, S, D]`: a
request an entry, its rows in executed order, shorter requests padded. Visibility is always given as a mask,
never as `is_causal`: the flag takes another way through the kernel, and a claim must vary only what it
names. So rows in another order, or alone, run the same code.
"""

import platform
from typing import TYPE_CHECKING, Any

import numpy as np

from tracekit.errors import Unavailable, Unsupported
from tracekit.model import AttentionCall, Bits, DType, ExecutedIdentity, KVFamily, Ranges
from tracekit.providers.base import Answer, Capabilities, Launch, Tensors, refusal
from tracekit.verdict import ClaimId

if TYPE_CHECKING:
    import torch


class TorchFlashCpu:
    """The kernel that `scaled_dot_product_attention` takes on the CPU."""

    id = "torch-flash-cpu"

    def __init__(self) -> None:
        try:
            import torch
        except ImportError as error:
            raise Unavailable(
                "torch-flash-cpu needs torch; install tracekit-attention[torch].", rule="P-TORCH"
            ) from error
        self._torch = torch

    def capabilities(self) -> Capabilities:
        """Dense and windowed causal attention; P meets V in the dtype of Q."""
        return Capabilities(
            dtypes=frozenset({DType.BFLOAT16, DType.FLOAT16, DType.FLOAT32}),
            families=frozenset({KVFamily.DENSE, KVFamily.RECENT}),
            probability_dtype={DType.BFLOAT16: DType.BFLOAT16, DType.FLOAT16: DType.FLOAT16},
            launch_plan=False,
        )

    def advertised(self) -> frozenset[ClaimId]:
        """The same call twice; torch documents nothing about batches."""
        return frozenset({"rerun"})

    def identity(self) -> ExecutedIdentity:
        """Torch, and the instruction set that it chose."""
        return ExecutedIdentity(
            "torch.flash_cpu",
            {"torch": str(self._torch.__version__)},
            arch=platform.machine(),
            isa=self._torch.backends.cpu.get_cpu_capability().lower(),
        )

    def refuses(self, call: AttentionCall) -> str | None:
        """Return why it cannot run a call."""
        if reason := refusal(self.capabilities(), call):
            return reason
        if call.value_dim != call.head_dim:
            return f"it does not take values of width {call.value_dim} with keys of {call.head_dim}"
        if (call.selection.counts() == 0).any():
            return "it gives NaN for a row without keys"
        return None

    def run(self, launch: Launch) -> Answer:
        """Run each call as one batch.

        Raises:
            Unsupported: a call is refused.
        """
        # here and not above: this file is imported to say that torch is missing
        from tracekit.providers.torch_threads import kernel_threads

        with kernel_threads(launch.execution.threads):
            answers = tuple(self._run(call) for call in launch.calls)
        return Answer(answers, self.identity())

    def _run(self, call: AttentionCall) -> Tensors:
        if reason := self.refuses(call):
            raise Unsupported(f"torch-flash-cpu cannot run this call: {reason}.", rule="P-REFUSED")
        torch = self._torch
        (family, part), *_ = call.selection.families.items()
        assert isinstance(part, Ranges)
        held = [call.kv[key][family] for key in call.rows.requests]
        where = [np.flatnonzero(call.rows.request == index) for index in range(len(held))]
        queries, keys = max(rows.size for rows in where), max(rows.count for rows in held)
        q = np.zeros((len(held), call.num_heads, queries, call.head_dim), call.q.data.dtype)
        k = np.zeros((len(held), call.num_kv_heads, keys, call.head_dim), q.dtype)
        v = np.zeros_like(k)
        hidden = np.zeros((len(held), queries, keys), np.bool_)  # padded queries see all: no NaN
        for index, (rows, kv) in enumerate(zip(where, held, strict=True)):
            q[index, :, : rows.size] = call.q.data[rows].transpose(1, 0, 2)
            k[index, :, : kv.count] = kv.keys.data.transpose(1, 0, 2)
            v[index, :, : kv.count] = kv.value_bits.data.transpose(1, 0, 2)
            ids = kv.first + np.arange(keys)
            hidden[index, : rows.size] = (ids < part.lo[rows, None]) | (ids >= part.hi[rows, None])
        dtype = _torch_dtype(torch, call.dtype)
        mask = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(torch.from_numpy(hidden), -torch.inf)
        repeat = call.num_heads // call.num_kv_heads
        with torch.no_grad():
            out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                torch.from_numpy(q).view(dtype),
                torch.from_numpy(k).view(dtype).repeat_interleave(repeat, 1),
                torch.from_numpy(v).view(dtype).repeat_interleave(repeat, 1),
                0.0,
                False,
                attn_mask=mask[:, None],
                scale=call.conventions.scale,
            )
        rows = np.concatenate(where)
        container = call.dtype.container
        answer = np.zeros((call.num_rows, call.num_heads, call.value_dim), container)
        norm = np.zeros((call.num_rows, call.num_heads), np.uint32)
        # [B, H, S, D] and [B, H, S], whatever their strides
        bits = out.contiguous().view(_container(torch, call.dtype)).numpy().view(container)
        lse_bits = lse.contiguous().view(torch.int32).numpy().view(np.uint32)
        answer[rows] = np.concatenate([bits[i, :, : r.size].transpose(1, 0, 2) for i, r in enumerate(where)])
        norm[rows] = np.concatenate([lse_bits[i, :, : r.size].T for i, r in enumerate(where)])
        return Tensors(Bits(answer, call.dtype), Bits(norm, DType.FLOAT32))


def _torch_dtype(torch: Any, dtype: DType) -> "torch.dtype":
    return getattr(torch, dtype.value)  # type: ignore[no-any-return]


def _container(torch: Any, dtype: DType) -> "torch.dtype":
    return torch.int32 if dtype is DType.FLOAT32 else torch.int16  # type: ignore[no-any-return]
