"""Run as a program: a tiny DeepSeek-V4 records itself, beside the arguments that its layers were given.

Writes into the folder that it is given: `short.h5` and `long.h5`, `arguments.npz`, `said.json`.
"""

import json
import sys
from pathlib import Path
from typing import Any

from tests.engines_vllm.deepseek_v4 import CHUNK, engine, generate
from tracekit.engines.vllm_points import attention_layers, runner_of
from tracekit.gate.plan import joint_plan
from tracekit.recorder.api import record
from tracekit.store import write_trace

PROMPTS = [[4 + (i * 7) % 250 for i in range(300)], list(range(30, 37))]
LONG = 2080
"""Tokens: 520 rows of C4, of which the indexer chooses 512."""


def main(folder: Path) -> None:
    import torch

    llm = engine(folder)
    plain = generate(llm, PROMPTS, 4)
    plans: list[str] = []

    def write(path: Any, recording: Any, calls: Any, **more: Any) -> Any:
        plans.extend(joint_plan(call).digest for call in calls)  # of what the engine's process holds
        return write_trace(path, recording, calls, **more)

    with Spy(llm) as spy, record(folder / "short.h5", engine="vllm", llm=llm, write=write) as session:
        tokens = generate(llm, PROMPTS, 4)
        problems = list(session.problems)
    prompt = [4 + (i * i * 7) % 250 for i in range(LONG)]
    last = LONG // CHUNK
    with (
        Spy(llm, layers=[1]) as choice,
        record(
            folder / "long.h5", engine="vllm", llm=llm, layers=[1], steps=range(last, last + 3)
        ) as session,
    ):
        generate(llm, [prompt], 3)
        problems += session.problems
    import numpy as np

    chosen = {f"long.{i}": part["topk"] for i, part in enumerate(choice.taken[last:])}
    arrays = {f"{i}.{name}": a for i, part in enumerate(spy.taken) for name, a in part.items()} | chosen
    np.savez(folder / "arguments.npz", **arrays)
    left = [name for name, layer in attention_layers(runner_of(llm)).items() if "forward_mqa" in vars(layer)]
    said = {"plain": plain, "tokens": tokens, "problems": problems, "calls": len(spy.taken), "left": left}
    said["plans"] = plans
    said["untested_indexers"], said["contradicted_indexers"] = untested_indexers(llm, prompt, last)
    said["untested"], said["contradicted"] = untested(llm)
    said["operator"] = type(torch.ops._C.flash_mla_with_kvcache_cpu).__name__
    (folder / "said.json").write_text(json.dumps(said))


def untested_indexers(llm: Any, prompt: list[int], last: int) -> tuple[list[Any], list[Any]]:
    """Record an indexer as if this vLLM were a newer one: as it is, and with a scale that it does not have.

    Returns the problems and the number of indexer calls of each.
    """
    import warnings

    from tracekit.engines import vllm as adapter
    from tracekit.engines import vllm_dsv4_indexer
    from tracekit.model import scale_to_bits

    name, adapter.engine_name = adapter.engine_name, lambda: "vllm 0.99.1"
    real = vllm_dsv4_indexer.scale_to_bits
    found: list[list[Any]] = []
    for scale in (1.0, 1.25):
        vllm_dsv4_indexer.scale_to_bits = lambda own, _by=scale: scale_to_bits(_by * own)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            where = {"layers": [1], "steps": [last]}
            with record("unused.h5", engine="vllm", llm=llm, write=lambda *_, **__: None, **where) as session:
                generate(llm, [prompt], 1)
        found.append([session.problems, len(session.indexer_calls)])
    adapter.engine_name, vllm_dsv4_indexer.scale_to_bits = name, real
    return found[0], found[1]


def untested(llm: Any) -> tuple[list[str], str]:
    """Record as if this vLLM were a newer one: as it is, and with a scale that it does not have."""
    import warnings

    from tracekit.engines import vllm as adapter
    from tracekit.engines import vllm_dsv4_call
    from tracekit.errors import Unsupported
    from tracekit.model import scale_to_bits

    adapter.engine_name = lambda: "vllm 0.99.1"
    warnings.simplefilter("ignore")
    with record("unused.h5", engine="vllm", llm=llm, write=lambda *_: None) as session:
        generate(llm, [PROMPTS[0][:20]], 2)
    vllm_dsv4_call.scale_to_bits = lambda scale: scale_to_bits(4 * scale)
    try:
        with record("unused.h5", engine="vllm", llm=llm, write=lambda *_: None):
            generate(llm, [PROMPTS[0][:20]], 2)
    except Unsupported as error:
        return session.problems, f"{error.rule}: {error}"
    return session.problems, ""


class Spy:
    """Copies what each layer and its operator are given, before a recorder stands there."""

    def __init__(self, llm: Any, layers: list[int] | None = None) -> None:
        every = list(attention_layers(runner_of(llm)).values())
        self.layers = every if layers is None else [every[i] for i in layers]
        self.taken: list[dict[str, Any]] = []

    def __enter__(self) -> "Spy":
        for layer in self.layers:
            layer.forward_mqa = self._wrapped(layer, layer.forward_mqa)
        return self

    def __exit__(self, *_: object) -> None:
        for layer in self.layers:
            del layer.forward_mqa

    def _wrapped(self, layer: Any, original: Any) -> Any:
        def forward_mqa(q: Any, kv: Any, positions: Any, output: Any) -> None:
            import torch

            space, name, seen = torch.ops._C, "flash_mla_with_kvcache_cpu", []
            operator = getattr(space, name)

            def spy(*arguments: Any) -> None:
                operator(*arguments)
                seen.append(arguments)

            setattr(space, name, spy)
            try:
                original(q, kv, positions, output)
            finally:
                setattr(space, name, operator)
            for _, _, cache, slots, page, other, chosen, small, sink, _ in seen:
                taken = {"q": q, "kv": kv, "out": output, "sink": sink, "positions": positions}
                # What three of the rows read, in the order of the slots, decoded by a reading of its own.
                for t in {0, len(q) // 2, len(q) - 1}:
                    taken[f"window.{t}"] = decoded(cache, slots[t], page)
                    taken[f"compressed.{t}"] = decoded(other, chosen[t], small)
                if layer.topk_indices_buffer is not None:
                    taken["topk"] = layer.topk_indices_buffer[: len(q)]
                self.taken.append({name: bits(tensor) for name, tensor in taken.items()})

        return forward_mqa


def decoded(cache: Any, slots: Any, page: int) -> Any:
    """BF16 `[n, 512]`, the rows of some slots: torch's FP8 times powers of two, and the rotary part."""
    import torch

    slots = slots[slots >= 0]
    rows = cache[:, : page * 576].reshape(-1, page, 576)[slots // page, slots % page]
    scales = cache[:, page * 576 : page * 584].reshape(-1, page, 8)[slots // page, slots % page, :7]
    nope = rows[:, :448].contiguous().view(torch.float8_e4m3fn).float().unflatten(1, (7, 64))
    nope = nope * torch.exp2(scales.float() - 127)[:, :, None]
    rope = rows[:, 448:].contiguous().view(torch.bfloat16)
    return torch.cat([nope.flatten(1).to(torch.bfloat16), rope], dim=1)


def bits(tensor: Any) -> Any:
    """A copy as numpy: patterns of BF16, else as it is."""
    import torch

    return (
        tensor.contiguous().view(torch.int16).numpy().copy()
        if tensor.dtype == torch.bfloat16
        else tensor.numpy().copy()
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
