"""What of Megatron-core the recorder touches, and for which versions that is known to be right."""

import inspect
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch

from tracekit.engines.patch import Versions
from tracekit.errors import Unsupported
from tracekit.model import Share

TESTED = Versions((0, 19), (0, 20))


class Kind(Enum):
    """Core attention modules that are understood, by module and class."""

    DOT_PRODUCT = ("megatron.core.transformer.dot_product_attention", "DotProductAttention")
    TRANSFORMER_ENGINE = ("megatron.core.extensions.transformer_engine", "TEDotProductAttention")
    SPARSE = ("megatron.core.transformer.experimental_attention_variant.dsa", "DSAttention")
    TKA1 = ("tracekit.engines.megatron_backend", "Tka1Attention")


ARGUMENTS = ("query", "key", "value", "attention_mask", "attn_mask_type", "packed_seq_params")
"""What every core attention is called with; a module that takes less has changed."""


@dataclass(frozen=True, eq=False)
class Core:
    """One core attention module of a model.

    Args:
        name: of the module, `decoder.layers.0.self_attention.core_attention`.
        module: the module.
        kind: which one it is.
        layer: 0-based layer.
        signature: of its forward, without `self`.
    """

    name: str
    module: Any
    kind: Kind
    layer: int
    signature: inspect.Signature


def engine_version() -> str:
    """The version of Megatron-core."""
    from megatron.core import __version__

    return str(__version__)


def language_model(model: Any) -> torch.nn.Module:
    """Return the model inside its wrappers (`DistributedDataParallel`, `Float16Module`): what gets tokens.

    Raises:
        Unsupported: `M-MODEL` when no module takes tokens, or several model chunks were given.
    """
    inner = model
    while isinstance(inner, torch.nn.Module) and isinstance(getattr(inner, "module", None), torch.nn.Module):
        inner = inner.module
    takes = inspect.signature(type(inner).forward).parameters if isinstance(inner, torch.nn.Module) else {}
    if not {"input_ids", "position_ids", "attention_mask"} <= set(takes):
        raise Unsupported(
            f"{type(model).__name__} is no language model of Megatron-core (forward(input_ids, position_ids, "
            "attention_mask)); give one GPTModel, bare or in its wrappers.",
            rule="M-MODEL",
            model=type(model).__name__,
        )
    language: torch.nn.Module = inner
    return language


def core_attentions(model: torch.nn.Module) -> list[Core]:
    """Return the core attention modules of a model, in the order of its layers.

    Raises:
        Unsupported: `M-HOOK` where Megatron-core has changed, `M-CORE` for a core attention that is not
            understood, `M-LAYER` for two layers of one number, `M-CP` for context parallelism.
    """
    if getattr(getattr(model, "config", None), "context_parallel_size", 1) != 1:
        raise Unsupported(
            "the model runs with context parallelism: a rank holds a part of each sequence, which is not "
            "recorded. Record with context_parallel_size=1.",
            rule="M-CP",
        )
    cores = []
    for name, module in model.named_modules():
        if name.rpartition(".")[2] == "core_attention":
            cores.append(_core(name, module))
    layers = [core.layer for core in cores]
    if not cores or len(set(layers)) != len(layers):
        raise Unsupported(
            f"{type(model).__name__} has core attentions of the layers {layers}; at least one is needed, and "
            f"one a layer. The recorder is made for Megatron-core {TESTED}.",
            rule="M-LAYER" if cores else "M-HOOK",
            layers=layers,
        )
    return sorted(cores, key=lambda core: core.layer)


def kind_of(module: Any) -> Kind:
    """Say which core attention a module is. One that has a forward of its own is another kernel.

    Raises:
        Unsupported: `M-CORE`.
    """
    own: Any = type(module)
    for base in own.__mro__:
        for kind in Kind:
            if (base.__module__, base.__qualname__) == kind.value and own.forward is base.forward:
                return kind
    names = ", ".join(name for _, name in (kind.value for kind in Kind))
    raise Unsupported(
        f"the core attention {type(module).__module__}.{type(module).__qualname__} is not recorded; "
        f"those are {names}.",
        rule="M-CORE",
        core=type(module).__qualname__,
    )


def share_of(module: Any) -> Share | None:
    """Return the place of this process in its job, where Megatron's process groups exist and it is not alone.

    Args:
        module: a core attention; gives its tensor parallel group and the KV heads of the whole model.
    """
    from megatron.core import parallel_state

    if not torch.distributed.is_initialized() or torch.distributed.get_world_size() == 1:
        return None
    group = getattr(module, "tp_group", None) or module.pg_collection.tp
    kv_heads = 1 if kind_of(module) is Kind.SPARSE else int(module.config.num_query_groups)
    return Share(
        rank=torch.distributed.get_rank(),
        world=torch.distributed.get_world_size(),
        data=parallel_state.get_data_parallel_rank(),
        data_size=parallel_state.get_data_parallel_world_size(),
        tensor=int(group.rank()),
        tensor_size=int(group.size()),
        kv_heads=kv_heads,
    )


def _core(name: str, module: Any) -> Core:
    kind = kind_of(module)
    signature = inspect.signature(module.forward)
    missing = [argument for argument in ARGUMENTS if argument not in signature.parameters]
    if missing or not isinstance(getattr(module, "layer_number", None), int):
        raise Unsupported(
            f"{type(module).__name__} takes no {', '.join(missing) or 'layer_number'} any more: this "
            f"Megatron-core is too new for the recorder (made for {TESTED}). Install that one.",
            rule="M-HOOK",
            hook=missing or ["layer_number"],
        )
    return Core(name, module, kind, int(module.layer_number) - 1, signature)
