"""Which transformers, torch and processor run here, as far as they can change a bit."""

import transformers

from tracekit.model import ExecutedIdentity
from tracekit.providers.torch_identity import executed_by_torch


def engine_name() -> str:
    """The engine and its version."""
    return f"transformers {transformers.__version__}"


def executed(kernel: str, device: str = "cpu") -> ExecutedIdentity:
    """Return what runs here under the name of a kernel, `transformers.sdpa`."""
    return executed_by_torch(kernel, {"transformers": transformers.__version__}, device)
