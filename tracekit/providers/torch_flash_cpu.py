"""`torch-flash-cpu`: torch's flash attention for the CPU.

The operator is `aten::_scaled_dot_product_flash_attention_for_cpu`. One launch is one batch `[B, H, S, D]`: a
request an entry, its rows in executed order, shorter requests padded. Visibility is always given as a mask,
never as `is_causal`: the flag takes another way through the kernel, and a claim must vary only what it
names. So rows in another order, or alone, run the same code.
"""

import platform

from tracekit.errors import Unavailable, Unsupported
from tracekit.model import AttentionCall, DType, ExecutedIdentity, KVFamily
from tracekit.providers.base import Answer, Capabilities, Launch, Tensors, refusal
from tracekit.verdict import ClaimId


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
        from tracekit.providers.torch_batch import from_batch, padded_batch

        batch = padded_batch(call)
        with self._torch.no_grad():
            out, lse = self._torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                batch.q, batch.k, batch.v, 0.0, False, attn_mask=batch.mask, scale=call.conventions.scale
            )
        return from_batch(call, batch, out, lse)
