"""The datasets of a trace: tables of the index, roles of the payload, codes of enumerations."""

from enum import IntEnum
from typing import Any

import numpy as np

from tracekit.model import DType, KVFamily, Mode, Origin

FORMAT_ATTRIBUTE = "tracekit_format"
DTYPE_ATTRIBUTE = "tracekit_dtype"

TABLES: dict[str, np.dtype[Any]] = {
    "arrays": np.dtype([("width", "<u1"), ("first", "<u8"), ("count", "<u8")]),
    "batches": np.dtype(
        [
            ("members", "<u8"),
            ("member_count", "<u4"),
            ("request", "<u4"),
            ("positions", "<u4"),
            ("tokens", "<u4"),
        ]
    ),
    "calls": np.dtype(
        [
            ("layer", "<u4"),
            ("step", "<u8"),
            ("rank", "<u4"),
            ("mode", "<u1"),
            ("batch", "<u4"),
            ("conventions", "<u4"),
            ("provenance", "<u4"),
            ("sink", "<u4"),
            ("d_sink", "<u4"),
            ("launch", "<u4"),
            ("tensors", "<u8"),
            ("tensor_count", "<u1"),
            ("selections", "<u8"),
            ("selection_count", "<u1"),
            ("kv", "<u8"),
            ("kv_count", "<u4"),
        ]
    ),
    "chunks": np.dtype([("offset", "<u8"), ("stored", "<u4"), ("xxh3_low", "<u8"), ("xxh3_high", "<u8")]),
    "extents": np.dtype([("row", "<u8"), ("count", "<u8")]),
    "indexer_calls": np.dtype(
        [
            ("layer", "<u4"),
            ("step", "<u8"),
            ("rank", "<u4"),
            ("batch", "<u4"),
            ("provenance", "<u4"),
            ("family", "<u1"),
            ("k", "<u4"),
            ("scale_bits", "<u4"),
            ("ids", "<u4"),
            ("offsets", "<u4"),
            ("scores", "<u4"),
            ("tensors", "<u8"),
            ("tensor_count", "<u1"),
            ("kv", "<u8"),
            ("kv_count", "<u4"),
        ]
    ),
    "kv": np.dtype(
        [
            ("role", "<u1"),
            ("request", "<u4"),
            ("family", "<u1"),
            ("generation", "<u8"),
            ("first", "<u8"),
            ("count", "<u8"),
            ("log", "<u4"),
            ("extents", "<u8"),
            ("extent_count", "<u4"),
        ]
    ),
    "logs": np.dtype(
        [("dtype", "S16"), ("heads", "<u4"), ("key_dim", "<u4"), ("value_dim", "<u4"), ("rows", "<u8")]
    ),
    "members": np.dtype("<u4"),
    "requests": np.dtype(
        [
            ("digest", "S16"),
            ("ordinal", "<u4"),
            ("listed", "<u1"),
            ("prompt_length", "<u8"),
            ("tokens", "<u4"),
        ]
    ),
    "selections": np.dtype([("family", "<u1"), ("kind", "<u1"), ("a", "<u4"), ("b", "<u4")]),
    "tensors": np.dtype([("role", "<u1"), ("origin", "<u1"), ("stack", "<u4"), ("first", "<u8")]),
    "text": np.dtype("u1"),
    "texts": np.dtype([("first", "<u8"), ("size", "<u4")]),
}

OPTIONAL_TABLES = frozenset({"indexer_calls"})
"""Absent where they would have no row."""

OWNERS = ("calls", "indexer_calls")
"""The tables whose rows have spans in `tensors` and `kv`, in the order of these spans."""


class Role(IntEnum):
    """What a stack holds; the name in lower case is its group."""

    Q = 0
    OUT = 1
    LSE = 2
    D_OUT = 3
    D_Q = 4
    INDEX_Q = 5
    INDEX_W = 6

    @property
    def group(self) -> str:
        """The group under `/payload`."""
        return self.name.lower()

    @property
    def rank(self) -> int:
        """Dimensions of the stack."""
        return 2 if self in (Role.LSE, Role.INDEX_W) else 3


INDEXER_ROLES = (Role.INDEX_Q, Role.INDEX_W)
"""Query and weights: what a call of an indexer has, and no other call."""


class KVRole(IntEnum):
    """What a KV entry is to its call."""

    READ = 0
    GRADIENT = 1


class SelectionKind(IntEnum):
    """How a selection is stored."""

    RANGES = 0
    LISTS = 1


MODES = (Mode.TRAINING, Mode.PREFILL, Mode.DECODE, Mode.RECOMPUTE)
ORIGINS = (Origin.EXECUTED, Origin.DERIVED)
FAMILIES = (KVFamily.DENSE, KVFamily.RECENT, KVFamily.C4, KVFamily.C128, KVFamily.INDEX)
WIDTHS = (1, 2, 4, 8)
DTYPES = {dtype.value: dtype for dtype in DType}
"""A code is the place in its tuple; new values are added at the end."""


def uint(width: int) -> np.dtype[Any]:
    """Return the unsigned integer of a width in bytes, little-endian."""
    return np.dtype(f"<u{width}")
