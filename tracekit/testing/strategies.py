"""Hypothesis strategies for the nouns; needs `hypothesis`."""

from dataclasses import replace

import numpy as np
from hypothesis import strategies as st

from tracekit.model import AttentionCall, Bits, DType
from tracekit.testing.build import dense_call, sparse_call

DTYPES = (DType.BFLOAT16, DType.FLOAT16, DType.FLOAT32)


@st.composite
def calls(
    draw: st.DrawFn,
    *,
    dtypes: tuple[DType, ...] = (DType.BFLOAT16,),
    max_requests: int = 3,
    max_length: int = 24,
    sparse: bool = True,
) -> AttentionCall:
    """Draw a small causal call: dense or sparse, prefill or decode, rows in any order.

    Args:
        draw: given by Hypothesis.
        dtypes: of Q and KV; sparse calls are BF16.
        max_requests: most requests.
        max_length: most tokens of a request.
        sparse: whether calls over compressed and recent rows are drawn too.
    """
    lengths = draw(st.lists(st.integers(1, max_length), min_size=1, max_size=max_requests))
    new = [draw(st.integers(1, length)) for length in lengths]
    seed = draw(st.integers(0, 2**32 - 1))
    sink = draw(st.booleans())
    if sparse and DType.BFLOAT16 in dtypes and draw(st.booleans()):
        call = sparse_call(
            lengths=lengths,
            new=new,
            heads=draw(st.sampled_from([1, 2, 4])),
            head_dim=16,
            sink=sink,
            seed=seed,
        )
    else:
        kv_heads = draw(st.sampled_from([1, 2]))
        call = dense_call(
            lengths=lengths,
            new=new,
            heads=kv_heads * draw(st.sampled_from([1, 3])),
            kv_heads=kv_heads,
            head_dim=draw(st.sampled_from([8, 16])),
            dtype=draw(st.sampled_from(dtypes)),
            sink=sink,
            window=draw(st.none() | st.integers(1, max_length)),
            seed=seed,
        )
    order = draw(st.permutations(range(call.num_rows)))
    return call.take(np.array(order))


@st.composite
def bits(draw: st.DrawFn, shape: tuple[int, ...], dtypes: tuple[DType, ...] = DTYPES) -> Bits:
    """Draw a tensor of arbitrary patterns, NaN payloads, infinities and both zeros included.

    Args:
        draw: given by Hypothesis.
        shape: of the tensor.
        dtypes: to draw from.
    """
    dtype = draw(st.sampled_from(dtypes))
    size = int(np.prod(shape))
    width = 8 * dtype.container.itemsize
    signs = [0, 1 << (width - 1)]
    special = [code for value in (0.0, 1.0, np.inf, np.nan) for code in _patterns(value, dtype)]
    pattern = st.integers(0, 2**width - 1) | st.sampled_from(special + [code | signs[1] for code in special])
    data = draw(st.lists(pattern, min_size=size, max_size=size))
    return Bits(np.array(data, dtype.container).reshape(shape), dtype)


def _patterns(value: float, dtype: DType) -> list[int]:
    code = int(Bits.from_float32(np.array([value], np.float32), dtype).data[0])
    return [code, code + 1]


def scaled(call: AttentionCall, factor: float) -> AttentionCall:
    """Return the call with its queries multiplied: scores of another size."""
    q = Bits.from_float32(call.q.to_float32() * np.float32(factor), call.dtype)
    return replace(call, q=q, out=None, lse=None)
