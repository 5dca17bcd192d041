"""A program of a user that knows nothing of recording: a tiny GPT, forward and backward."""

import torch

from tests.engines_megatron.conftest import padded
from tracekit.engines import megatron_tiny as tiny


def main():
    torch.set_num_threads(1)
    with tiny.on_cpu():
        padded(12, 5).train(tiny.gpt())


if __name__ == "__main__":
    main()
