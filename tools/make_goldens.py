"""Make the goldens of `traces/` again: with the engine's own kernel, and most also through TKA-1.

`--check` makes them into a temporary folder and compares content digests with those that are committed.
The attention of a `.tka1` golden has the same bits everywhere, but q, k and v come out of torch's matrix
products, which have their own bits for each instruction set: make goldens on the machine kind that their
provenance names.
"""

import argparse
import fnmatch
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tracekit.engines.driver import run_transformers
from tracekit.engines.models import load_model
from tracekit.store import open_trace

LIMIT = 1_000_000
"""Bytes that one golden may have."""

TEXT = (
    "A golden trace keeps what an attention kernel was given and what it answered, row by row. "
    "Replay runs the kernel again and compares bits: the same row must give the same bits whatever "
    "stands beside it in the batch. A promise that was not tested is never reported as kept. "
    "The first difference has a place, and the place has a request, a position, a layer, a head "
    "and an element."
)


@dataclass(frozen=True)
class Golden:
    """One input, recorded through two kernels.

    Args:
        name: stem of the files.
        model: for `load_model`.
        prompts: text or token ids.
        tokens: new tokens; 1 is the prefill alone.
        layers: layers to keep.
        kernel: the engine's own kernel.
        backend: whether it is also recorded with TKA-1 as the backend of the engine.
        steps: steps to keep; None keeps all.
    """

    name: str
    model: str
    prompts: tuple[str | tuple[int, ...], ...]
    tokens: int
    layers: tuple[int, ...]
    kernel: str = "sdpa"
    steps: tuple[int, ...] | None = None
    backend: bool = True


def ids(count: int, step: int) -> tuple[int, ...]:
    """Token ids of the tiny models that do not repeat too soon; 0, 1, 2 are special there."""
    return tuple(3 + (17 + step * i * i) % 250 for i in range(count))


GOLDENS = (
    Golden("smollm2-prefill", "smollm2", (TEXT,), 1, (0, 15)),
    Golden("smollm2-decode", "smollm2", (TEXT,), 25, (0, 29)),
    Golden("qwen3-batch", "tiny-qwen3", (ids(9, 5), ids(40, 7), ids(23, 11)), 9, (0, 1)),
    Golden("gpt-oss", "tiny-gpt-oss", (ids(30, 13),), 13, (0, 1), kernel="eager"),
    # Past position 127, where the first C128 row appears and the window begins to drop rows.
    Golden("deepseek-v4", "tiny-deepseek-v4", (ids(126, 19),), 5, (0, 1, 2), kernel="eager", backend=False),
)


def make(golden: Golden, folder: Path) -> list[Path]:
    """Record a golden through both kernels, fed with the same tokens."""
    model, tokenizer = load_model(golden.model)
    prompts = [tokenizer(p)["input_ids"] if isinstance(p, str) else list(p) for p in golden.prompts]
    paths, forced = [], None
    kernels = [(golden.kernel, golden.kernel), ("tracekit", "tka1")]
    for kernel, suffix in kernels if golden.backend else kernels[:1]:
        path = folder / f"{golden.name}.{suffix}.h5"
        summary = run_transformers(
            model,
            prompts,
            out=path,
            max_new_tokens=golden.tokens,
            attn_implementation=kernel,
            layers=golden.layers,
            steps=golden.steps,
            forced=forced,
            force=True,
        )
        # The second kernel reads what the first one chose, whatever it would have chosen itself.
        longest = max(map(len, summary.generated))
        forced = [list(tokens) + [0] * (longest - len(tokens)) for tokens in summary.generated]
        size = path.stat().st_size
        print(f"{path.name}: {summary.calls} calls, {size:,} bytes", file=sys.stderr)
        if size > LIMIT:
            raise SystemExit(
                f"{path.name} has {size:,} bytes; a golden has at most {LIMIT:,}: take fewer layers"
            )
        paths.append(path)
    return paths


def check(goldens: list[Golden], committed: Path) -> int:
    """Make goldens anew and compare content digests; 1 when one through TKA-1 differs."""
    status = 0
    with tempfile.TemporaryDirectory() as folder:
        for golden in goldens:
            for path in make(golden, Path(folder)):
                ours = committed / path.name
                same = ours.is_file() and digest(ours) == digest(path)
                print(
                    f"{path.name}: {'same content' if same else 'DIFFERS' if ours.is_file() else 'MISSING'}"
                )
                if not same and path.name.endswith(".tka1.h5"):
                    status = 1
    return status


def digest(path: Path) -> str:
    with open_trace(path) as trace:
        return str(trace.content_digest)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="*", metavar="GLOB", help="goldens by name, such as 'smollm2-*'")
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "traces", metavar="DIR")
    parser.add_argument("--check", action="store_true", help="compare with DIR instead of writing it")
    options = parser.parse_args()
    goldens = [golden for golden in GOLDENS if fnmatch.fnmatch(golden.name, options.only)]
    if not goldens:
        parser.error(f"--only {options.only} matches none of {', '.join(golden.name for golden in GOLDENS)}")
    if options.check:
        return check(goldens, options.out)
    options.out.mkdir(parents=True, exist_ok=True)
    for golden in goldens:
        make(golden, options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
