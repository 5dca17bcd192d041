"""What a trace may hold at most (docs/format.md, "Limits"); checked before anything is allocated."""

FORMAT = (0, 1)
"""Format version, major and minor."""

USER_BLOCK = 512
MAX_HEAD = 1 << 30
MAX_DATASETS = 4096
MAX_TENSOR_RANK = 3
MAX_DIMENSION = 1 << 20
MAX_CHUNK = 16 << 20
MAX_ROW = 64 << 20
MAX_TEXT = 64 << 20
MAX_CALL = 16 << 30
MAX_ARRAY_RANK = 8
MAX_NUMBER = 1 << 62
"""Steps, KV row numbers and generations lie below it, so that sums of two fit into int64."""
NONE = 0xFFFF_FFFF
"""The table reference that points at nothing."""

LARGE_CHUNK = 512 << 10
SMALL_CHUNK = 64 << 10
POOL_CHUNK = 256 << 10


def chunk_rows(row_bytes: int, target: int) -> int:
    """Return how many rows make a chunk of at most `target` bytes, at least one."""
    return max(1, target // row_bytes)


def chunk_limit(row_bytes: int) -> int:
    """Return the largest chunk that a dataset of such rows may have, in decoded bytes."""
    return min(max(MAX_CHUNK, row_bytes), MAX_ROW)
