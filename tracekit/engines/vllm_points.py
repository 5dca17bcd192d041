"""What of vLLM the recorder touches, and for which versions that is known to be right."""

from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import Any

from tracekit.engines.patch import Versions
from tracekit.engines.vllm_signatures import SIGNATURES, signature_of
from tracekit.errors import Unsupported
from tracekit.model import Share, Tag

TESTED = Versions((0, 32), (0, 33))

IMPLEMENTATIONS = {("vllm.v1.attention.backends.cpu_attn", "CPUAttentionBackendImpl")}
"""Attention implementations whose cache and arguments are understood."""

MLA = {
    ("vllm.v1.attention.backends.mla.cpu_mla", "CPUMLAImpl"),
    ("vllm.v1.attention.backends.mla.amx_mla", "AMXMLAImpl"),
}
"""Implementations of latent attention whose cache and arguments are understood."""

V4 = ("vllm.models.deepseek_v4.cpu.cpu_sparse", "DeepseekV4CPUAttention")
"""DeepSeek-V4's attention layer: it has no implementation object and calls its operator itself."""
_V4_BASE = ("vllm.models.deepseek_v4.attention", "DeepseekV4Attention")


@dataclass(frozen=True)
class Scheduling:
    """What the builder of a group's launch plan was made with.

    Args:
        isa: code path of the kernel.
        heads: query heads that the plan is sized for.
        window: window that the plan may assume, -1 for none.
    """

    isa: str
    heads: int
    window: int


def runner_of(llm: Any) -> Any:
    """Return the model runner of an `LLM` whose engine runs in this process.

    Raises:
        Unsupported: `V-PROCESS` when it runs in another one, `V-HOOK` when vLLM has changed.
    """
    core = _need(_need(llm, "llm_engine"), "engine_core")
    if not hasattr(core, "engine_core"):
        raise Unsupported(
            "this LLM runs its engine in another process. Set VLLM_ENABLE_V1_MULTIPROCESSING=0 before vllm "
            "is imported, or record every process with TRACEKIT_RECORD=run.h5 (docs/engines.md).",
            rule="V-PROCESS",
        )
    executor = _need(core.engine_core, "model_executor")
    return _need(_need(executor, "driver_worker"), "model_runner")


def refuse_runner(runner: Any) -> None:
    """Refuse what would be recorded wrongly, before anything is touched.

    Raises:
        Unsupported: `V-HOOK`, `V-SPECULATIVE`.
    """
    for name in ("execute_model", "input_batch", "requests", "input_ids", "positions", "attn_groups"):
        _need(runner, name)
    if getattr(runner, "speculative_config", None) is not None:
        raise Unsupported(
            "speculative decoding takes back rows that were already computed, which is not recorded; "
            "start the engine without speculative_config.",
            rule="V-SPECULATIVE",
        )


def run_tag(arguments: Mapping[str, Any]) -> Tag:
    """Say what a dummy run is, by the arguments of vLLM's `_dummy_run`."""
    if arguments.get("is_graph_capturing"):
        return Tag.CAPTURE
    return Tag.PROFILE if arguments.get("is_profile") else Tag.WARMUP


def share_of(runner: Any) -> Share:
    """Return the place of a runner's process: vLLM numbers tensor-parallel processes first."""
    parallel = runner.parallel_config

    def number(name: str, default: int) -> int:
        return int(getattr(parallel, name, None) or default)

    rank, world, size = number("rank", 0), number("world_size", 1), number("tensor_parallel_size", 1)
    data, data_size = number("data_parallel_rank", 0), number("data_parallel_size", 1)
    kv_heads = int(runner.model_config.get_total_num_kv_heads()) if size > 1 else 0
    return Share(data * world + rank, data_size * world, data, data_size, rank % size, size, kv_heads)


def attention_layers(runner: Any) -> dict[str, Any]:
    """Return the attention layers by name, in the order of the model.

    Raises:
        Unsupported: `V-HOOK`, or `V-BACKEND` for an implementation that is not understood.
    """
    context: Mapping[str, Any] = _need(_need(runner, "compilation_config"), "static_forward_context")
    layers = {
        name: layer for name, layer in context.items() if hasattr(layer, "impl") or _is_a(layer, {_V4_BASE})
    }
    for name, layer in layers.items():
        kind = type(getattr(layer, "impl", layer))
        if not is_v4(layer) and not (
            hasattr(layer, "impl") and (_is_a(layer.impl, IMPLEMENTATIONS | MLA) or signature_of(layer.impl))
        ):
            raise Unsupported(
                f"layer {name} runs {kind.__name__}, which is not recorded; the implementations are "
                f"{', '.join(name for _, name in sorted({*IMPLEMENTATIONS, *MLA, *SIGNATURES, V4}))}.",
                rule="V-BACKEND",
                layer=name,
                implementation=kind.__name__,
            )
    if not layers:
        raise Unsupported(
            "the model registers no attention layer with vLLM; there is nothing to hook.", rule="V-HOOK"
        )
    return layers


def is_v4(layer: Any) -> bool:
    """Whether a layer is DeepSeek-V4's, on the CPU."""
    return _is_a(layer, {V4})


def is_mla(layer: Any) -> bool:
    """Whether a layer attends over latents."""
    return hasattr(layer, "impl") and _is_a(layer.impl, MLA)


def _is_a(thing: Any, classes: Set[tuple[str, str]]) -> bool:
    return any((base.__module__, base.__name__) in classes for base in type(thing).__mro__)


def schedulings(runner: Any, names: Set[str]) -> dict[str, Scheduling]:
    """Return by layer name, in the order of the groups, what its group's plan is built with.

    Args:
        runner: the model runner.
        names: layers whose launches have such a plan.

    Raises:
        Unsupported: `V-HOOK`.
    """
    found = {}
    for group in [group for groups in runner.attn_groups for group in groups]:
        mine = [name for name in _need(group, "layer_names") if name in names]
        if not mine:
            continue
        builder = _need(group, "get_metadata_builder")()
        plan = Scheduling(
            str(_need(builder, "isa")), int(_need(builder, "num_heads")), int(_need(builder, "window_size"))
        )
        found.update(dict.fromkeys(mine, plan))
    return found


def layer_number(name: str) -> int:
    """Return the 0-based layer of `model.layers.3.self_attn.attn`.

    Raises:
        Unsupported: `V-LAYER` when the name holds no number, or several.
    """
    numbers = [part for part in name.split(".") if part.isdecimal()]
    if len(numbers) != 1:
        raise Unsupported(
            f"layer {name} has {len(numbers)} numbers in its name; one is needed to place it.", rule="V-LAYER"
        )
    return int(numbers[0])


def _need(owner: Any, name: str) -> Any:
    if not hasattr(owner, name):
        raise Unsupported(
            f"vLLM's {type(owner).__name__} has no {name} any more: this version is too new for the recorder "
            f"(made for {TESTED}). Install that one.",
            rule="V-HOOK",
            hook=name,
        )
    return getattr(owner, name)
