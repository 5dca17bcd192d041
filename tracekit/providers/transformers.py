"""`transformers`: the engine's own attention functions, eager and sdpa, run again."""

import importlib
import re
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import torch

from tracekit.errors import Unsupported
from tracekit.model import AttentionCall, Bits, DType, ExecutedIdentity
from tracekit.providers.base import Answer, Capabilities, Launch, Tensors, refusal
from tracekit.providers.torch_tensors import from_torch
from tracekit.providers.torch_threads import kernel_threads
from tracekit.providers.transformers_identity import executed
from tracekit.providers.transformers_launch import Arguments, fresh, relaunch
from tracekit.providers.transformers_plan import unusable
from tracekit.verdict import ClaimId

Implementation = Literal["sdpa", "eager"]
_MODULE = re.compile(r"(transformers\.models\.\w+\.modeling_\w+)\.\w+", re.ASCII)
_PREFIX = "transformers."


class Transformers:
    """The attention functions of the installed transformers.

    A call that transformers made is run by the function that ran it; any other by sdpa, or by the eager
    function of gpt-oss where it has a sink.

    Args:
        implementation: run this one, whatever the call says.
    """

    id = "transformers"

    def __init__(self, implementation: Implementation | None = None) -> None:
        self._implementation = implementation

    def capabilities(self) -> Capabilities:
        """Any families and lists (as a mask), sinks by eager; no LSE; low-precision scores in eager."""
        own = {DType.BFLOAT16: DType.BFLOAT16, DType.FLOAT16: DType.FLOAT16}
        return Capabilities(
            dtypes=frozenset({DType.BFLOAT16, DType.FLOAT16, DType.FLOAT32}),
            two_families=True,
            lists=True,
            sink=self._implementation != "sdpa",
            lse=False,
            max_head_dim=1024,
            score_dtype={} if self._implementation == "sdpa" else own,
            probability_dtype=own,
        )

    def advertised(self) -> frozenset[ClaimId]:
        """The same launch again; nothing about other batches."""
        return frozenset({"rerun", "recorded"})

    def identity(self) -> ExecutedIdentity:
        """What would run for a call that no transformers made; an answer says what ran for its calls."""
        return executed(f"{_PREFIX}{self._implementation or 'sdpa'}")

    def roundings(self, call: AttentionCall) -> tuple[DType, DType]:
        """Scores in FP32 by sdpa, in the dtype of the call by eager; P in the dtype of the call."""
        return (DType.FLOAT32 if self._chosen(call) == "sdpa" else call.dtype), call.dtype

    def refuses(self, call: AttentionCall) -> str | None:
        """Return why it cannot run a call."""
        if reason := refusal(self.capabilities(), call):
            return reason
        if call.sink is not None and self._chosen(call) == "sdpa":
            return "its sdpa function leaves out an attention sink"
        if call.provenance.executed.kernel == f"{_PREFIX}eager" and _eager_module(call) is None:
            module = call.provenance.details.get("module", "its model")
            return f"the eager function of {module} is not in transformers"
        if self._is_planned(call) and call.launch is not None:
            return unusable(call, call.launch)
        return None

    def run(self, launch: Launch) -> Answer:
        """Run each call as one launch: the recorded one where the call has its plan, else a fresh batch.

        Raises:
            Unsupported: `P-REFUSED`.
        """
        with kernel_threads(launch.execution.threads):
            tensors = tuple(self._run(call) for call in launch.calls)
        kernels = {self._chosen(call) for call in launch.calls} or {self._implementation or "sdpa"}
        return Answer(tensors, executed(f"{_PREFIX}{'+'.join(sorted(kernels))}"))

    def _run(self, call: AttentionCall) -> Tensors:
        if reason := self.refuses(call):
            raise Unsupported(f"{self.id} cannot run this call: {reason}.", rule="P-REFUSED")
        implementation = self._chosen(call)
        if call.launch is not None and self._is_planned(call):
            arguments = relaunch(call, call.launch)
        else:
            arguments = fresh(call, implementation)
        with torch.set_grad_enabled(arguments.q.requires_grad):
            out = self._function(call, implementation)(
                arguments.module, arguments.q, arguments.k, arguments.v, arguments.mask, **arguments.kwargs
            )[0]
        return Tensors(_rows(out, arguments), None)

    def _is_planned(self, call: AttentionCall) -> bool:
        return call.launch is not None and call.launch.kernel == f"{_PREFIX}{self._chosen(call)}"

    def _chosen(self, call: AttentionCall) -> Implementation:
        if self._implementation is not None:
            return self._implementation
        kernel = call.provenance.executed.kernel
        if kernel == f"{_PREFIX}sdpa":
            return "sdpa"
        return "eager" if kernel == f"{_PREFIX}eager" or call.sink is not None else "sdpa"

    def _function(self, call: AttentionCall, implementation: Implementation) -> Callable[..., Any]:
        if implementation == "sdpa":
            module, name = "transformers.integrations.sdpa_attention", "sdpa_attention_forward"
        else:
            module, name = _eager_module(call) or "", "eager_attention_forward"
        function: Callable[..., Any] = getattr(importlib.import_module(module), name)
        return function


def _eager_module(call: AttentionCall) -> str | None:
    """The module of the call's eager function. A trace is data: only models of transformers are imported."""
    if call.provenance.executed.kernel != f"{_PREFIX}eager":
        model = "llama" if call.sink is None else "gpt_oss"
        return f"transformers.models.{model}.modeling_{model}"
    found = _MODULE.fullmatch(call.provenance.details.get("module", ""))
    if found is None:
        return None
    name = found[1]
    try:
        module = importlib.import_module(name)
    except ImportError:
        return None
    return name if hasattr(module, "eager_attention_forward") else None


def _rows(out: torch.Tensor, arguments: Arguments) -> Bits:
    """Take the rows of the call out of `[B, S, H, Dv]`."""
    data, dtype = from_torch(out, "out")
    b, s = np.divmod(arguments.row_slots, data.shape[1])
    return Bits(data[b, s], dtype)
