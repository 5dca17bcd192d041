"""What is known of the calls of a trace without their payload."""

from dataclasses import dataclass

from tracekit.model import DType, KVFamily, KVSource, Mode, Origin, RequestKey


@dataclass(frozen=True)
class CallHead:
    """What is known of a call without its payload.

    Args:
        index: its place in the trace, from 0.
        layer: 0-based layer.
        step: 0-based engine step.
        rank: rank of the process.
        mode: why the launch was made.
        num_rows: T.
        num_heads: H.
        num_kv_heads: Hkv.
        head_dim: D.
        value_dim: Dv.
        dtype: of Q, KV and O.
        requests: in executed order.
        kernel: the kernel that was executed.
        kv_source: where its KV rows were seen.
        has_sink: whether it has a sink.
        out: who made O; None where it was not recorded.
        lse: who made the LSE; None where it was not recorded.
        has_launch_plan: whether the engine's own launch can be made again.
        has_gradients: whether gradients were recorded.
    """

    index: int
    layer: int
    step: int
    rank: int
    mode: Mode
    num_rows: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    dtype: DType
    requests: tuple[RequestKey, ...]
    kernel: str
    kv_source: KVSource
    has_sink: bool
    out: Origin | None
    lse: Origin | None
    has_launch_plan: bool
    has_gradients: bool


@dataclass(frozen=True)
class IndexerHead:
    """What is known of a call of a sparse indexer without its payload.

    Args:
        index: its place among the indexer calls of the trace, from 0.
        layer: 0-based layer.
        step: 0-based engine step.
        rank: rank of the process.
        num_rows: T.
        num_heads: heads of the indexer.
        head_dim: D of its queries and keys.
        k: the most keys that a row may choose.
        family: the KV family whose rows it chose.
        requests: in executed order.
        kernel: what was executed.
        has_scores: whether the scores of the chosen keys were recorded.
    """

    index: int
    layer: int
    step: int
    rank: int
    num_rows: int
    num_heads: int
    head_dim: int
    k: int
    family: KVFamily
    requests: tuple[RequestKey, ...]
    kernel: str
    has_scores: bool
