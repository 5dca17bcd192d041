"""What a rollout and the recompute of the same rows have in common, on one engine and one set of weights.

`python -m tools.findings.rollout_recompute` generates 8 tokens after a prompt of 24, with a cache (a prefill,
then decodes), then runs prompt and tokens once more as one forward without a cache, and compares every row by
position. For each layer and tensor it prints how many of the elements differ.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from tracekit.compare.alignment import align
from tracekit.compare.layer_diff import layer_parts
from tracekit.compare.layer_view import LayerView
from tracekit.engines import tiny, transformers_backend
from tracekit.engines.driver import greedy
from tracekit.model import AttentionCall, Recording
from tracekit.recorder.api import record

PROMPT, TOKENS = 24, 9
RUNS = (
    ("tiny-qwen3", "sdpa"),
    ("tiny-qwen3", "eager"),
    ("tiny-qwen3", "tracekit"),
    ("tiny-gpt-oss", "eager"),
    ("tiny-gpt-oss", "tracekit"),
    ("tiny-deepseek-v4", "eager"),
)
Recorded = tuple[Recording, list[AttentionCall]]
TENSORS = ("q", "keys", "values", "selection set", "out")


def main() -> None:
    torch.set_num_threads(1)
    transformers_backend.register()
    print("| model | attention | layer | " + " | ".join(TENSORS) + " |")
    print("|---|---|---|" + "---|" * len(TENSORS))
    for name, attention in RUNS:
        model = tiny.build(name)
        model.set_attn_implementation(attention)
        for line in compared(model):
            print(f"| {name} | {attention} | {line} |")


def compared(model: Any) -> list[str]:
    """Roll out and recompute on a model of transformers."""
    prompt = np.random.default_rng(0).integers(3, tiny.VOCABULARY, PROMPT).tolist()
    tokens: list[list[int]] = []
    rollout = recorded(lambda: tokens.extend(greedy(model, [prompt], TOKENS)), model=model)
    ids = torch.tensor([prompt + tokens[0][:-1]])

    def again() -> None:
        with torch.no_grad():
            model(input_ids=ids, use_cache=False)

    return differing(rollout, recorded(again, model=model))


def differing(rollout: Recorded, recompute: Recorded) -> list[str]:
    """One line a layer: how many elements of each tensor differ, of those compared by position."""
    pairs = align(rollout[0].requests, recompute[0].requests)
    ours, theirs = (LayerView.of_trace(calls) for _, calls in (rollout, recompute))
    lines = []
    for layer, rank in sorted(ours):
        parts = {p.tensor: p for p in layer_parts(layer, ours[layer, rank], theirs[layer, rank], pairs)}
        told = [f"{parts[t].differences.elements:,} of {parts[t].compared.elements:,}" for t in TENSORS]
        lines.append(f"{layer} | " + " | ".join(told))
    return lines


def recorded(action: Callable[[], object], **where: Any) -> Recorded:
    """Record what an action does, in memory.

    Args:
        action: runs the engine.
        where: the engine, as for `tracekit.record`.
    """
    kept: list[Recorded] = []

    def write(_: Any, recording: Recording, calls: list[AttentionCall], **__: Any) -> None:
        kept.append((recording, calls))

    with record("unused.h5", write=write, **where):
        action()
    return kept[0]


if __name__ == "__main__":
    main()
