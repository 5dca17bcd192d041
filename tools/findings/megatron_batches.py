"""What Megatron's core attention keeps on the CPU: `python -m tools.findings.megatron_batches`.

A call of three requests of 90, 61 and 27 tokens, 8 query and 2 KV heads, is replayed on provider `megatron`
under every claim, by dtype and head size. Printed: one line a claim, `same` or the number of elements that
differ among those compared. Needs the engines' environment (docs/engines.md).
"""

import tempfile
from pathlib import Path

import torch

import tracekit
from tracekit.model import DType, Recording
from tracekit.providers.megatron import Megatron
from tracekit.store import write_trace
from tracekit.testing.build import complete, dense_call, record

CASES = ((DType.FLOAT32, 64), (DType.BFLOAT16, 64))


def main() -> None:
    capability = torch.backends.cpu.get_cpu_capability()
    print(f"torch {torch.__version__}, {capability}, {torch.get_num_threads()} threads")
    for dtype, dim in CASES:
        call = dense_call(
            lengths=(90, 61, 27), heads=8, kv_heads=2, head_dim=dim, dtype=dtype, sink=True, seed=1
        )
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "call.h5"
            recorded = record(call, Megatron())
            write_trace(path, Recording(ledger=complete([recorded])), [recorded])
            report = tracekit.replay(path, provider="megatron", probe=True)
        print(f"{dtype}, heads of {dim}")
        for verdict in report.verdicts:
            print(f"  {verdict.claim:10} {verdict.status.value:14} {verdict.reason}")


if __name__ == "__main__":
    main()
