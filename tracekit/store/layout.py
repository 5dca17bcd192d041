"""The HDF5 file: head first, then the chunks in call order, without gaps."""

import hashlib
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from h5py import h5d, h5f, h5fd, h5p, h5s, h5t, h5z

from tracekit.model import Array
from tracekit.store.column import Column
from tracekit.store.head_sink import HeadSink, write_all
from tracekit.store.limits import FORMAT, USER_BLOCK
from tracekit.store.schema import DTYPE_ATTRIBUTE, FORMAT_ATTRIBUTE, TABLES
from tracekit.store.spool import Chunk, Spool
from tracekit.store.structure import ZSTD_FILTER

_MASK = (1 << 64) - 1


@dataclass(frozen=True)
class Written:
    """What the user block says of a file that was laid out."""

    head: int
    length: int
    head_digest: bytes
    payload_digest: bytes


def write_file(path: Path, tables: Mapping[str, Array], columns: Sequence[Column], spool: Spool) -> Written:
    """Write everything but the user block.

    libhdf5 lays the file out in memory and never sees the disk: where a write fails inside it, closing the
    file crashes the process.

    Args:
        path: overwritten.
        tables: every table but `chunks`.
        columns: finished payload datasets that have rows.
        spool: holds their chunks.

    Raises:
        RuntimeError: libhdf5 put metadata between the chunks.
        OSError: the disk refuses.
    """
    columns = sorted(columns, key=lambda column: column.path.encode())
    order = sorted(spool.chunks, key=lambda chunk: (chunk.call, chunk.path.encode(), chunk.number))
    head = _head(tables, columns, order)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    try:
        write_all(descriptor, head)
        payload_digest = _write_chunks(descriptor, order, spool)
    finally:
        os.close(descriptor)
    length = len(head) + sum(chunk.size for chunk in order)
    head_digest = hashlib.sha256(memoryview(head)[USER_BLOCK:]).digest()
    return Written(len(head) - USER_BLOCK, length, head_digest, payload_digest)


def _head(tables: Mapping[str, Array], columns: Sequence[Column], order: Sequence[Chunk]) -> bytes:
    """Return the bytes before the first chunk; the chunks follow in `order`, without gaps."""
    sink = HeadSink()
    with h5py.File(_create(sink)) as file:
        file.attrs.create(FORMAT_ATTRIBUTE, np.bytes_("{}.{}".format(*FORMAT)))
        groups = {"index", "payload"} | {f"payload/{column.path.rpartition('/')[0]}" for column in columns}
        for name in sorted(groups):
            _create_group(file, name)
        datasets = {column.path: _create_payload(file, column) for column in columns}
        listing = np.zeros(len(order), TABLES["chunks"])
        # The table is written twice: now, to have its place before the chunks, and when offsets are known.
        index = {
            name: _create_table(file, name, table) for name, table in {**tables, "chunks": listing}.items()
        }
        file.flush()  # gives a group of many links its place
        offsets = _place_chunks(sink, datasets, order)
        placed = sorted(
            zip(order, offsets, strict=True), key=lambda pair: (pair[0].path.encode(), pair[0].number)
        )
        for row, (chunk, offset) in enumerate(placed):
            listing[row] = offset, chunk.size, chunk.digest & _MASK, chunk.digest >> 64
        index["chunks"].write(h5s.ALL, h5s.ALL, listing)
    ends = [offset + chunk.size for offset, chunk in zip(offsets, order, strict=True)]
    if [*offsets[1:], sink.length] != ends:
        raise RuntimeError("libhdf5 did not keep the metadata before the chunks")
    return sink.head(offsets[0])


def _create(sink: HeadSink) -> h5f.FileID:
    creation = h5p.create(h5p.FILE_CREATE)
    creation.set_userblock(USER_BLOCK)
    creation.set_obj_track_times(False)
    access = h5p.create(h5p.FILE_ACCESS)
    access.set_libver_bounds(h5f.LIBVER_V110, h5f.LIBVER_V110)
    access.set_fclose_degree(h5f.CLOSE_STRONG)
    access.set_fileobj_driver(h5fd.fileobj_driver, sink)
    return h5f.create(b"head", h5f.ACC_TRUNC, creation, access)


def _create_group(file: h5py.File, name: str) -> None:
    creation = h5p.create(h5p.GROUP_CREATE)
    creation.set_obj_track_times(False)
    h5py.h5g.create(file.id, name.encode(), gcpl=creation)


def _create_payload(file: h5py.File, column: Column) -> h5d.DatasetID:
    creation = h5p.create(h5p.DATASET_CREATE)
    creation.set_obj_track_times(False)
    creation.set_fill_time(h5d.FILL_TIME_NEVER)
    creation.set_chunk((column.chunk_rows, *column.row_shape))
    creation.set_shuffle()
    # Optional, because the filter need not be installed to write chunks that are encoded here.
    creation.set_filter(ZSTD_FILTER, h5z.FLAG_OPTIONAL, (1,))
    space = h5s.create_simple((column.rows, *column.row_shape))
    element = h5t.py_create(column.dtype)
    dataset = h5d.create(file.id, f"payload/{column.path}".encode(), element, space, creation)
    if column.logical:
        h5py.Dataset(dataset).attrs.create(DTYPE_ATTRIBUTE, np.bytes_(column.logical))
    return dataset


def _create_table(file: h5py.File, name: str, table: Array) -> h5d.DatasetID:
    creation = h5p.create(h5p.DATASET_CREATE)
    creation.set_obj_track_times(False)
    creation.set_fill_time(h5d.FILL_TIME_NEVER)
    space, element = h5s.create_simple(table.shape), h5t.py_create(table.dtype)
    dataset = h5d.create(file.id, f"index/{name}".encode(), element, space, creation)
    if table.size:
        dataset.write(h5s.ALL, h5s.ALL, np.ascontiguousarray(table))
    return dataset


def _place_chunks(sink: HeadSink, datasets: Mapping[str, h5d.DatasetID], order: Sequence[Chunk]) -> list[int]:
    """Give each chunk its place, with zeros for its bytes; return the offsets."""
    # libhdf5 makes the chunk index of a dataset at its first chunk; a single chunk needs none.
    for path in sorted({chunk.path for chunk in order if chunk.number}):
        datasets[path].write_direct_chunk((0,) * datasets[path].rank, b"\0")
    zeros = bytes(max((chunk.size for chunk in order), default=0))
    offsets = []
    for chunk in order:
        data = zeros if chunk.size == len(zeros) else zeros[: chunk.size]
        datasets[chunk.path].write_direct_chunk(_place(datasets[chunk.path], chunk), data)
        offsets.append(_offset(datasets[chunk.path], chunk))
        sink.end_head(offsets[0])
    return offsets


def _write_chunks(descriptor: int, order: Sequence[Chunk], spool: Spool) -> bytes:
    """Write the chunks and return the SHA-256 of all of them, which a thread computes meanwhile.

    A spool of one thread has no other: at the end of a Python program none can be started.
    """
    digest = hashlib.sha256()
    if spool.threads == 1:
        for chunk in order:
            stored = spool.read(chunk)
            digest.update(stored)
            write_all(descriptor, stored)
        return digest.digest()
    hashed: list[Future[Any]] = []
    with ThreadPoolExecutor(1) as hasher:
        for chunk in order:
            stored = spool.read(chunk)
            hashed = [*hashed[-8:], hasher.submit(digest.update, stored)]
            hashed[0].result()
            write_all(descriptor, stored)
    return digest.digest()


def _place(dataset: h5d.DatasetID, chunk: Chunk) -> tuple[int, ...]:
    """Coordinates of the first element of a chunk."""
    size = dataset.get_create_plist().get_chunk()
    return (chunk.number * size[0], *(0 for _ in size[1:]))


def _offset(dataset: h5d.DatasetID, chunk: Chunk) -> int:
    return int(dataset.get_chunk_info_by_coord(_place(dataset, chunk)).byte_offset)
