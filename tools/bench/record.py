"""What recording costs an engine: steps of SmolLM2-135M on the CPU, all 30 layers, two threads.

The model as it is, the model recorded, and peers that keep q, k, v and o of every call take turns in each
round; the times are medians. `ours` is the recorded step and `peer` the plain one, so that the gate of 1.10
times the plain step is a ratio of 1 / 1.10. The other rows say how ours compares with the peers. What is done
when a recording ends (LSE, digests, compression) is no part of a step.
"""

import importlib.util
import io
import json
import statistics
import tempfile
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from transformers import AttentionInterface, DynamicCache

from tools.bench.timing import SETTLE, Row
from tracekit.engines.driver import cache_argument
from tracekit.engines.models import load_model
from tracekit.engines.patch import Entry, enter_all, replaced
from tracekit.engines.transformers import Recorder
from tracekit.recorder.filters import Filters
from tracekit.recorder.session import Session

PREFILL = 169
THREADS = 2
GATE = 1 / 1.10
CALLS = 2000
PROBE = "mindstudio-probe"
Context = Callable[[], AbstractContextManager[object]]


def rows(rounds: int) -> list[Row]:
    """Run prefill, decode, and a call that the filters leave out."""
    torch.set_num_threads(THREADS)
    model, _ = load_model("smollm2")
    model.set_attn_implementation("sdpa")
    contenders: dict[str, Context] = {
        "plain": nullcontext,
        "recorded": recording(model, Session()),
        "torch.save": saving,
        **probe(),
    }
    found = []
    for name, step in (("prefill 169 tokens", prefill), ("decode step", decode)):
        times = in_turn(step, model, contenders, rounds)
        found.append(Row(f"{name}, recorded", times["recorded"], times["plain"], "the plain step", GATE))
        peers = {peer: seconds for peer, seconds in times.items() if peer not in ("plain", "recorded")}
        best = min(peers, key=lambda peer: peers[peer])
        found.append(Row(f"{name}, peers", times["recorded"], peers[best], best, 1.0, peers))
    if PROBE not in contenders:
        found.append(Row.unrun(f"peer {PROBE}", "it is not installed (the extra `bench` brings it)", 1.0))
    return [*found, filtered_out(model, rounds)]


def recording(model: Any, session: Session) -> Context:
    """Return what records a model in turns, into one session."""
    recorder = Recorder(session, model)

    @contextmanager
    def on() -> Iterator[None]:
        with ExitStack() as stack:
            enter_all(stack, recorder.entries(), recorder.hooks())
            yield

    return on


@contextmanager
def saving() -> Iterator[None]:
    """Keep q, k, v and o of each call with torch.save, in memory: a disk would only make it slower."""

    def make(original: Any) -> Any:
        def saved(module: Any, q: Any, k: Any, v: Any, mask: Any, **kwargs: Any) -> Any:
            result = original(module, q, k, v, mask, **kwargs)
            torch.save({"q": q, "k": k, "v": v, "o": result[0]}, io.BytesIO())
            return result

        return saved

    with replaced(Entry("sdpa", AttentionInterface._global_mapping, "sdpa", make)):
        yield


def probe() -> dict[str, Context]:
    """mindstudio-probe (extra `bench`), where it is installed: dumps of the attention modules at level L0."""
    if importlib.util.find_spec("msprobe") is None:
        return {}
    from msprobe.pytorch import PrecisionDebugger

    folder = tempfile.TemporaryDirectory()
    config = Path(folder.name) / "config.json"
    scope = {"scope": [], "list": ["self_attn"], "data_mode": ["forward"]}
    settings = {"task": "tensor", "dump_path": folder.name, "rank": [], "step": [], "level": "L0"}
    config.write_text(json.dumps({**settings, "tensor": scope}))
    debugger = PrecisionDebugger(config_path=str(config))
    weakref.finalize(debugger, folder.cleanup)
    # It leaves hooks on the model, so it has one of its own, and the plain step stays plain.
    model, _ = load_model("smollm2")
    model.set_attn_implementation("sdpa")

    @contextmanager
    def on() -> Iterator[Any]:
        debugger.start(model=model)
        yield model
        debugger.stop()
        debugger.step()

    return {PROBE: on}


def prefill(model: Any, cache: Any) -> Any:
    """A forward of 169 tokens over an empty cache."""
    del cache
    cache = DynamicCache(config=model.config)
    run(model, torch.arange(3, 3 + PREFILL)[None], cache)
    return cache


def decode(model: Any, cache: Any) -> Any:
    """A forward of one token; a cache is made where there is none yet."""
    if cache is None:
        cache = prefill(model, None)
    run(model, torch.tensor([[7]]), cache)
    return cache


def run(model: Any, ids: torch.Tensor, cache: Any) -> None:
    with torch.no_grad():
        model(input_ids=ids, use_cache=True, **{cache_argument(model): cache})


def in_turn(
    step: Callable[[Any, Any], Any], model: Any, contenders: dict[str, Context], rounds: int
) -> dict[str, float]:
    """Return the median seconds of a step of each contender; an untimed step comes before each timed one."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    caches: dict[str, Any] = dict.fromkeys(contenders)
    for _ in range(rounds):
        for name, context in contenders.items():
            with context() as other:
                mine = other or model
                caches[name] = step(mine, caches[name])
                settled = time.perf_counter() + SETTLE
                while time.perf_counter() < settled:  # busy, so that the core stays awake
                    pass
                start = time.perf_counter()
                caches[name] = step(mine, caches[name])
                times[name].append(time.perf_counter() - start)
    return {name: statistics.median(taken) for name, taken in times.items()}


def filtered_out(model: Any, rounds: int) -> Row:
    """What a call costs whose layer is not recorded: the recorder's function over one that does nothing.

    `ours` is the added time of one call, and `peer` one microsecond, which is the gate.
    """
    table = AttentionInterface._global_mapping
    recorder = Recorder(Session(Filters(layers=frozenset([0]))), model)
    module = model.model.layers[1].self_attn
    tensors = [torch.zeros(1, 9, 1, 64, dtype=torch.bfloat16)] * 3
    answer = tensors[0], None

    def nothing(*_: Any, **__: Any) -> Any:
        return answer

    def timed() -> float:
        function = table["sdpa"]
        start = time.perf_counter()
        for _ in range(CALLS):
            function(module, *tensors, None, scaling=0.125, dropout=0.0)
        return (time.perf_counter() - start) / CALLS

    added = []
    with replaced(Entry("sdpa", table, "sdpa", lambda _: nothing)):
        for _ in range(rounds):
            plain = timed()
            with ExitStack() as stack:
                enter_all(stack, recorder.entries(), [])
                recorder.before_forward(model, (), {"input_ids": torch.tensor([[7]]), "use_cache": False})
                added.append(timed() - plain)
                recorder.after_forward(model, (), answer)
    return Row("a filtered-out call", statistics.median(added), 1e-6, "1 microsecond", 1.0)
