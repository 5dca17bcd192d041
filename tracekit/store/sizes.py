"""How much the calls of a checked head hold, and the two tables of calls as one."""

import numpy as np
import numpy.typing as npt

from tracekit.model import Array
from tracekit.store.head import Head
from tracekit.store.schema import DTYPES, OWNERS, Role


def owned(tables: dict[str, Array], field: str) -> Array:
    """One field of all calls, those of attention first: their spans in another table follow one another."""
    return np.concatenate([tables[name][field] for name in OWNERS])


def rows_of(tables: dict[str, Array], owners: Array) -> Array:
    """uint64, T of each call; `owners` is a table of calls or the field `batch` of several."""
    batch = owners if owners.dtype.names is None else owners["batch"]
    return tables["arrays"]["count"][tables["batches"]["positions"][batch]]  # type: ignore[no-any-return]


def decoded_bytes(head: Head) -> npt.NDArray[np.float64]:
    """Float64: bytes of tensors and KV of each call; floats, as hostile sums may not wrap.

    Calls of attention first, then those of indexers.
    """
    tables = head.tables
    calls, tensors, kv = tables["calls"], tables["tensors"], tables["kv"]
    counts, kv_counts = owned(tables, "tensor_count"), owned(tables, "kv_count")
    width = np.array(
        [
            head.payload[f"{Role(role).group}/{stack}"].row_bytes
            for role, stack in zip(tensors["role"].tolist(), tensors["stack"].tolist(), strict=True)
        ],
        np.float64,
    )
    owner = np.repeat(np.arange(len(counts)), counts)
    rows = rows_of(tables, owned(tables, "batch")).astype(np.float64)
    total = np.bincount(owner, width * rows[owner], minlength=len(counts))
    logs = tables["logs"]
    itemsize = np.array([DTYPES[name.decode()].container.itemsize for name in logs["dtype"]], np.float64)
    row_bytes = itemsize * logs["heads"] * (logs["key_dim"].astype(np.float64) + logs["value_dim"])
    owner = np.repeat(np.arange(len(counts)), kv_counts)
    total = total + np.bincount(owner, row_bytes[kv["log"]] * kv["count"], minlength=len(counts))
    arrays = tables["arrays"]
    selections = tables["selections"]
    owner = np.repeat(np.arange(len(calls)), calls["selection_count"])
    ids = (arrays["count"][selections["a"]] + arrays["count"][selections["b"]]).astype(np.float64)
    total = total + np.bincount(owner, 8.0 * ids, minlength=len(counts))
    indexers = tables["indexer_calls"]
    total[len(calls) :] += 12.0 * arrays["count"][indexers["ids"]] + 8.0 * rows[len(calls) :]
    return np.asarray(total, np.float64)
