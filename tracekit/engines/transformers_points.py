"""What of a transformers model is recorded, and where its attention functions stand."""

import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch

from tracekit.engines.transformers_families import ratio_family
from tracekit.errors import Unsupported

LATER = {"glm_moe_dsa": "its sparse indexer"}
"""Model types whose calls a plain record would get wrong, and why."""

COMPILED = (
    "the model ran inside torch.compile, where no hook is called; nothing of that is recorded. Record it "
    "without torch.compile (TORCH_COMPILE_DISABLE=1)."
)
Attention = Callable[..., tuple[torch.Tensor, Any]]


def module_names(model: Any, modules: Mapping[Any, int]) -> dict[str, int]:
    """Return the layer of each attention module by the module's name."""
    return {name: modules[module] for name, module in model.named_modules() if module in modules}


def attention_modules(model: Any) -> dict[Any, int]:
    """Return the modules of a layer that are named as attention, which should call the interface."""
    return {
        module: int(module.layer_idx)
        for module in model.modules()
        if isinstance(getattr(module, "layer_idx", None), int)
        and "attention" in type(module).__name__.lower()
    }


def own_eager(module: Any) -> Attention:
    """Return the eager function of the file that defines a module's class, which transformers would take.

    Raises:
        Unsupported: `T-EAGER` when there is none.
    """
    for kind in type(module).__mro__:
        function = getattr(sys.modules.get(kind.__module__), "eager_attention_forward", None)
        if function is not None:
            found: Attention = function
            return found
    raise Unsupported(
        f"{type(module).__name__} has no eager_attention_forward beside it; set attn_implementation='sdpa'.",
        rule="T-EAGER",
    )


def refuse_model(model: Any) -> None:
    """Refuse a model whose calls would not be recorded right.

    Raises:
        Unsupported: `T-MODEL`, `T-RATIO`, `T-IMPLEMENTATION`.
    """
    if not hasattr(getattr(model, "config", None), "_attn_implementation"):
        raise Unsupported(
            f"{type(model).__name__} is no model of transformers; give one, or record calls of your own with "
            "session.attention(...) and without model=.",
            rule="T-MODEL",
        )
    kind = getattr(model.config, "model_type", "")
    if kind in LATER:
        raise Unsupported(
            f"{type(model).__name__}: {kind} is not recorded yet, because of {LATER[kind]}; "
            "record a model of the families that have ordinary attention.",
            rule="T-MODEL",
            model_type=kind,
        )
    for ratio in (getattr(model.config, "compress_rates", None) or {}).values():
        ratio_family(int(ratio))
    implementation = model.config._attn_implementation
    if implementation not in ("sdpa", "eager", "tracekit"):
        raise Unsupported(
            f"{type(model).__name__} runs {implementation}, which is not recorded; "
            "call model.set_attn_implementation('sdpa'), 'eager' or 'tracekit'.",
            rule="T-IMPLEMENTATION",
            implementation=implementation,
        )
