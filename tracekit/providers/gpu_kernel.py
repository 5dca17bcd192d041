"""What the providers of GPU libraries share: each is known by its signature, and says so.

A kernel of these was written against the sources of its library and has not run on hardware here; until
`python -m tools.gpu_acceptance` ran it, every verdict on it says so (`registry.UNTESTED`).
"""

import inspect
from collections.abc import Callable
from importlib import import_module, metadata
from typing import Any, ClassVar

import torch

from tracekit.errors import Unavailable, Unsupported
from tracekit.model import AttentionCall, DType, ExecutedIdentity, KVFamily
from tracekit.providers.base import Answer, Capabilities, Launch, Tensors, refusal
from tracekit.providers.torch_identity import executed_by_torch
from tracekit.providers.torch_threads import kernel_threads
from tracekit.providers.vllm_cpu_launch import not_causal
from tracekit.verdict import ClaimId


class GpuKernel:
    """A kernel of a library, on torch's device.

    A subclass gives the class variables, `_run`, and `_load` where it imports something.

    Raises:
        Unavailable: `P-DEVICE` without a GPU, `P-LIBRARY` without the library, `P-SIGNATURE` where it takes
            other arguments than those that this file was written for.
    """

    id: ClassVar[str]
    kernel: ClassVar[str]
    distribution: ClassVar[str] = "torch"
    head_dims: ClassVar[tuple[int, int]] = (8, 256)
    """The multiple of which D must be, and the largest."""
    sink: ClassVar[bool] = False
    lse: ClassVar[bool] = True
    dtypes: ClassVar[frozenset[DType]] = frozenset({DType.BFLOAT16, DType.FLOAT16})
    promises: ClassVar[frozenset[ClaimId]] = frozenset()
    """Claims that the documentation of the library makes; the class docstring cites it."""
    device: str = "cuda"

    def __init__(self) -> None:
        if self.device == "cuda" and not torch.cuda.is_available():
            raise Unavailable(
                f"{self.id} needs a GPU that torch {torch.__version__} sees, and there is none here.",
                rule="P-DEVICE",
                provider=self.id,
            )
        self._load()

    def _load(self) -> None:
        """Import what is called, and hold its signature against the one that is relied on."""

    def capabilities(self) -> Capabilities:
        """Dense and windowed causal attention; P meets V in the dtype of Q."""
        return Capabilities(
            dtypes=self.dtypes,
            families=frozenset({KVFamily.DENSE}),
            sink=self.sink,
            lse=self.lse,
            max_head_dim=self.head_dims[1],
            probability_dtype={DType.BFLOAT16: DType.BFLOAT16, DType.FLOAT16: DType.FLOAT16},
            launch_plan=False,
        )

    def advertised(self) -> frozenset[ClaimId]:
        """What its documentation promises; all else is only probed."""
        return self.promises

    def identity(self) -> ExecutedIdentity:
        """The library, torch, and the architecture of the device."""
        libraries = {} if self.distribution == "torch" else {self.distribution: _version(self.distribution)}
        return executed_by_torch(self.kernel, libraries, self.device)

    def refuses(self, call: AttentionCall) -> str | None:
        """Return why it cannot run a call."""
        if reason := refusal(self.capabilities(), call):
            return reason
        if call.value_dim != call.head_dim or call.head_dim % self.head_dims[0]:
            return f"it does not take heads of {call.head_dim} with values of {call.value_dim}"
        if not_causal(call):
            return "it reads every key up to a row's own, or a window of them, and nothing else"
        return None

    def run(self, launch: Launch) -> Answer:
        """Run each call as one launch.

        Raises:
            Unsupported: a call is refused.
        """
        answers = []
        with torch.no_grad(), kernel_threads(launch.execution.threads):
            for call in launch.calls:
                if reason := self.refuses(call):
                    raise Unsupported(f"{self.id} cannot run this call: {reason}.", rule="P-REFUSED")
                answers.append(self._run(call))
        return Answer(tuple(answers), self.identity())

    def _run(self, call: AttentionCall) -> Tensors:
        raise NotImplementedError


def load(provider: type[GpuKernel], target: str, arguments: tuple[str, ...]) -> Callable[..., Any]:
    """Return a function `package.module:name` whose parameters include the given ones.

    Raises:
        Unavailable: `P-LIBRARY` or `P-SIGNATURE`.
    """
    module, _, name = target.partition(":")
    try:
        found = import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except Exception as error:  # a library built for another torch or driver fails on import in its own way
        said = " ".join(str(error).split())[:300]
        raise Unavailable(
            f"{provider.id} needs {module}: {said}. Install {provider.distribution} for this device.",
            rule="P-LIBRARY",
            provider=provider.id,
        ) from error
    function: Callable[..., Any] = found  # type: ignore[assignment]
    try:
        parameters = set(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # it is compiled and does not say what it takes
        parameters = set()
    lacking = [one for one in arguments if one not in parameters]
    if lacking:
        raise Unavailable(
            f"{target} of {provider.distribution} {_version(provider.distribution)} has no argument "
            f"{', '.join(lacking)}; {provider.id} was written for another version (its module says which).",
            rule="P-SIGNATURE",
            provider=provider.id,
            lacking=lacking,
        )
    return function


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "unknown"
