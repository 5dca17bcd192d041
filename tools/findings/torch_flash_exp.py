"""How torch's CPU flash attention takes its exponentials: `python -m tools.findings.torch_flash_exp`.

One query row that sees one key, in launches that hold more and more KV rows, all but the first masked. The
exact LSE is the score itself, so any error is that of exp(0). Printed: KV rows of the launch, and by how much
the kernel's LSE is off, for BF16 and for binary32 inputs.
"""

import math

import torch

DIM = 64
LENGTHS = (1, 2, 7, 8, 9, 15, 16, 17, 31, 32, 33, 64, 100)


def lse_error(rows: int, dtype: torch.dtype) -> float:
    """Return kernel LSE minus exact LSE of a row that sees the first of `rows` KV rows."""
    generator = torch.Generator().manual_seed(0)
    query, key = (torch.randn(1, 1, 1, DIM, generator=generator).bfloat16() for _ in range(2))
    keys = key.expand(1, 1, rows, DIM).contiguous()
    mask = torch.full((1, 1, 1, rows), -math.inf)
    mask[..., 0] = 0
    _, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query.to(dtype), keys.to(dtype), keys.to(dtype), 0.0, False, attn_mask=mask.to(dtype), scale=DIM**-0.5
    )
    return float(lse.item() - DIM**-0.5 * (query.double() * key.double()).sum().item())


def main() -> None:
    print(f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}")
    print(f"{'KV rows':>8} {'BF16':>10} {'FP32':>10}")
    for rows in LENGTHS:
        bf16, fp32 = (lse_error(rows, dtype) for dtype in (torch.bfloat16, torch.float32))
        print(f"{rows:8} {bf16:10.1e} {fp32:10.1e}")


if __name__ == "__main__":
    main()
