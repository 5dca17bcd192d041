"""Chunks: byte planes, then one zstd frame; what HDF5's shuffle (2) and zstd (32015) filters read.

Setting E uses zstd as an entropy coder: after the shuffle of real activations there is almost nothing to
match, and a search costs time and finds spurious matches. Level 1 wins where rows repeat.
"""

import threading
from enum import IntEnum
from typing import Any

import numpy as np
import zstandard

from tracekit.model import Array
from tracekit.store.rules import corrupt

_local = threading.local()


class Setting(IntEnum):
    """How a dataset is compressed."""

    ENTROPY = 0
    LEVEL_1 = 1


def _compressor(setting: Setting) -> zstandard.ZstdCompressor:
    """One compressor a thread and setting: they hold state and may not be shared."""
    made: dict[Setting, zstandard.ZstdCompressor] = _local.__dict__.setdefault("compressors", {})
    if setting not in made:
        if setting is Setting.ENTROPY:
            parameters = zstandard.ZstdCompressionParameters(
                window_log=20,
                hash_log=6,
                chain_log=6,
                search_log=1,
                min_match=7,
                target_length=0,
                strategy=zstandard.STRATEGY_FAST,
                write_checksum=True,
            )
            made[setting] = zstandard.ZstdCompressor(compression_params=parameters)
        else:
            made[setting] = zstandard.ZstdCompressor(level=1, write_checksum=True)
    return made[setting]


def _scratch(size: int) -> Array:
    """Reused memory of this thread: fresh pages cost more than the shuffle itself."""
    buffer: Array | None = getattr(_local, "scratch", None)
    if buffer is None or buffer.size < size:
        buffer = _local.scratch = np.empty(size, np.uint8)
    return buffer[:size]


def shuffle(chunk: Array) -> Array:
    """Return uint8 `[nbytes]`, all first bytes, all second bytes, ...; valid until the next call here."""
    width, flat = chunk.itemsize, chunk.reshape(-1)
    if width == 1:
        return flat
    planes = _scratch(chunk.nbytes).reshape(width, flat.size)
    if width == 2:
        np.copyto(planes[0], flat, casting="unsafe")
        np.right_shift(flat, 8, out=planes[1], casting="unsafe")
    else:
        planes[:] = flat.view(np.uint8).reshape(-1, width).T
    return planes.reshape(-1)


def unshuffle(planes: Array, out: Array) -> None:
    """Write into contiguous `out` the elements whose byte planes are uint8 `[out.nbytes]`."""
    width, flat = out.itemsize, out.reshape(-1)
    if width == 1:
        flat[:] = planes
    elif width == 2:
        low, high = planes.reshape(2, -1)
        np.left_shift(high, 8, out=flat, dtype=np.uint16, casting="unsafe")
        np.bitwise_or(flat, low, out=flat)
    else:
        flat.view(np.uint8).reshape(-1, width)[:] = planes.reshape(width, -1).T


def encode(chunk: Array, setting: Setting) -> bytes:
    """Return the stored bytes of a full, contiguous chunk."""
    return _compressor(setting).compress(shuffle(chunk).data)


def choose(chunk: Array) -> Setting:
    """Return the setting for a dataset from its first chunk: level 1 where it is over 3 % smaller."""
    planes = shuffle(chunk)
    entropy = len(_compressor(Setting.ENTROPY).compress(planes.data))
    searched = len(_compressor(Setting.LEVEL_1).compress(planes.data))
    return Setting.LEVEL_1 if searched < 0.97 * entropy else Setting.ENTROPY


def decode(stored: bytes, out: Array, where: dict[str, Any]) -> None:
    """Decode one chunk into contiguous `out`.

    Args:
        stored: one zstd frame.
        out: filled completely.
        where: fields for the error.

    Raises:
        TraceCorrupt: E-20 when the bytes are no frame of exactly `out.nbytes` bytes. The size is
            compared before anything is allocated.
    """
    decompressor: zstandard.ZstdDecompressor | None = getattr(_local, "decompressor", None)
    if decompressor is None:
        decompressor = _local.decompressor = zstandard.ZstdDecompressor()
    try:
        frame = zstandard.get_frame_parameters(stored)
        if frame.content_size != out.nbytes or not frame.has_checksum or frame.dict_id:
            raise corrupt(
                "E-20",
                f"Chunk {where} holds {frame.content_size} bytes and its place {out.nbytes}, "
                "or lacks its checksum.",
                **where,
            )
        planes = decompressor.decompress(stored, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise corrupt("E-20", f"Chunk {where} is not one zstd frame ({error}).", **where) from None
    if len(planes) != out.nbytes:
        raise corrupt("E-20", f"Chunk {where} decodes to {len(planes)} bytes, not {out.nbytes}.", **where)
    unshuffle(np.frombuffer(planes, np.uint8), out)
