"""What happens to a vLLM engine between two steps: new weights, an emptied cache, and what nobody can follow.

All of it passes an object of the engine core, in the process that runs the model: the manager of the cache
says whether a reset was done, the executor hands every call to the worker.
"""

from collections.abc import Callable
from typing import Any

from tracekit.engines.patch import Entry
from tracekit.engines.vllm_prefixes import Group
from tracekit.engines.vllm_step import Requests
from tracekit.recorder.session import Session

UPDATES = (
    "start_weight_update",
    "start_draft_weight_update",
    "update_weights",
    "finish_weight_update",
    "load_model",
    "reset_weights",
    "checkpoint_restore",
)
"""Methods of a worker that write weights. `reload_weights` is one of the model runner."""

HARMLESS = frozenset(
    {
        *UPDATES,
        "reload_weights",
        "annotate_profile",
        "check_health",
        "checkpoint_prepare",
        "compute_weight_checksums",
        "execute_dummy_batch",
        "execute_model",
        "get_cache_block_size_bytes",
        "get_compilation_match_table",
        "get_encoder_timing_stats",
        "get_kv_cache_spec",
        "get_kv_connector_handshake_metadata",
        "get_model_inspection",
        "get_supported_kv_cache_layouts",
        "get_supported_tasks",
        "init_weight_transfer_engine",
        "list_loras",
        "profile",
        "release_late_interaction_query_cache",
        "reset_encoder_cache",
        "reset_mm_cache",
        "sample_tokens",
        "save_sharded_state",
        "save_tensorized_model",
        "shutdown_weight_transfer_engine",
        "supports_draft_weight_updates",
        "synchronize_device",
        "take_draft_token_ids",
        "update_max_model_len",
    }
)
"""Methods of a worker that move neither weights nor KV, and those that are told elsewhere."""

_SLEEP = {"sleep", "wake_up", "discard"}
"""On the CPU they do nothing; on a device they give memory back."""


def groups_of(runner: Any) -> list[Group | None]:
    """Return the KV cache groups of a runner, None where no request takes over another's rows."""
    return [_group(group.kv_cache_spec) for group in runner.kv_cache_config.kv_cache_groups]


def _group(spec: Any) -> Group | None:
    if not getattr(spec, "prefix_cacheable", True):
        return None
    specs = getattr(spec, "kv_cache_specs", None)  # layers of one size and several kinds
    windows = {getattr(one, "sliding_window", None) for one in (specs.values() if specs else [spec])}
    return Group(int(spec.block_size), frozenset(int(window) for window in windows if window))


def core_of(core: Any, runner: Any) -> Any:
    """Return an engine core where it is that of a runner and both are in this process, else None."""
    executor = getattr(core, "model_executor", None)
    worker = getattr(getattr(executor, "driver_worker", None), "worker", None)
    return core if worker is not None and getattr(worker, "model_runner", None) is runner else None


def unfollowed(runner: Any, core: Any) -> str:
    """Say why the history of an engine cannot be followed; empty where it can."""
    config = runner.vllm_config
    if core is None:
        return "the scheduler of the engine, which empties its cache, runs in another process"
    if getattr(config, "lora_config", None) is not None:
        return "with LoRA adapters a request has weights of its own"
    if getattr(config, "kv_transfer_config", None) is not None:
        return "a KV connector brings rows from elsewhere"
    return ""


def event_entries(core: Any, runner: Any, session: Session, requests: Requests) -> list[Entry]:
    """Return what is wrapped of an engine core, so that its history is followed between steps.

    Args:
        core: vLLM's `EngineCore`.
        runner: its model runner.
        session: is told of new weights, and of what cannot be followed.
        requests: is told of an emptied cache.
    """
    executor, manager = core.model_executor, core.scheduler.kv_cache_manager
    worker = executor.driver_worker.worker
    weights = [(runner, "reload_weights"), *((worker, name) for name in UPDATES)]
    entries = [
        _after(owner, name, lambda _: session.new_weights())
        for owner, name in weights
        if hasattr(owner, name)
    ]
    on_cpu = str(getattr(runner.device, "type", runner.device)) == "cpu"
    entries.append(_before(executor, "collective_rpc", lambda method: _follow(session, method, on_cpu)))
    entries.append(
        _after(manager, "reset_prefix_cache", lambda done: requests.reset_cache() if done else None)
    )
    return entries


def _follow(session: Session, method: Any, on_cpu: bool) -> None:
    """A call goes to the worker: one that is not known may do anything to weights and cache."""
    name = method if isinstance(method, str) else getattr(method, "__name__", type(method).__name__)
    if not isinstance(method, str) or not (name in HARMLESS or (on_cpu and name in _SLEEP)):
        session.history.lose(f"the worker ran {name}, and nobody knows what that did to weights and cache")


def _after(owner: Any, name: str, tell: Callable[[Any], None]) -> Entry:
    """Tell of a method when it has run, with its result; None where it raised."""
    original = getattr(owner, name)

    def told(*args: Any, **kwargs: Any) -> Any:
        result = None
        try:
            result = original(*args, **kwargs)
            return result
        finally:
            tell(result)

    return Entry(name, vars(owner), name, lambda _: told)


def _before(owner: Any, name: str, tell: Callable[[Any], None]) -> Entry:
    """Tell of a method before it runs, with its first argument."""
    original = getattr(owner, name)

    def told(*args: Any, **kwargs: Any) -> Any:
        tell(args[0] if args else kwargs.get("method"))
        return original(*args, **kwargs)

    return Entry(name, vars(owner), name, lambda _: told)
