"""Replay `padding` on vLLM's CPU attention with split-KV on and off, over one made-up mixed batch.

Run it in the environment of `make test-engines`, as `python -m tools.findings.vllm_cpu_padding`.
"""

from tracekit.providers.registry import create
from tracekit.replayer import replay
from tracekit.testing import MemoryTrace, dense_call, record


def main() -> None:
    call = dense_call(
        lengths=(300, 700, 90), new=(1, 5, 64), heads=8, kv_heads=2, head_dim=64, sink=True, seed=1
    )
    for name in ("vllm-cpu", "vllm-cpu-nosplit"):
        trace = MemoryTrace((record(call, create(name)),))
        (verdict,) = replay([trace], providers=[name], claims=["padding"], threads=2).verdicts
        print(f"{name}: {verdict.status}, {verdict.reason}")


if __name__ == "__main__":
    main()
