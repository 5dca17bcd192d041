"""`oracle`: attention in float64 numpy, for every family, list and sink. A reference, not a kernel.

One query row is one computation over exactly its own keys, so its answer cannot depend on the batch; but
the order of a sum inside BLAS is not specified, so the oracle promises no bits.
"""

import platform
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tracekit.errors import Unsupported
from tracekit.model import AttentionCall, Bits, Block, DType, ExecutedIdentity, KVFamily, blocks
from tracekit.providers.base import Answer, Capabilities, Launch, Tensors, refusal
from tracekit.providers.placed import PAGE_SIZES, run_placed
from tracekit.providers.placement import Layout, Padding
from tracekit.verdict import ClaimId

Float64 = npt.NDArray[np.float64]

_ROUNDS_TO = frozenset({DType.BFLOAT16, DType.FLOAT16, DType.FLOAT32})


@dataclass(frozen=True, eq=False)
class Reference:
    """The exact answer to a call, as far as float64 gives it.

    Args:
        out: `[T, H, Dv]`.
        lse: `[T, H]`, natural, sink not counted; -inf for a row without keys.
        lse_with_sink: `[T, H]`.
        weight: `[T, H, Dv]`, the sum of p |v|.
    """

    out: Float64
    lse: Float64
    lse_with_sink: Float64
    weight: Float64


class Oracle:
    """The float64 reference as a provider."""

    id = "oracle"

    def capabilities(self) -> Capabilities:
        """Everything except FP8, to which tracekit does not round."""
        return Capabilities(
            dtypes=_ROUNDS_TO,
            families=frozenset(KVFamily),
            two_families=True,
            lists=True,
            sink=True,
            max_head_dim=1 << 16,
            launch_plan=False,
            page_sizes=PAGE_SIZES,
            layouts=tuple(Layout),
            reads_pages=False,
            padding=frozenset(Padding),
            fills=True,
        )

    def advertised(self) -> frozenset[ClaimId]:
        """No promise: it is what others are held against."""
        return frozenset()

    def identity(self) -> ExecutedIdentity:
        """Numpy, whose BLAS chooses by processor."""
        return ExecutedIdentity("oracle", {"numpy": np.__version__}, arch=platform.machine())

    def refuses(self, call: AttentionCall) -> str | None:
        """Return why it cannot run a call."""
        return refusal(self.capabilities(), call)

    def run(self, launch: Launch) -> Answer:
        """Compute each call in float64 and round O to the dtype of the call, LSE to FP32.

        Raises:
            Unsupported: a call is refused.
        """
        placement = launch.execution.placement
        return Answer(tuple(run_placed(self._run, call, placement) for call in launch.calls), self.identity())

    def _run(self, call: AttentionCall) -> Tensors:
        if reason := self.refuses(call):
            raise Unsupported(f"oracle cannot run this call: {reason}.", rule="P-REFUSED")
        exact = reference(call)
        with np.errstate(over="ignore", invalid="ignore"):
            out = Bits.from_float32(exact.out.astype(np.float32), call.dtype)
            lse = Bits.from_float32(exact.lse.astype(np.float32), DType.FLOAT32)
        return Tensors(out, lse)


def reference(call: AttentionCall) -> Reference:
    """Compute a call in float64, one row at a time."""
    shape = (call.num_rows, call.num_heads)
    sink = np.full(call.num_heads, -np.inf) if call.sink is None else call.sink.to_float64()
    result = Reference(
        np.zeros((*shape, call.value_dim)),
        np.full(shape, -np.inf),
        np.tile(sink, (call.num_rows, 1)),
        np.zeros((*shape, call.value_dim)),
    )
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        for block in blocks(call, max_rows=1):
            if block.mask.any():
                _row(block, call.conventions.scale, sink, result)
    return result


def _row(block: Block, scale: float, sink: Float64, result: Reference) -> None:
    """Fill in one query row; heads are `[Hkv, G]` inside."""
    t = int(block.rows[0])
    groups = block.keys.shape[1]
    heads = sink.size
    q = block.q[0].reshape(groups, heads // groups, -1)
    x = scale * (q @ block.keys.transpose(1, 2, 0))  # [Hkv, G, N]
    peak = x.max(axis=-1, keepdims=True)
    weights = np.exp(x - peak)
    lse = (peak + np.log(weights.sum(axis=-1, keepdims=True))).reshape(heads)
    total = np.logaddexp(lse, sink)
    p = np.exp(x - total.reshape(groups, -1, 1))
    values = block.values.transpose(1, 0, 2)  # [Hkv, N, Dv]
    result.out[t] = (p @ values).reshape(heads, -1)
    result.weight[t] = (p @ np.abs(values)).reshape(heads, -1)
    result.lse[t] = lse
    result.lse_with_sink[t] = total
