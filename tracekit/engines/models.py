"""Models by name for the built-in driver: the three that come with tracekit, a folder, or an id."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from tracekit.engines import smollm2, tiny, transformers_backend
from tracekit.errors import Unavailable, UsageError
from tracekit.model import DType
from tracekit.providers.torch_tensors import torch_dtype

NAMES = ("smollm2", *tiny.CONFIGS)


def load_model(
    name: str, attn_implementation: str | None = None, dtype: DType = DType.BFLOAT16
) -> tuple[Any, Any]:
    """Return a model in eval mode and its tokenizer, None where it has none.

    Args:
        name: one of `NAMES`, a checkpoint folder, or an id that transformers can find.
        attn_implementation: `sdpa`, `eager` or `tracekit`; None takes the model's own choice.
        dtype: of the weights.

    Raises:
        Unavailable: `E-MODEL` when there is no such model here.
        UsageError: `E-IMPLEMENTATION` when the model does not take the implementation; `E-CHECKPOINT` when
            transformers refuses the checkpoint for another reason.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging as bars

    transformers_backend.register()
    folder = str(smollm2.prepared() if name == "smollm2" else tiny.prepared(name) if name in NAMES else name)
    progress = bars.is_progress_bar_enabled()
    bars.disable_progress_bar()
    try:
        # A plain word is a folder or was fetched before; only `owner/name` is worth asking a hub for.
        local = "/" not in name or Path(folder).is_dir() or _is_here(folder)
        with _quiet_hub():
            AutoConfig.from_pretrained(folder, local_files_only=local)
        model = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=torch_dtype(dtype),
            attn_implementation=attn_implementation,
            local_files_only=local,
        ).eval()
    except OSError as error:
        raise Unavailable(
            f"no model {name!r} here ({str(error).splitlines()[0]}); give a checkpoint folder, or one of "
            f"{', '.join(NAMES)}.",
            rule="E-MODEL",
            model=name,
            valid=list(NAMES),
        ) from error
    except ValueError as error:
        raise _refused(name, attn_implementation, error) from error
    finally:
        if progress:
            bars.enable_progress_bar()
    # The name a user knows; the folder of a checkpoint may lie anywhere.
    model.config._name_or_path = name
    try:
        tokenizer = (
            None if name in tiny.CONFIGS else AutoTokenizer.from_pretrained(folder, local_files_only=local)
        )
    except (OSError, ValueError):
        tokenizer = None
    return model, tokenizer


def _refused(name: str, implementation: str | None, error: ValueError) -> UsageError:
    """What transformers did not like: the attention that was asked for, or the checkpoint."""
    text = (str(error) or repr(error)).splitlines()[0]
    if implementation is not None and ("attention" in text.lower() or "attn_impl" in text):
        return UsageError(
            f"{name} does not run with attention {implementation}: {text} Try eager or tracekit.",
            rule="E-IMPLEMENTATION",
            model=name,
            implementation=implementation,
        )
    return UsageError(
        f"transformers does not load {name}: {text} Give a checkpoint that it knows, or one of "
        f"{', '.join(NAMES)}.",
        rule="E-CHECKPOINT",
        model=name,
        valid=list(NAMES),
    )


def _is_here(identifier: str) -> bool:
    """Whether a model of a hub was fetched before."""
    from transformers import AutoConfig

    try:
        AutoConfig.from_pretrained(identifier, local_files_only=True)
    except (OSError, ValueError):
        return False
    return True


@contextmanager
def _quiet_hub() -> Iterator[None]:
    """A hub that does not answer is told once, by the error, and not at each try."""
    logger = logging.getLogger("huggingface_hub")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


def encode(prompts: Sequence[str | Sequence[int]], tokenizer: Any, model: Any) -> list[list[int]]:
    """Return the token ids of prompts that are text or already token ids.

    Raises:
        UsageError: `E-PROMPT` for an empty prompt, an id outside the vocabulary, or text without tokenizer.
    """
    encoded = []
    for prompt in prompts:
        if isinstance(prompt, str) and tokenizer is None:
            raise UsageError(
                "this model has no tokenizer; give each prompt as token ids (--prompt-ids 5,9,12).",
                rule="E-PROMPT",
            )
        ids = [int(t) for t in (tokenizer(prompt)["input_ids"] if isinstance(prompt, str) else prompt)]
        if not ids or min(ids) < 0 or max(ids) >= model.config.vocab_size:
            raise UsageError(
                f"a prompt has at least one token id, each below {model.config.vocab_size}, not {ids[:8]}.",
                rule="E-PROMPT",
            )
        encoded.append(ids)
    if not encoded:
        raise UsageError("give at least one prompt.", rule="E-PROMPT")
    return encoded


def on_device(rows: list[list[int]], model: Any) -> torch.Tensor:
    """Return token ids as a tensor where the model is."""
    return torch.tensor(rows, dtype=torch.long, device=model.device)
