"""Which Megatron-core, torch and processor run here, as far as they can change a bit."""

from functools import cache

from tracekit.model import ExecutedIdentity
from tracekit.providers.torch_identity import executed_by_torch

DOT_PRODUCT = "megatron.dot_product"


@cache
def megatron_version() -> str:
    """The version of Megatron-core."""
    from megatron.core import __version__

    return str(__version__)


def engine_name() -> str:
    """The engine and its version."""
    return f"megatron-core {megatron_version()}"


def executed(kernel: str, device: str = "cpu") -> ExecutedIdentity:
    """Return what runs here under the name of a kernel, `megatron.dot_product`."""
    return executed_by_torch(kernel, {"megatron-core": megatron_version()}, device)
