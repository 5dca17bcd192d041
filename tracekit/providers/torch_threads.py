"""The threads of torch's CPU kernels, which are a setting of the process and must be given back."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def kernel_threads(count: int = 0) -> Iterator[None]:
    """Run a block with `count` threads (0 leaves them as they are); the number before comes back."""
    before = torch.get_num_threads()
    try:
        if count:
            torch.set_num_threads(count)
        yield
    finally:
        torch.set_num_threads(before)
