"""`megatron`: Megatron-core's own `DotProductAttention`, run again without a model or a process group."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from tracekit.errors import Unsupported
from tracekit.model import AttentionCall, Bits, DType, ExecutedIdentity, KVFamily
from tracekit.providers.base import Answer, Capabilities, Launch, Tensors, refusal
from tracekit.providers.engines import need_megatron
from tracekit.providers.megatron_gradients import gradients, leaves
from tracekit.providers.megatron_identity import DOT_PRODUCT, executed
from tracekit.providers.megatron_launch import (
    Arguments,
    fresh,
    reads_nothing,
    relaunch,
    scale_fits,
    unusable,
)
from tracekit.providers.torch_tensors import from_torch
from tracekit.providers.torch_threads import kernel_threads
from tracekit.verdict import ClaimId


class Megatron:
    """The core attention of the installed Megatron-core.

    Raises:
        Unavailable: `P-MEGATRON` when it is not installed.
    """

    id = "megatron"

    def __init__(self) -> None:
        need_megatron()

    def capabilities(self) -> Capabilities:
        """One dense family, lists (as a mask), sinks; no LSE; scores and P in the dtype of the call."""
        own = {DType.BFLOAT16: DType.BFLOAT16, DType.FLOAT16: DType.FLOAT16}
        return Capabilities(
            dtypes=frozenset({DType.BFLOAT16, DType.FLOAT16, DType.FLOAT32}),
            families=frozenset({KVFamily.DENSE}),
            lists=True,
            sink=True,
            lse=False,
            max_head_dim=1024,
            score_dtype=own,
            probability_dtype=own,
            grad=True,
        )

    def advertised(self) -> frozenset[ClaimId]:
        """The same launch again; nothing about other batches (docs/findings.md)."""
        return frozenset({"rerun", "recorded"})

    def identity(self) -> ExecutedIdentity:
        """What runs here."""
        return executed(DOT_PRODUCT)

    def refuses(self, call: AttentionCall) -> str | None:
        """Return why it cannot run a call."""
        if reason := refusal(self.capabilities(), call):
            return reason
        if call.head_dim != call.value_dim:
            return f"it does not take values of {call.value_dim} beside keys of {call.head_dim}"
        if reads_nothing(call):
            return "a row without keys, for which Megatron reads every key"
        plan = call.launch
        if plan is None or plan.kernel != DOT_PRODUCT:
            return None
        return unusable(call, plan) or (
            None if scale_fits(call, plan) else "its launch plan has another scale than the call"
        )

    def run(self, launch: Launch) -> Answer:
        """Run each call as one launch: the recorded one where the call has its plan, else a fresh batch.

        Raises:
            Unsupported: `P-REFUSED`.
        """
        with kernel_threads(launch.execution.threads), _without_a_group():
            tensors = tuple(self._run(call, launch.execution.grad) for call in launch.calls)
        return Answer(tensors, self.identity())

    def _run(self, call: AttentionCall, grad: bool) -> Tensors:
        if reason := self.refuses(call):
            raise Unsupported(f"{self.id} cannot run this call: {reason}.", rule="P-REFUSED")
        plan = call.launch
        planned = plan is not None and plan.kernel == DOT_PRODUCT
        arguments = relaunch(call, plan) if planned and plan is not None else fresh(call)
        if grad:
            for leaf in leaves(arguments):
                leaf.requires_grad_()
        module = _module(call, arguments)
        with torch.set_grad_enabled(arguments.query.requires_grad):
            out = module(arguments.query, arguments.key, arguments.value, arguments.mask)
        data, dtype = from_torch(out.reshape(*out.shape[:2], call.num_heads, -1), "out")
        b, s = np.divmod(arguments.row_slots, data.shape[0])
        grads = gradients(call, arguments, out) if grad and call.grads is not None else None
        return Tensors(Bits(data[s, b], dtype), None, grads)


def _module(call: AttentionCall, arguments: Arguments) -> Any:
    """Make the module that the launch ran, over the heads of the call: one rank's are all that it sees."""
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.transformer_config import TransformerConfig

    scalars = arguments.scalars
    config = TransformerConfig(
        num_layers=1,
        hidden_size=call.num_heads * call.head_dim,
        num_attention_heads=call.num_heads,
        num_query_groups=call.num_kv_heads,
        kv_channels=call.head_dim,
        attention_dropout=0.0,
        bf16=scalars["input_dtype"] == DType.BFLOAT16,
        fp16=scalars["input_dtype"] == DType.FLOAT16,
        attention_softmax_in_fp32=bool(scalars["softmax_in_fp32"]),
        masked_softmax_fusion=False,
    )
    group = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
    module = DotProductAttention(
        config,
        layer_number=1,
        attn_mask_type=AttnMaskType.causal,
        attention_type="self",
        softmax_scale=scalars["softmax_scale"],
        pg_collection=SimpleNamespace(tp=group),
    )
    module.scale_mask_softmax.scale = scalars["softmax_coefficient"]
    module.softmax_offset = arguments.sink
    return module


class _Buffers:
    """Megatron's buffer of scores, whose content no product reads (`beta=0`), made where the operands are."""

    def get_tensor(self, shape: Any, dtype: torch.dtype, *_: Any) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype)


@contextmanager
def _without_a_group() -> Iterator[None]:
    """Stand in for what Megatron keeps for a process that trains: a buffer, and states of CUDA generators."""
    from megatron.core import parallel_state, tensor_parallel

    tracker = SimpleNamespace(fork=nullcontext)
    with ExitStack() as stack:
        for owner, name, value in (
            (parallel_state, "_GLOBAL_MEMORY_BUFFER", _Buffers()),
            (tensor_parallel, "get_cuda_rng_tracker", lambda: tracker),
        ):
            stack.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, value)
        yield
