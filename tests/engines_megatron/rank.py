"""One tensor parallel rank over gloo, on its share of given weights.

`python -m tests.engines_megatron.rank RANK RANKS PORT WEIGHTS TRACE [whole]`: one forward and backward, or
with `whole` two optimizer steps whose layers are all checkpointed.
"""

import sys

import torch

from tests.engines_megatron.conftest import WHOLE, padded, train_steps
from tracekit.engines import megatron_tiny as tiny
from tracekit.recorder.api import record


def share(name, parameter, whole, rank, ranks):
    """The part of a whole weight that Megatron gives to a rank."""
    if name.endswith("softmax_offset"):
        return whole.chunk(ranks)[rank]
    if not getattr(parameter, "tensor_model_parallel", False):
        return whole
    dim, stride = parameter.partition_dim, parameter.partition_stride
    return torch.cat(whole.chunk(ranks * stride, dim)[rank::ranks], dim)


def main():
    rank, ranks, port = map(int, sys.argv[1:4])
    torch.set_num_threads(1)
    weights = torch.load(sys.argv[4], weights_only=True)
    options = WHOLE if sys.argv[6:] == ["whole"] else {}
    with tiny.on_cpu(rank, ranks, port):
        model = tiny.gpt(softmax_type="learnable", **options)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(share(name, parameter, weights[name], rank, ranks))
        with record(sys.argv[5], engine="megatron", model=model) as session:
            if options:
                train_steps(model, padded, (12, 5))
            else:
                padded(12, 5).train(model)
    assert session.problems == [], session.problems


if __name__ == "__main__":
    main()
