"""Random valid calls: several requests, one or two families, lists and ranges, everything optional."""

import numpy as np
from hypothesis import strategies as st

from tests.store.calls import CONVENTIONS, KEYS, PROVENANCE, bits, plan
from tracekit.model import (
    AttentionCall,
    Conventions,
    DType,
    Gradients,
    KVFamily,
    KVRows,
    Lists,
    LseBase,
    Mode,
    Origin,
    Output,
    Ranges,
    Rows,
    Selection,
)

FAMILY_SETS = (
    (KVFamily.DENSE,),
    (KVFamily.RECENT,),
    (KVFamily.C4, KVFamily.RECENT),
    (KVFamily.RECENT, KVFamily.C128),
)
FLOATS = (DType.BFLOAT16, DType.FLOAT16, DType.FLOAT32)


@st.composite
def calls(draw) -> AttentionCall:
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    dtype = draw(st.sampled_from(FLOATS))
    kv_heads = draw(st.integers(1, 2))
    heads = kv_heads * draw(st.integers(1, 3))
    dim, value_dim = draw(st.tuples(st.integers(1, 9), st.integers(1, 9)))
    shared = draw(st.booleans())
    value_dim = dim if shared else value_dim
    families = draw(st.sampled_from(FAMILY_SETS))
    keys = tuple(draw(st.permutations(KEYS)))[: draw(st.integers(1, 3))]
    owner, positions = [], []
    for index in range(len(keys)):
        held = draw(st.lists(st.integers(0, 300), max_size=5, unique=True))
        owner += [index] * len(held)
        positions += held
    if not owner:
        owner, positions = [0], [draw(st.integers(0, 300))]
    order = draw(st.permutations(range(len(owner))))
    request, position = np.array(owner)[order], np.array(positions)[order]
    kv = {}
    for key in keys:
        kv[key] = {}
        for family in families:
            first = draw(st.integers(0, 5))
            count = draw(st.integers(0, 12))
            values = None if shared else bits(rng, (count, kv_heads, value_dim), dtype)
            kv[key][family] = KVRows(
                bits(rng, (count, kv_heads, dim), dtype), values, first, draw(st.integers(0, 2))
            )
    conventions = draw(
        st.sampled_from((CONVENTIONS, Conventions(0x3F800000, window=7, lse_base=LseBase.TWO)))
    )
    reach = conventions.window or 1000
    selection = {}
    for family in families:
        lo_hi = [
            (
                max(kv[keys[r]][family].first, p + 1 - reach if family.ratio == 1 else 0),
                min(kv[keys[r]][family].end, (p + 1) // family.ratio),
            )
            for r, p in zip(request.tolist(), position.tolist(), strict=True)
        ]
        if draw(st.booleans()):
            selection[family] = Ranges(*(np.array(side) for side in zip(*lo_hi, strict=True)))
        else:
            ids = [rng.permutation(np.arange(lo, max(lo, hi)))[: rng.integers(0, 8)] for lo, hi in lo_hi]
            selection[family] = Lists.of(ids)
    rows = len(owner)
    origin = st.sampled_from(Origin)
    out = draw(st.none() | origin)
    lse = draw(st.none() | origin)
    grads = None
    if draw(st.booleans()):
        d_kv = {keys[0]: {families[0]: kv[keys[0]][families[0]]}} if draw(st.booleans()) else {}
        grads = Gradients(
            bits(rng, (rows, heads, value_dim), draw(st.sampled_from(FLOATS))),
            bits(rng, (rows, heads, dim), dtype) if draw(st.booleans()) else None,
            d_kv,
            bits(rng, (heads,), DType.FLOAT32) if draw(st.booleans()) else None,
        )
    return AttentionCall(
        layer=draw(st.integers(0, 3)),
        step=draw(st.integers(0, 5)),
        rank=draw(st.integers(0, 1)),
        mode=draw(st.sampled_from(Mode)),
        rows=Rows(keys, request, position, rng.integers(-1, 2**40, rows)),
        q=bits(rng, (rows, heads, dim), dtype),
        kv=kv,
        sink=bits(rng, (heads,), DType.FLOAT32) if draw(st.booleans()) else None,
        selection=Selection(selection),
        conventions=conventions,
        provenance=PROVENANCE,
        out=None if out is None else Output(bits(rng, (rows, heads, value_dim), dtype), out),
        lse=None if lse is None else Output(bits(rng, (rows, heads), DType.FLOAT32), lse),
        launch=plan(rows, len(keys)) if draw(st.booleans()) else None,
        grads=grads,
    )
