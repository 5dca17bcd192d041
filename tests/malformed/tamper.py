"""Break one thing in a good trace, then make every digest right again."""

import hashlib
import json
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import xxhash

from tests.store.calls import KEYS, indexer_call, plan, prefill, recording
from tracekit.model import Bits, KVFamily, KVRows
from tracekit.model.events import Preempt
from tracekit.store import builder, write_trace
from tracekit.store.userblock import UserBlock, parse_user_block


def good(path: Path) -> None:
    """Two calls over two requests; the second reads one changed KV row, so it has three extents."""
    first = prefill(0, (6, 3), launch=plan(9))
    held = first.kv[KEYS[0]][KVFamily.DENSE]
    keys = held.keys.data.copy()
    keys[2] ^= 1
    changed = {**first.kv, KEYS[0]: {KVFamily.DENSE: KVRows(Bits(keys, held.keys.dtype), held.values)}}
    calls = [first, replace(first, kv=changed, launch=None, step=1)]
    write_trace(path, recording(calls), calls)


def good_indexer(path: Path) -> None:
    """One call of attention and two of an indexer."""
    write_trace(path, recording(), [prefill()], indexer_calls=[indexer_call(), indexer_call(1, start=10)])


def good_history(path: Path, entry: tuple[Any, ...] = ("preempt", "a")) -> None:
    """One call, and a history of one preemption, or of an entry that no writer writes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            builder, "history_to_bytes", lambda _: json.dumps([entry], separators=(",", ":")).encode()
        )
        write_trace(path, replace(recording(), history=(Preempt("a"),)), [prefill()])


def block(path: Path) -> UserBlock:
    """Return the user block of a good file."""
    data = path.read_bytes()
    return parse_user_block(data[:512], len(data))


def seal(path: Path, **fields) -> None:
    """Write a user block with some fields of one's own."""
    data = path.read_bytes()
    path.write_bytes(replace(block(path), **fields).pack() + data[512:])


def reseal(path: Path, before: UserBlock, *, head: int | None = None) -> None:
    """Write a user block whose length and digests are right for what is there now."""
    data = path.read_bytes()
    size = before.head if head is None else head
    digests = [hashlib.sha256(part).digest() for part in (data[512 : 512 + size], data[512 + size :])]
    sealed = UserBlock(len(data), size, *digests, before.content_digest)
    path.write_bytes(sealed.pack() + data[512:])


@contextmanager
def table(path: Path, name: str):
    """Change an index table in place."""
    before = block(path)
    with h5py.File(path, "r+", libver=("v110", "v110")) as file:
        dataset = file[f"index/{name}"]
        values = dataset[()]
        yield values
        dataset[...] = values
    reseal(path, before)


def objects(path: Path, change: Callable[[h5py.File], None]) -> None:
    """Change objects of the file; libhdf5 puts new metadata at its end, so all of it becomes head."""
    before = block(path)
    with h5py.File(path, "r+", libver=("v110", "v110")) as file:
        change(file)
    reseal(path, before, head=path.stat().st_size - 512)


def in_place(path: Path, change: Callable[[h5py.File], None]) -> None:
    """Change objects of the file where libhdf5 reuses the place of old ones, so that the layout stays."""
    before = block(path)
    with h5py.File(path, "r+", libver=("v110", "v110")) as file:
        change(file)
    assert path.stat().st_size == before.length
    reseal(path, before)


def text(path: Path, old: bytes, new: bytes) -> None:
    """Replace the first place of some text by text of the same length."""
    assert len(old) == len(new)
    with table(path, "text") as values:
        at = values.tobytes().index(old)
        values[at : at + len(new)] = np.frombuffer(new, np.uint8)


def last_chunk(path: Path, stored: bytes) -> None:
    """Replace the last chunk of the file, at least as long as it was, with its digest in the table."""
    with h5py.File(path) as file:
        row = int(np.argmax(file["index/chunks"]["offset"]))
        offset, size = file["index/chunks"][row].tolist()[:2]
    stored = stored.ljust(size, b"\0")
    digest = xxhash.xxh3_128_intdigest(stored)
    with table(path, "chunks") as chunks:
        chunks[row] = offset, len(stored), digest & (1 << 64) - 1, digest >> 64
    before = block(path)
    path.write_bytes(path.read_bytes()[:offset] + stored)
    reseal(path, before)
