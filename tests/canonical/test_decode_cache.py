"""A decode cache is checked in every word, and gives the logical sequence whatever pages it lies on."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tracekit.canonical.decode_cache import DecodeCache, Prefix, RopeState, prefix_fingerprint
from tracekit.errors import InvalidCall

PAGE, HEADS, WIDTH = 4, 2, 8
LENGTHS = (11, 9)
PREFIX = 8


def cache(seed: int = 0, **changes: Any) -> DecodeCache:
    """Two sequences that share a prefix of two pages."""
    random = np.random.default_rng(seed)
    pages = random.permutation(7)
    rows = np.random.default_rng(5).integers(0, 2**16, (2, 7, PAGE, HEADS, WIDTH)).astype(np.uint16)
    keys, values = (np.empty_like(part) for part in rows)
    keys[pages], values[pages] = rows
    shared, own = pages[:2], pages[2:]
    table = np.array([[*shared, own[0], -1], [*shared, own[1], -1]])
    positions = np.full((2, 12), -1)
    for sequence, length in enumerate(LENGTHS):
        positions[sequence, :length] = np.arange(length)
    flat = (part[:2].reshape(PREFIX, HEADS, WIDTH) for part in rows)
    prefix = Prefix(
        "system", PREFIX, prefix_fingerprint("system", np.arange(PREFIX), *flat, RopeState.POST_ROPE)
    )
    sound: dict[str, Any] = {
        "keys": keys,
        "values": values,
        "block_table": table,
        "kv_seq_lens": np.array(LENGTHS),
        "cache_positions": np.array(LENGTHS) - 1,
        "global_positions": positions,
        "key_positions": positions.copy(),
        "prefixes": (prefix, prefix),
    }
    return DecodeCache(**{**sound, **changes})


def test_pages_are_no_part_of_the_logical_sequence() -> None:
    one, other = cache(0), cache(1)

    assert not np.array_equal(one.block_table, other.block_table)
    for sequence, length in enumerate(LENGTHS):
        for ours, theirs in zip(one.logical(sequence), other.logical(sequence), strict=True):
            assert ours.shape == (length, HEADS, WIDTH)
            assert np.array_equal(ours, theirs)


def table(*rows: list[int]) -> Any:
    return np.array(rows)


SOUND = cache()
assert SOUND.prefixes[0] is not None
SHARED = SOUND.prefixes[0]
A, B, C, D = (int(page) for page in (*SOUND.block_table[0, :3], SOUND.block_table[1, 2]))

FREE = sorted({*range(7)} - {A, B, C, D})[:2]


def _moved(**changes: tuple[tuple[int, int], int]) -> dict[str, Any]:
    found = {}
    for name, (place, value) in changes.items():
        array = getattr(SOUND, name).copy()
        array[place if array.ndim == 2 else place[0]] = value
        found[name] = array
    return found


def _other_row() -> dict[str, Any]:
    keys = SOUND.keys.copy()
    keys[A, 1, 0, 0] ^= 1
    return {"keys": keys}


@pytest.mark.parametrize(
    ("rule", "changes"),
    [
        ("C-DECODE-SHAPE", {"values": SOUND.values[:, :2]}),
        ("C-DECODE-SHAPE", {"prefixes": SOUND.prefixes[:1]}),
        ("C-DECODE-SHAPE", {"cache_positions": np.array([10])}),
        ("C-INTEGERS", {"block_table": np.array([[0.0, 1.0]])}),
        ("C-DECODE-LENGTH", _moved(kv_seq_lens=((0, 0), 0))),
        ("C-DECODE-LENGTH", _moved(kv_seq_lens=((0, 0), 17))),
        ("C-DECODE-HOLE", {"block_table": table([A, -1, C, -1], [A, B, D, -1])}),
        ("C-DECODE-HOLE", {"block_table": table([A, B, C, 6], [A, B, D, -1])}),
        ("C-DECODE-PAGE", {"block_table": table([A, B, 7, -1], [A, B, D, -1])}),
        ("C-DECODE-PAGE", {"block_table": table([A, B, A, -1], [A, B, D, -1])}),
        ("C-DECODE-SHARED", {"block_table": table([A, B, C, -1], [A, B, C, -1])}),
        ("C-DECODE-SHARED", {"block_table": table([A, B, C, -1], [B, A, D, -1])}),
        ("C-DECODE-SHARED", {"prefixes": ()}),
        ("C-DECODE-POSITION", _moved(cache_positions=((0, 0), 9))),
        ("C-DECODE-POSITION", _moved(global_positions=((0, 5), 4))),
        ("C-DECODE-POSITION", _moved(global_positions=((0, 11), 11))),
        ("C-DECODE-ROPE", _moved(key_positions=((1, 3), 2))),
        ("C-DECODE-ROPE", {"q_rope": RopeState.PRE_ROPE}),
        ("C-DECODE-PREFIX", _other_row()),
        ("C-DECODE-PREFIX", {"prefixes": (replace(SHARED, length=12),) * 2}),
        ("C-DECODE-PREFIX", {"prefixes": (replace(SHARED, fingerprint="0" * 64),) * 2}),
    ],
)
def test_what_is_refused(rule: str, changes: dict[str, Any]) -> None:
    with pytest.raises(InvalidCall) as refused:
        cache(**changes)

    assert refused.value.rule == rule


def test_positions_may_begin_above_zero_after_a_window() -> None:
    shifted = SOUND.global_positions + np.where(SOUND.global_positions < 0, 0, 128)
    found = cache(
        global_positions=shifted,
        key_positions=shifted,
        cache_positions=SOUND.cache_positions + 128,
        block_table=table([A, B, C, -1], [*FREE, D, -1]),
        prefixes=(),
    )

    assert len(found.logical(0)[0]) == LENGTHS[0]
