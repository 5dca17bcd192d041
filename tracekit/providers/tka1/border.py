"""S3 at the border: the keys of a query row are a set, and these functions make it one."""

import numpy as np
import numpy.typing as npt

from tracekit.errors import InvalidCall

I64 = npt.NDArray[np.int64]

LEAF = 128
"""Rows of a leaf: a constant of the definition (S6)."""


def checked_ranges(lo: I64, hi: I64, first: I64, end: I64, family: int) -> tuple[I64, I64]:
    """Return the ranges, contiguous; an empty one may lie anywhere.

    Args:
        lo: [T], inclusive.
        hi: [T], exclusive.
        first: [T], the lowest row id that was given to the row's request.
        end: [T], one past the highest.
        family: number for the message.

    Raises:
        InvalidCall: `S3-OUTSIDE` for a row id that was not given.
    """
    bad = np.flatnonzero((lo < hi) & ((lo < first) | (hi > end)))
    if bad.size:
        t = int(bad[0])
        _outside(family, t, f"range [{lo[t]}, {hi[t]})", first, end)
    return np.ascontiguousarray(lo), np.ascontiguousarray(hi)


def canonical_lists(ids: I64, offsets: I64, first: I64, end: I64, family: int) -> tuple[I64, I64]:
    """Return (ids, offsets) with each row strictly ascending and without holes.

    Args:
        ids: [n], in any order, -1 anywhere.
        offsets: [T + 1].
        first: [T], the lowest row id that was given to the row's request.
        end: [T], one past the highest.
        family: number for the message.

    Raises:
        InvalidCall: `S3-OFFSETS`, `S3-NEGATIVE`, `S3-OUTSIDE` or `S3-DUPLICATE`.
    """
    counts = np.diff(offsets)
    if offsets[0] != 0 or offsets[-1] != ids.size or (counts < 0).any():
        raise InvalidCall(
            f"family {family}: the offsets must rise from 0 to {ids.size}, the number of ids. "
            "Rule: docs/tka1.md, S3.",
            rule="S3-OFFSETS",
            family=family,
        )
    row = np.repeat(np.arange(counts.size), counts)
    if (ids == -1).any():
        row, ids = row[ids != -1], ids[ids != -1]
    bad = np.flatnonzero((ids < first[row]) | (ids >= end[row]))
    if bad.size:
        t, key = int(row[bad[0]]), int(ids[bad[0]])
        if key < 0:
            raise InvalidCall(
                f"family {family}, query row {t}: row id {key}; only -1 marks a hole. "
                "Rule: docs/tka1.md, S3.",
                rule="S3-NEGATIVE",
                family=family,
                row=t,
                id=key,
            )
        _outside(family, t, f"row id {key}", first, end)
    same_row = row[1:] == row[:-1]
    if (same_row & (ids[1:] <= ids[:-1])).any():
        ids = ids[np.lexsort((ids, row))]
        twice = np.flatnonzero(same_row & (ids[1:] == ids[:-1]))
        if twice.size:
            t, key = int(row[twice[0]]), int(ids[twice[0]])
            raise InvalidCall(
                f"family {family}, query row {t}: row id {key} is listed twice; the keys of a row are a set. "
                "Rule: docs/tka1.md, S3.",
                rule="S3-DUPLICATE",
                family=family,
                row=t,
                id=key,
            )
    starts = np.concatenate([[0], np.cumsum(np.bincount(row, minlength=counts.size))]).astype(np.int64)
    return np.ascontiguousarray(ids), starts


def _outside(family: int, row: int, what: str, first: I64, end: I64) -> None:
    raise InvalidCall(
        f"family {family}, query row {row}: {what} leaves the given rows [{first[row]}, {end[row]}). "
        "Row ids are absolute, not counted from the first given row. Rule: docs/tka1.md, S3.",
        rule="S3-OUTSIDE",
        family=family,
        row=row,
        first=int(first[row]),
        end=int(end[row]),
    )
