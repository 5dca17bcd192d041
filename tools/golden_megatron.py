"""Make `traces/gpt-train.megatron.h5` again; runs in the engines' environment (docs/engines.md).

Two training steps of a tiny GPT with learned sinks: a padded batch, then three documents in one batch place.
Each call has dO and the gradients of q, keys, values and sink. As for other goldens of an engine's own
kernel, its bits are those of the machine kind that its provenance names.
"""

import argparse
import sys
from pathlib import Path

import torch

from tools.make_goldens import ids
from tracekit.engines import megatron_tiny as tiny
from tracekit.recorder.api import record

NAME = "gpt-train.megatron.h5"
LIMIT = 400_000
"""Bytes that it may have."""


def padded(prompts: list[tuple[int, ...]]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens, positions, mask, and which slots hold a token; right-padded."""
    room = max(map(len, prompts))
    tokens = torch.tensor([list(p) + [0] * (room - len(p)) for p in prompts])
    real = torch.tensor([[s < len(p) for s in range(room)] for p in prompts])
    return tokens, torch.arange(room).expand_as(tokens), tiny.causal(room) | ~real[:, None, None], real


def documents(
    prompts: list[tuple[int, ...]],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The same of one batch place that packs them: positions restart, and the mask keeps them apart."""
    tokens = torch.tensor([[token for p in prompts for token in p]])
    positions = torch.cat([torch.arange(len(p)) for p in prompts])[None]
    owner = torch.repeat_interleave(torch.arange(len(prompts)), torch.tensor([len(p) for p in prompts]))
    mask = tiny.causal(len(owner)) | (owner[:, None] != owner[None])
    return tokens, positions, mask, torch.ones_like(tokens, dtype=torch.bool)


def make(folder: Path) -> Path:
    """Record the golden into a folder."""
    torch.set_num_threads(1)
    batches = (padded([ids(31, 5), ids(12, 7)]), documents([ids(9, 11), ids(20, 13), ids(5, 17)]))
    with tiny.on_cpu():
        model = tiny.gpt(softmax_type="learnable").train()
        with record(folder / NAME, engine="megatron", model=model, force=True) as session:
            session.notes["driver"] = "tools.golden_megatron"
            for tokens, positions, mask, real in batches:
                model.zero_grad(set_to_none=True)
                logits = model(tokens, positions, mask)
                targets = tokens.roll(-1, 1)[real]
                torch.autograd.backward(torch.nn.functional.cross_entropy(logits[real].float(), targets))
    if session.problems:
        raise SystemExit(f"{NAME} is not whole: {session.problems}")
    return folder / NAME


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "traces", metavar="DIR")
    path = make(parser.parse_args().out)
    size = path.stat().st_size
    print(f"{NAME}: {size:,} bytes", file=sys.stderr)
    if size > LIMIT:
        raise SystemExit(f"{NAME} has at most {LIMIT:,} bytes; take shorter prompts")
    return 0


if __name__ == "__main__":
    sys.exit(main())
