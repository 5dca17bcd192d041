"""The built-in driver: prompts in, greedy decoding, a trace out."""

import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import torch

from tracekit.engines.models import encode, load_model, on_device
from tracekit.errors import UsageError
from tracekit.model import DType
from tracekit.recorder.api import Writer, record

Progress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class RunSummary:
    """What a run of the driver gave.

    Args:
        path: the trace.
        steps: forwards of the model.
        calls: attention calls that were kept.
        requests: sequences.
        generated: the new tokens of each sequence.
        text: the new text of each sequence; empty where the model has no tokenizer.
        problems: why calls are missing, where some are.
        content_digest: of the trace, SHA-256 hexadecimal; empty where another writer does not give it.
    """

    path: Path
    steps: int
    calls: int
    requests: int
    generated: tuple[tuple[int, ...], ...]
    text: tuple[str, ...]
    problems: tuple[str, ...]
    content_digest: str


def run_transformers(
    model: str | Any,
    prompts: Sequence[str | Sequence[int]],
    *,
    out: str | PathLike[str],
    max_new_tokens: int = 16,
    attn_implementation: str | None = None,
    layers: Iterable[int] | None = None,
    steps: Iterable[int] | None = None,
    rows: Iterable[int] | None = None,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    max_size_gb: float | None = None,
    dtype: DType = DType.BFLOAT16,
    forced: Sequence[Sequence[int]] | None = None,
    progress: Progress | None = None,
    force: bool = False,
    write: Writer | None = None,
) -> RunSummary:
    """Record a transformers model on some prompts.

    Args:
        model: a name of `tracekit.engines.models.NAMES`, a checkpoint folder, or a loaded model.
        prompts: text or token ids; several make one left-padded batch.
        out: the trace.
        max_new_tokens: tokens to generate after each prompt; the last of them is never fed back, so 0
            and 1 record the prefill alone.
        attn_implementation: `sdpa`, `eager` or `tracekit`; None takes the model's own choice.
        layers: 0-based layers to keep; None keeps all.
        steps: 0-based steps to keep; None keeps all.
        rows: positions of query rows to keep; this and what follows as in `tracekit.record`.
        include: globs.
        exclude: globs.
        max_size_gb: where the recording ends.
        dtype: of the weights, where the model is loaded here.
        forced: feed these tokens of each sequence instead of the model's own choices, so that two runs
            read the same input although they may choose differently.
        progress: called with (done, total, text) after each forward.
        force: write over a trace that exists.
        write: writes the trace; None takes `tracekit.store.write_trace`.

    Raises:
        UsageError: `E-PROMPT`, `E-TOKENS`, `E-IMPLEMENTATION`.
        Unavailable: `E-MODEL`, `E-SMOLLM2`.
    """
    if max_new_tokens < 0:
        raise UsageError(f"max_new_tokens is at least 0, not {max_new_tokens}.", rule="E-TOKENS")
    tokenizer = None
    if isinstance(model, str):
        model, tokenizer = load_model(model, attn_implementation, dtype)
    elif attn_implementation is not None:
        model.set_attn_implementation(attn_implementation)
    encoded = encode(prompts, tokenizer, model)
    _check_length(model, max(map(len, encoded)), max_new_tokens)
    with record(
        out,
        engine="transformers",
        model=model,
        layers=layers,
        steps=steps,
        rows=rows,
        include=include,
        exclude=exclude,
        max_size_gb=max_size_gb,
        force=force,
        write=write,
        progress=progress,
    ) as session:
        session.notes |= {
            "driver": "run_transformers",
            "attention": str(model.config._attn_implementation),
            "prompts": str(len(encoded)),
            "max_new_tokens": str(max_new_tokens),
            "decoding": "greedy" if forced is None else "forced tokens",
        }
        generated = greedy(model, encoded, max_new_tokens, forced, progress)
    text = () if tokenizer is None else tuple(tokenizer.decode(tokens) for tokens in generated)
    return RunSummary(
        Path(out),
        session.current,
        session.recorded,
        len(encoded),
        tuple(map(tuple, generated)),
        text,
        tuple(session.problems),
        str(getattr(session.written, "content_digest", "")),
    )


def _check_length(model: Any, prompt: int, max_new_tokens: int) -> None:
    most = getattr(model.config, "max_position_embeddings", None)
    if isinstance(most, int) and prompt + max_new_tokens > most:
        raise UsageError(
            f"the model has {most} positions, and the longest prompt takes {prompt}; ask for at most "
            f"{max(most - prompt, 0)} new tokens, not {max_new_tokens}.",
            rule="E-TOKENS",
            positions=most,
        )


def greedy(
    model: Any,
    prompts: list[list[int]],
    max_new_tokens: int,
    forced: Sequence[Sequence[int]] | None = None,
    progress: Progress | None = None,
) -> list[list[int]]:
    """Decode greedily with a cache; a sequence that has ended is padding from then on.

    Args:
        model: a causal language model of transformers.
        prompts: token ids.
        max_new_tokens: tokens after each prompt.
        forced: tokens to feed instead of the chosen ones; sequences then do not end early.
        progress: called with (done, total, text) after each forward.
    """
    from transformers import DynamicCache

    longest = max(map(len, prompts))
    ids = on_device([[0] * (longest - len(p)) + p for p in prompts], model)
    real = on_device([[0] * (longest - len(p)) + [1] * len(p) for p in prompts], model)
    cache = DynamicCache(config=model.config)
    cache_name = cache_argument(model)
    ends = _end_tokens(model) if forced is None else frozenset()
    generated: list[list[int]] = [[] for _ in prompts]
    alive = [True] * len(prompts)
    with torch.no_grad():
        for step in range(max(max_new_tokens, 1)):
            positions = (real.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
            logits = model(
                input_ids=ids,
                attention_mask=real,
                position_ids=positions,
                use_cache=True,
                **{cache_name: cache},
            ).logits[:, -1]
            chosen = logits.argmax(-1).tolist()
            if forced is not None and max_new_tokens:
                chosen = [tokens[step] for tokens in forced]
            if progress is not None:
                progress(step + 1, max(max_new_tokens, 1), "tokens")
            if max_new_tokens == 0:
                break
            for i, token in enumerate(chosen):
                if alive[i]:
                    generated[i].append(token)
                    alive[i] = token not in ends
            if not any(alive):
                break
            ids = on_device([[token if ok else 0] for token, ok in zip(chosen, alive, strict=True)], model)
            real = torch.cat([real, on_device([[int(ok)] for ok in alive], model)], dim=1)
    return generated


def cache_argument(model: Any) -> str:
    """Return the name by which a model takes its cache: 5.24 renamed it and warns about the old one."""
    return "cache" if "cache" in inspect.signature(type(model).forward).parameters else "past_key_values"


def _end_tokens(model: Any) -> frozenset[int]:
    end = model.config.eos_token_id
    return frozenset(() if end is None else [end] if isinstance(end, int) else end)
