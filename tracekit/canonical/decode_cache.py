"""The KV cache of a decode step as an engine describes it, checked in every word, and the sequence in it.

A decode reads rows through a block table; positions, prefix identity and RoPE say what those rows mean. All
of it is checked before a row is taken: a wrong table gives plausible numbers.
"""

import hashlib
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise

import numpy as np

from tracekit.canonical.refuse import Int64, integers, refuse
from tracekit.model import Array


class RopeState(StrEnum):
    """Whether rows are rotated already."""

    PRE_ROPE = "pre_rope"
    POST_ROPE = "post_rope"


@dataclass(frozen=True)
class Prefix:
    """A shared prefix that a sequence goes on from.

    Args:
        key: its name in the prefix cache.
        length: its tokens.
        fingerprint: `prefix_fingerprint` of its rows when they were written.
    """

    key: str
    length: int
    fingerprint: str


@dataclass(frozen=True, eq=False)
class DecodeCache:
    """One layer's cache and how B sequences read it.

    Args:
        keys: bit patterns `[pages, page, Hkv, D]`.
        values: bit patterns `[pages, page, Hkv, Dv]`.
        block_table: int64 `[B, maxblk]`; -1 behind the last page of a sequence, and nowhere else.
        kv_seq_lens: int64 `[B]`, rows held.
        cache_positions: int64 `[B]`, logical position of the last row held: the position of the query.
        global_positions: int64 `[B, Cap]`, position of each row held, rising; -1 behind them.
        key_positions: int64 `[B, Cap]`, the position that each key was rotated with; -1 behind them.
        q_rope: whether queries are rotated already.
        k_rope: whether keys in the cache are.
        prefixes: by sequence the prefix that it shares, or None.

    Raises:
        InvalidCall: `C-DECODE-SHAPE` arrays that do not fit; `C-DECODE-LENGTH` a length that is none, or more
            than its table holds; `C-DECODE-HOLE` -1 inside, or a page behind the end; `C-DECODE-PAGE` a page
            outside of the cache, or twice in a sequence; `C-DECODE-SHARED` a page in two sequences that is no
            whole page of one prefix; `C-DECODE-POSITION` positions that do not rise, or a query that is not
            at the last; `C-DECODE-ROPE` keys rotated with other positions than their own, or queries and
            keys in two states; `C-DECODE-PREFIX` a prefix whose rows are not those of its fingerprint.
    """

    keys: Array
    values: Array
    block_table: Int64
    kv_seq_lens: Int64
    cache_positions: Int64
    global_positions: Int64
    key_positions: Int64
    q_rope: RopeState = RopeState.POST_ROPE
    k_rope: RopeState = RopeState.POST_ROPE
    prefixes: tuple[Prefix | None, ...] = ()

    def __post_init__(self) -> None:
        for name in ("kv_seq_lens", "cache_positions"):
            object.__setattr__(self, name, integers(getattr(self, name), name))
        for name in ("block_table", "global_positions", "key_positions"):
            object.__setattr__(self, name, integers(getattr(self, name), name, ndim=2))
        count = len(self.kv_seq_lens)
        tables = (self.block_table, self.global_positions, self.key_positions)
        fits = all(len(table) == count for table in tables) and len(self.cache_positions) == count
        fits = (
            fits and self.keys.ndim == self.values.ndim == 4 and self.keys.shape[:3] == self.values.shape[:3]
        )
        if not fits or len(self.prefixes) not in (0, count):
            refuse(
                "C-DECODE-SHAPE", f"tables, positions, prefixes and cache of {count} sequences do not fit."
            )
        if self.q_rope is not self.k_rope:
            refuse("C-DECODE-ROPE", f"queries are {self.q_rope} and keys are {self.k_rope}.")
        for sequence in range(count):
            self._check_pages(sequence)
            self._check_positions(sequence)
        self._check_sharing()
        for sequence, prefix in enumerate(self.prefixes):
            if prefix is not None:
                self._check_prefix(sequence, prefix)

    @property
    def page(self) -> int:
        """Rows of a page."""
        return int(self.keys.shape[1])

    def pages_of(self, sequence: int) -> Int64:
        """Return the pages of a sequence, in logical order."""
        count = -(-int(self.kv_seq_lens[sequence]) // self.page)
        pages: Int64 = self.block_table[sequence, :count]
        return pages

    def block(self, sequence: int, number: int) -> tuple[Array, Array]:
        """Return the keys and values of one logical block of a sequence, `[n, Hkv, D]`, n its rows held."""
        page = int(self.pages_of(sequence)[number])
        rows = min(self.page, int(self.kv_seq_lens[sequence]) - number * self.page)
        return self.keys[page, :rows], self.values[page, :rows]

    def logical(self, sequence: int) -> tuple[Array, Array]:
        """Return the keys and values of a sequence as one flat run of rows."""
        parts = [self.block(sequence, number) for number in range(len(self.pages_of(sequence)))]
        return np.concatenate([keys for keys, _ in parts]), np.concatenate([values for _, values in parts])

    def _check_pages(self, sequence: int) -> None:
        length, table = int(self.kv_seq_lens[sequence]), self.block_table[sequence]
        if not 1 <= length <= self.page * len(table):
            refuse(
                "C-DECODE-LENGTH",
                f"sequence {sequence} holds {length} rows on {len(table)} pages.",
                sequence=sequence,
            )
        pages, behind = self.pages_of(sequence), table[len(self.pages_of(sequence)) :]
        if (pages < 0).any() or (behind != -1).any():
            refuse(
                "C-DECODE-HOLE",
                f"the table {table.tolist()} of sequence {sequence} has {len(pages)} pages and then -1.",
                sequence=sequence,
            )
        if (pages >= len(self.keys)).any() or len(set(pages.tolist())) < len(pages):
            refuse("C-DECODE-PAGE", f"sequence {sequence} reads pages {pages.tolist()}.", sequence=sequence)

    def _check_positions(self, sequence: int) -> None:
        length = int(self.kv_seq_lens[sequence])
        for name, rule in (("global_positions", "C-DECODE-POSITION"), ("key_positions", "C-DECODE-ROPE")):
            row = getattr(self, name)[sequence]
            if len(row) < length or (row[:length] < 0).any() or (row[length:] != -1).any():
                refuse(
                    rule, f"{name} of sequence {sequence} are not those of {length} rows.", sequence=sequence
                )
        held = self.global_positions[sequence, :length]
        if any(a >= b for a, b in pairwise(held.tolist())) or self.cache_positions[sequence] != held[-1]:
            refuse(
                "C-DECODE-POSITION",
                f"positions of sequence {sequence} rise, and its query stands at the last of them.",
                sequence=sequence,
            )
        if (self.key_positions[sequence, :length] != held).any():
            refuse("C-DECODE-ROPE", f"keys of sequence {sequence} were rotated elsewhere.", sequence=sequence)

    def _check_sharing(self) -> None:
        """A page belongs to two sequences only as a whole page of a prefix that both name."""
        owner: dict[int, tuple[int, int]] = {}
        for sequence in range(len(self.kv_seq_lens)):
            for number, page in enumerate(self.pages_of(sequence).tolist()):
                first = owner.setdefault(page, (sequence, number))
                if first != (sequence, number) and not self._share(first, (sequence, number)):
                    refuse(
                        "C-DECODE-SHARED",
                        f"page {page} is in sequences {first[0]} and {sequence}, and no prefix says so.",
                        page=page,
                    )

    def _share(self, one: tuple[int, int], other: tuple[int, int]) -> bool:
        prefixes = [self.prefixes[place[0]] if self.prefixes else None for place in (one, other)]
        if prefixes[0] is None or prefixes[1] is None or one[1] != other[1]:
            return False
        whole = (one[1] + 1) * self.page <= min(prefix.length for prefix in prefixes if prefix is not None)
        return prefixes[0].key == prefixes[1].key and whole

    def _check_prefix(self, sequence: int, prefix: Prefix) -> None:
        keys, values = self.logical(sequence)
        if not 1 <= prefix.length <= len(keys):
            refuse("C-DECODE-PREFIX", f"a prefix of {prefix.length} rows of {len(keys)}.", sequence=sequence)
        positions = self.global_positions[sequence, : prefix.length]
        rows = keys[: prefix.length], values[: prefix.length]
        found = prefix_fingerprint(prefix.key, positions, *rows, self.k_rope)
        if found != prefix.fingerprint:
            refuse(
                "C-DECODE-PREFIX",
                f"sequence {sequence} reads other rows than prefix {prefix.key} was written with.",
                sequence=sequence,
            )


def prefix_fingerprint(key: str, positions: Int64, keys: Array, values: Array, rope: RopeState) -> str:
    """Return the SHA-256 of a prefix: its name, positions, rows and their state; pages are not in it."""
    digest = hashlib.sha256(f"{key}\n{rope}\n{keys.dtype}{list(keys.shape)}{list(values.shape)}\n".encode())
    digest.update(np.ascontiguousarray(positions, "<i8").tobytes())
    for rows in (keys, values):
        digest.update(np.ascontiguousarray(rows).tobytes())
    return digest.hexdigest()
