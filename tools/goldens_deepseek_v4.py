"""Goldens of DeepSeek-V4 in vLLM: the tiny model of the tests, on vLLM's own kernel.

Run in the environment of `make test-engines`, as `make goldens` does. Each golden has a process of its own:
an engine belongs to its process.
"""

import argparse
import subprocess
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


def make(name: str, path: Path) -> None:
    """Record one golden; once in a process."""
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


def main() -> None:
    """Record all of them, or the one that is named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=GOLDENS)
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "traces", metavar="DIR")
    options = parser.parse_args()
    if options.only:
        return make(options.only, options.out / f"{options.only}.h5")
    for name in GOLDENS:
        module = "tools.goldens_deepseek_v4"
        subprocess.run([sys.executable, "-m", module, "--only", name, "--out", options.out], check=True)
    return None


if __name__ == "__main__":
    main()
