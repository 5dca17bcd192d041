"""Find a provider by name: built in, installed by another package, or `package.module:factory`."""

import difflib
import importlib
from collections.abc import Mapping
from functools import cache
from importlib.metadata import entry_points

from tracekit.errors import UsageError
from tracekit.providers.base import Provider

BUILTIN: Mapping[str, str] = {
    "trace": "tracekit.providers.recorded_answer:RecordedAnswer",
    "tka1": "tracekit.providers.portable:Tka1",
    "tka1-numpy": "tracekit.providers.portable:Tka1Numpy",
    "tka1-cuda": "tracekit.providers.tka1_gpu:Tka1Cuda",
    "tka1-hip": "tracekit.providers.tka1_gpu:Tka1Hip",
    "oracle": "tracekit.providers.oracle:Oracle",
    "torch-flash-cpu": "tracekit.providers.torch_flash_cpu:TorchFlashCpu",
    "torch-flash-cuda": "tracekit.providers.torch_cuda:TorchFlash",
    "torch-efficient-cuda": "tracekit.providers.torch_cuda:TorchEfficient",
    "torch-cudnn": "tracekit.providers.torch_cuda:TorchCudnn",
    "vllm-triton": "tracekit.providers.vllm_triton:VllmTriton",
    "flash-attn": "tracekit.providers.flash_attn:FlashAttn",
    "flashinfer": "tracekit.providers.flashinfer:FlashInfer",
    "flash-mla": "tracekit.providers.flash_mla:FlashMla",
    "aiter": "tracekit.providers.aiter:Aiter",
    "megatron": "tracekit.providers.megatron:Megatron",
    "transformers": "tracekit.providers.transformers:Transformers",
    "vllm-cpu": "tracekit.providers.vllm_cpu:VllmCpu",
    "vllm-cpu-nosplit": "tracekit.providers.vllm_cpu:VllmCpuNoSplit",
    "vllm-dsv4-cpu": "tracekit.providers.vllm_dsv4:VllmDsv4",
    "vllm-mla-cpu": "tracekit.providers.vllm_mla:VllmMla",
}
"""Provider id -> `module:factory`; the module is imported only when the provider is made."""

GROUP = "tracekit.providers"

_BY_SIGNATURE = "by signature, untested on hardware"

UNTESTED: Mapping[str, str] = {
    "tka1-cuda": "untested on hardware",
    "tka1-hip": "untested on hardware",
    "torch-flash-cuda": _BY_SIGNATURE,
    "torch-efficient-cuda": _BY_SIGNATURE,
    "torch-cudnn": _BY_SIGNATURE,
    "vllm-triton": _BY_SIGNATURE,
    "flash-attn": _BY_SIGNATURE,
    "flashinfer": _BY_SIGNATURE,
    "flash-mla": _BY_SIGNATURE,
    "aiter": _BY_SIGNATURE,
}
"""Providers that no kept evidence of a device names (traces/evidence), and what is said of them."""

KERNELS: Mapping[str, str] = {
    "tka1": "tka1",
    "megatron.dot_product": "megatron",
    "torch.flash_cpu": "torch-flash-cpu",
    "transformers.eager": "transformers",
    "transformers.sdpa": "transformers",
    "vllm.cpu_attention": "vllm-cpu",
    "vllm.cpu_attention.nosplit": "vllm-cpu-nosplit",
    "vllm.flash_mla_cpu": "vllm-dsv4-cpu",
    "vllm.mla_decode_kvcache": "vllm-mla-cpu",
}
"""Recorded kernel -> the provider that runs it again."""


@cache
def names() -> dict[str, str]:
    """Return every provider id that has a name here, with its `module:factory`."""
    found = dict(BUILTIN)
    for entry in entry_points(group=GROUP):
        found.setdefault(entry.name, entry.value)
    return found


def create(spec: str) -> Provider:
    """Make a provider.

    Args:
        spec: an id of `names()`, or `package.module:factory`.

    Raises:
        UsageError: `P-UNKNOWN` for no such id, `P-IMPORT` for a factory that cannot be imported,
            `P-PROTOCOL` for one that makes no provider.
        Unavailable: what the provider needs is not installed.
    """
    target = check(spec)
    module, _, attribute = target.partition(":")
    try:
        factory = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise UsageError(
            f"provider {spec} cannot be imported from {target}: {error}. "
            "Install the package that holds it, or correct the name.",
            rule="P-IMPORT",
            provider=spec,
            target=target,
        ) from error
    provider = factory()
    if not isinstance(provider, Provider):
        raise UsageError(
            f"{target} gives a {type(provider).__name__}, which is no provider; "
            "it needs id, capabilities, advertised, identity, refuses and run (docs/verdicts.md).",
            rule="P-PROTOCOL",
            provider=spec,
        )
    return provider


def check(spec: str) -> str:
    """Return the `module:factory` of a spec, importing nothing.

    Raises:
        UsageError: `P-UNKNOWN`.
    """
    known = names()
    if spec in known:
        return known[spec]
    module, colon, attribute = spec.partition(":")
    if colon and module and attribute:
        return spec
    close = difflib.get_close_matches(spec, known, 1)
    hint = f" Did you mean {close[0]}?" if close else ""
    raise UsageError(
        f"there is no provider {spec!r}; there are {', '.join(sorted(known))}, "
        f"and package.module:factory for your own.{hint}",
        rule="P-UNKNOWN",
        provider=spec,
        valid=sorted(known),
    )


def label(spec: str) -> str:
    """Return what must be said beside every verdict on a provider, or an empty text."""
    return UNTESTED.get(spec, "")


def is_own(spec: str) -> bool:
    """Whether a spec is a `package.module:factory` of the user: no name of `names()`, no part of tracekit."""
    return ":" in spec and spec not in names() and spec.split(".")[0] != __name__.split(".")[0]


def for_kernel(kernel: str) -> str | None:
    """Return the id of the provider that runs a recorded kernel again, or None."""
    return KERNELS.get(kernel)
