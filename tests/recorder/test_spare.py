"""Blocks that are made ready between the steps of an engine."""

import threading

import numpy as np

from tracekit.recorder import spare
from tracekit.recorder.arena import Arena
from tracekit.recorder.session import Session
from tracekit.recorder.spare import AHEAD, BLOCK, Spare


def of_memory():
    return [thread for thread in threading.enumerate() if thread.name == "tracekit memory"]


def test_blocks_are_made_while_the_engine_rests_and_each_is_given_once():
    blocks = Spare()
    blocks.rest()
    blocks.settle()
    given = [blocks.take() for _ in range(AHEAD + 1)]

    assert [block.size for block in given] == [BLOCK] * (AHEAD + 1)
    assert len({block.ctypes.data for block in given}) == AHEAD + 1
    assert not any(block.any() for block in given[:AHEAD])


def test_no_block_is_made_while_the_engine_works(monkeypatch):
    monkeypatch.setattr(spare, "_PATIENCE", 0.0)
    blocks = Spare()
    blocks.rest()
    blocks.settle()
    blocks.take()
    blocks.take()
    written = []
    monkeypatch.setattr(spare.ctypes, "memset", lambda *given: written.append(given))
    blocks.work()
    blocks._fill()

    assert not written
    assert not blocks._ready


def test_what_lies_in_a_block_stays_while_others_are_made():
    arena = Arena()
    sources = [np.full(3 << 20, number, np.uint8) for number in range(1, 40)]
    pieces = []
    for source in sources:
        arena.work()
        pieces.append(arena.copy(source.ctypes.data, source.nbytes))
        arena.rest()
    arena._spare.settle()

    assert all(np.array_equal(piece, source) for piece, source in zip(pieces, sources, strict=True))


def test_a_small_recording_has_no_thread_and_a_large_one_no_lasting_one():
    session = Session()
    before = of_memory()
    session.begin({})
    session.arena.empty((1 << 20,), np.dtype(np.uint8))
    session.end()
    assert of_memory() == before
    session.begin({})
    session.arena.empty((20 << 20,), np.dtype(np.uint8))
    session.end()
    session.arena._spare.settle()

    assert of_memory() == before
