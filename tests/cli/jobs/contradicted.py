"""A program whose kernel is not what it declares: it doubles the scores."""

import torch
from transformers import AttentionInterface

from tracekit.engines import tiny

torch.set_num_threads(1)
table = AttentionInterface._global_mapping
sdpa = table["sdpa"]
table["sdpa"] = lambda module, q, *rest, **kwargs: sdpa(module, q * 2, *rest, **kwargs)
with torch.no_grad():
    tiny.build("tiny-qwen3")(torch.tensor([[5, 6, 7, 8, 9, 10]]))
