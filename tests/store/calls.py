"""Small valid calls for the tests of the store: every field of a call can be switched on."""

from collections import Counter
from collections.abc import Iterable

import numpy as np

from tracekit.model import (
    AttentionCall,
    Bits,
    Conventions,
    DType,
    ExecutedIdentity,
    Gradients,
    Identity,
    IndexerCall,
    KVFamily,
    KVRows,
    LaunchPlan,
    Lists,
    Mode,
    Origin,
    Output,
    Provenance,
    Ranges,
    Recording,
    Request,
    RequestKey,
    Rows,
    Selection,
    StepRecord,
    scale_to_bits,
)

PROMPTS = ((1, 2, 3), (4, 5, 6, 7), (9,))
KEYS = tuple(RequestKey.of_prompt(prompt) for prompt in PROMPTS)
CONVENTIONS = Conventions(scale_bits=scale_to_bits(0.125))
PROVENANCE = Provenance("engine 1", "sdpa", ExecutedIdentity("torch.flash_cpu", {"torch": "2.13.0"}))


def recording(calls: Iterable[AttentionCall] = ()) -> Recording:
    """Three requests, a ledger of the calls in which each step is cut, and notes."""
    requests = tuple(
        Request(key, np.array([*prompt, 11, 12]), len(prompt), alias=f"req-{i}")
        for i, (key, prompt) in enumerate(zip(KEYS, PROMPTS, strict=True))
    )
    steps = Counter(call.step for call in calls)
    ledger = tuple(StepRecord(step, n + 2, n + 1, n, 1, cut="budget") for step, n in steps.items())
    identity = Identity("tiny", "TinyForCausalLM", "ab" * 32, "cd" * 32, 3)
    return Recording(identity, requests, ledger, {"command": "run --größe"})


def bits(rng: np.random.Generator, shape: tuple[int, ...], dtype: DType = DType.BFLOAT16) -> Bits:
    """Random patterns: NaN payloads, infinities and -0 are among them."""
    limit = np.iinfo(dtype.container).max
    return Bits(rng.integers(0, limit, shape, dtype.container, endpoint=True), dtype)


def prefill(
    seed: int = 0,
    lengths: tuple[int, ...] = (5, 3),
    *,
    layer: int = 0,
    step: int = 0,
    heads: tuple[int, int] = (4, 2),
    dims: tuple[int, int] = (8, 8),
    dtype: DType = DType.BFLOAT16,
    launch: LaunchPlan | None = None,
    grads: bool = False,
) -> AttentionCall:
    """A causal prefill of some requests from position 0, over dense KV."""
    rng = np.random.default_rng(seed)
    rows = int(sum(lengths))
    request = np.repeat(np.arange(len(lengths)), lengths)
    positions = np.concatenate([np.arange(n) for n in lengths])
    kv = {
        KEYS[i]: {KVFamily.DENSE: KVRows(*(bits(rng, (n, heads[1], d), dtype) for d in dims))}
        for i, n in enumerate(lengths)
    }
    q, out = bits(rng, (rows, heads[0], dims[0]), dtype), bits(rng, (rows, heads[0], dims[1]), dtype)
    lse = bits(rng, (rows, heads[0]), DType.FLOAT32)
    gradients = None
    if grads:
        d_kv = {
            key: {family: KVRows(bits(rng, held.keys.shape), bits(rng, held.value_bits.shape), held.first)}
            for key, families in kv.items()
            for family, held in families.items()
        }
        d_sink = bits(rng, (heads[0],), DType.FLOAT32)
        gradients = Gradients(bits(rng, out.shape), bits(rng, q.shape), d_kv, d_sink)
    return AttentionCall(
        layer=layer,
        step=step,
        mode=Mode.TRAINING if grads else Mode.PREFILL,
        rows=Rows(KEYS[: len(lengths)], request, positions, rng.integers(0, 1000, rows)),
        q=q,
        kv=kv,
        sink=bits(rng, (heads[0],), DType.FLOAT32),
        selection=Selection({KVFamily.DENSE: Ranges(np.zeros(rows), positions + 1)}),
        conventions=CONVENTIONS,
        provenance=PROVENANCE,
        out=Output(out, Origin.EXECUTED),
        lse=Output(lse, Origin.DERIVED),
        launch=launch,
        grads=gradients,
    )


def plan(rows: int, requests: int = 2) -> LaunchPlan:
    """A launch plan that uses every field and awkward values."""
    return LaunchPlan(
        kernel="torch.flash_cpu",
        row_slots=np.arange(rows)[::-1],
        slots=rows + 2,
        head_padding=1,
        page_size=16,
        block_tables=(np.array([3, 1], np.int32), *[np.zeros(0, np.int32)] * (requests - 1)),
        cu_seqlens=np.array([0] * requests + [rows], np.int32),
        scalars={
            "n": 3,
            "big": 2**70,
            "nan": float("nan"),
            "inf": float("-inf"),
            "x": 0.1,
            "t": "é",
            "b": True,
            "z": None,
        },
        arrays={
            "mask": np.array([[True, False]]),
            "scale": np.array(1.5, np.float32),
            "none": np.zeros((0, 3), np.int64),
            "bytes": np.arange(256, dtype=np.uint8).reshape(4, 64),
            "half": np.array([1, 2], np.float16),
        },
    )


def decode_steps(steps: int, start: int = 16, *, layers: int = 1, seed: int = 0) -> list[AttentionCall]:
    """One request, one token a step, each step with the whole KV so far."""
    rng = np.random.default_rng(seed)
    caches = [(bits(rng, (start + steps, 2, 8)), bits(rng, (start + steps, 2, 8))) for _ in range(layers)]
    calls = []
    for step in range(steps):
        end = start + step + 1
        for layer, (keys, values) in enumerate(caches):
            held = KVRows(keys.part(slice(end)), values.part(slice(end)))
            calls.append(
                AttentionCall(
                    layer=layer,
                    step=step,
                    mode=Mode.DECODE,
                    rows=Rows(KEYS[:1], np.zeros(1), np.array([end - 1]), np.array([7])),
                    q=bits(rng, (1, 4, 8)),
                    kv={KEYS[0]: {KVFamily.DENSE: held}},
                    sink=None,
                    selection=Selection({KVFamily.DENSE: Ranges(np.zeros(1), np.array([end]))}),
                    conventions=CONVENTIONS,
                    provenance=PROVENANCE,
                    out=Output(bits(rng, (1, 4, 8)), Origin.EXECUTED),
                )
            )
    return calls


def two_families(seed: int = 0) -> AttentionCall:
    """MQA with shared KV: compressed rows by list, then a recent window that starts after row 0."""
    rng = np.random.default_rng(seed)
    positions = np.array([9, 10, 11])
    kv = {
        KEYS[1]: {
            KVFamily.RECENT: KVRows(bits(rng, (6, 1, 16)), None, first=6, generation=2),
            KVFamily.C4: KVRows(bits(rng, (3, 1, 16)), None, generation=1),
            KVFamily.C128: KVRows(bits(rng, (0, 1, 16)), None),
        }
    }
    lists = Lists.of([np.array([1, 0]), np.zeros(0, np.int64), np.array([0, 2, 1])])
    ranges = Ranges(np.array([6, 7, 8]), positions + 1)
    return AttentionCall(
        layer=3,
        step=7,
        rank=1,
        mode=Mode.PREFILL,
        rows=Rows((KEYS[1],), np.zeros(3), positions, np.full(3, -1)),
        q=bits(rng, (3, 2, 16)),
        kv=kv,
        sink=None,
        selection=Selection({KVFamily.C4: lists, KVFamily.RECENT: ranges}),
        conventions=CONVENTIONS,
        provenance=PROVENANCE,
    )


def indexer_call(seed: int = 0, *, start: int = 6, keys: Bits | None = None) -> IndexerCall:
    """Four rows of one request that choose at most two of its C4 rows each."""
    rng = np.random.default_rng(seed)
    positions = np.arange(start, start + 4)
    lists = [rng.permutation((p + 1) // 4)[:2] for p in positions.tolist()]
    top_k = Lists.of([np.asarray(ids, np.int64) for ids in lists])
    return IndexerCall(
        layer=3,
        step=7,
        rows=Rows((KEYS[1],), np.zeros(4), positions, np.full(4, -1)),
        query=bits(rng, (4, 3, 8)),
        weights=bits(rng, (4, 3), DType.FLOAT32),
        keys={KEYS[1]: bits(rng, ((start + 4) // 4, 8)) if keys is None else keys},
        top_k=top_k,
        provenance=PROVENANCE,
        k=2,
        family=KVFamily.C4,
        scale_bits=scale_to_bits(0.25),
        scores=bits(rng, (top_k.ids.size,), DType.FLOAT32),
        rank=1,
    )
