"""Goldens of vLLM: real engines on the CPU, with the features that move rows about, on both kernels.

Run in the environment of `make test-engines`, as `make goldens` does. Each golden is recorded twice: on
vLLM's own kernel (`.cpu.h5`) and with TKA-1 as the backend (`.tka1.h5`).
"""

import argparse
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tools.make_goldens import ids
from tools.vllm_here import LLM, SamplingParams
from tracekit.engines import tiny, vllm_backend
from tracekit.recorder.api import record

LIMIT = 500_000
"""Bytes that one golden may have."""

PAGE = 32
CHUNK = 64

# vLLM rotates gpt-oss by YaRN only, as its published checkpoints do.
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 1.0,
    "original_max_position_embeddings": 1024,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}


@dataclass(frozen=True)
class Golden:
    """One engine and the prompts that it is given, a group after the other.

    Args:
        name: stem of the files.
        model: of `tiny.CONFIGS`.
        groups: prompts that run together, and new tokens of each.
        layers: layers to keep.
        options: of the engine.
    """

    name: str
    model: str
    groups: tuple[tuple[tuple[tuple[int, ...], ...], int], ...]
    layers: tuple[int, ...]
    options: dict[str, Any] = field(default_factory=dict)


_SHARED = ids(60, 7)

GOLDENS = (
    # Four pages for two requests that grow past two pages each: one of them is preempted, and computed again.
    # A prompt of 80 is cut at 64 rows beside a short one; the last one begins with a page that is cached.
    Golden(
        "vllm-qwen3",
        "tiny-qwen3",
        (((_SHARED, ids(58, 11)), 9), ((ids(7, 5), ids(80, 13)), 3), ((ids(80, 13)[:40] + ids(9, 3),), 2)),
        (0,),
        {"num_gpu_blocks_override": 5, "max_model_len": 96},
    ),
    # Sinks, and a window of 16 rows behind which pages are given to later rows.
    Golden("vllm-gpt-oss", "tiny-gpt-oss", (((ids(150, 17), ids(9, 5)), 3),), (0, 1)),
)


def engine(golden: Golden) -> Any:
    return LLM(
        model=str(tiny.prepared(golden.model)),
        **{
            "enforce_eager": True,
            "skip_tokenizer_init": True,
            "max_model_len": 256,
            "max_num_seqs": 4,
            "max_num_batched_tokens": CHUNK,
            "block_size": PAGE,
            "dtype": "bfloat16",
            "seed": 0,
            "enable_prefix_caching": True,
            "hf_overrides": {"rope_parameters": _YARN} if golden.model == "tiny-gpt-oss" else {},
            **golden.options,
        },
    )


def make(golden: Golden, path: Path) -> None:
    llm = engine(golden)
    with record(path, engine="vllm", llm=llm, layers=golden.layers, force=True) as session:
        for prompts, tokens in golden.groups:
            sampling = SamplingParams(max_tokens=tokens, temperature=0, detokenize=False, ignore_eos=True)
            llm.generate([{"prompt_token_ids": list(p)} for p in prompts], sampling, use_tqdm=False)
    size = path.stat().st_size
    print(f"{path.name}: {session.recorded} calls, {size:,} bytes", file=sys.stderr)
    if session.problems or size > LIMIT:
        raise SystemExit(f"{path.name}: {session.problems or f'more than {LIMIT:,} bytes'}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "traces", metavar="DIR")
    options = parser.parse_args()
    # The model of experts first: vLLM makes its process groups once a process, and those serve both.
    for golden in GOLDENS[::-1]:
        make(golden, options.out / f"{golden.name}.cpu.h5")
        vllm_backend.register()
        make(golden, options.out / f"{golden.name}.tka1.h5")
        vllm_backend.unregister()


if __name__ == "__main__":
    main()
