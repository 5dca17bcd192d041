"""The rows of all ranks as one trace, in logical words."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from tools.binding.job import Job
from tracekit.contract import Role
from tracekit.model import (
    Array,
    AttentionCall,
    Bits,
    Conventions,
    DType,
    Gradients,
    Identity,
    KVFamily,
    KVRows,
    KVSource,
    Mode,
    Origin,
    Output,
    Provenance,
    Ranges,
    Recording,
    Request,
    Rows,
    Selection,
    StepRecord,
)
from tracekit.providers.portable import Tka1
from tracekit.store import write_trace

ROWS = ("q", "out", "lse", "d_out", "d_q")


def write_run_trace(job: Job, role: Role, folder: Path, shards: Path) -> None:
    """Write `trace.h5` of a run whose ranks left `tpT-cpC.npz`."""
    launches = [(0, job.tokens)] if role is Role.TRAIN else job.launches()
    tokens = np.array(job.token_ids, np.int64)
    recording = Recording(
        Identity("tools.binding", "attention of Qwen3-8B's shape"),
        (Request(job.key, tokens, job.prompt, "0"),),
        tuple(StepRecord(step, job.layers, job.layers, job.layers, 0) for step in range(len(launches))),
    )
    layers = [_layer(job, layer, shards) for layer in range(job.layers)]

    def calls() -> Iterator[AttentionCall]:
        for step, (start, stop) in enumerate(launches):
            for layer, tensors in enumerate(layers):
                yield _call(job, role, step, layer, tensors, start, stop)

    write_trace(folder / "trace.h5", recording, calls())


def _layer(job: Job, layer: int, shards: Path) -> dict[str, Array]:
    """The tensors of a layer, all tokens and all heads."""
    whole: dict[str, list[Array]] = {}
    for tp_rank in range(job.tp):
        columns: dict[str, Array] = {}
        for cp_rank, owner in enumerate(job.owners):
            tokens = np.concatenate([np.arange(*block) for block in owner.ranges] or [np.zeros(0, np.int64)])
            with np.load(shards / f"tp{tp_rank}-cp{cp_rank}.npz") as held:
                for name in held.files:
                    number, _, tensor = name.partition(".")
                    if int(number) == layer:
                        part = held[name]
                        empty = np.empty((job.tokens, *part.shape[1:]), part.dtype)
                        columns.setdefault(tensor, empty)[tokens.astype(np.int64)] = part
        for tensor, column in columns.items():
            whole.setdefault(tensor, []).append(column)
    return {
        tensor: columns[0] if tensor == "seen" else np.concatenate(columns, axis=1)
        for tensor, columns in whole.items()
    }


def _call(
    job: Job, role: Role, step: int, layer: int, tensors: dict[str, Array], start: int, stop: int
) -> AttentionCall:
    """One launch of one layer: rows `start .. stop - 1`."""
    positions = np.arange(start, stop, dtype=np.int64)
    count = len(positions)
    mode = Mode.TRAINING if role is Role.TRAIN else Mode.DECODE if stop > job.prompt else Mode.PREFILL
    bits = {
        name: _bits(job, array[start:stop] if name in ROWS else array[:stop])
        for name, array in tensors.items()
        if name != "seen"
    }
    first, end = tensors["seen"][start:stop].T
    ran = Tka1().identity()
    return AttentionCall(
        layer=layer,
        step=step,
        mode=mode,
        rows=Rows((job.key,), np.zeros(count, np.int32), positions, np.array(job.token_ids[start:stop])),
        q=bits["q"],
        kv={job.key: {KVFamily.DENSE: KVRows(bits["keys"], bits["values"])}},
        sink=None,
        selection=Selection({KVFamily.DENSE: Ranges(first.copy(), end.copy())}),
        conventions=Conventions(
            job.shape.scale_bits, causal=job.settings.sees != "ahead", kv_source=KVSource.CONSUMED
        ),
        provenance=Provenance("tracekit", ran.kernel, ran),
        out=Output(bits["out"], Origin.EXECUTED),
        lse=Output(bits["lse"], Origin.EXECUTED),
        grads=_gradients(job, bits) if role is Role.TRAIN else None,
    )


def _gradients(job: Job, bits: dict[str, Bits]) -> Gradients:
    d_kv = {job.key: {KVFamily.DENSE: KVRows(bits["d_keys"], bits["d_values"])}}
    return Gradients(bits["d_out"], bits["d_q"], d_kv)


def _bits(job: Job, array: Array) -> Bits:
    return Bits(array, job.settings.dtype if array.dtype == np.uint16 else DType.FLOAT32)
