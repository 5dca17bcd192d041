import numpy as np

from tracekit.recorder.arena import BLOCK, Arena


def copied(arena, source):
    return arena.copy(source.ctypes.data, source.nbytes)


def test_a_copy_is_its_own():
    source = np.arange(7, dtype=np.uint8)
    copy = copied(Arena(), source)
    source[:] = 0

    assert copy.tolist() == list(range(7))


def test_no_two_pieces_share_memory_over_many_blocks():
    arena = Arena()
    sizes = [5, 1 << 20, BLOCK - 7, 64, BLOCK + 9, 3]
    sources = [np.full(size, number + 1, np.uint8) for number, size in enumerate(sizes)]
    pieces = [copied(arena, source) for source in sources]
    arena.empty((100, 3, 2), np.dtype(np.uint16))[:] = 0xFFFF

    assert all(np.array_equal(piece, source) for piece, source in zip(pieces, sources, strict=True))


def test_an_empty_array_has_the_shape_and_is_aligned():
    arena = Arena()
    copied(arena, np.zeros(3, np.uint8))
    array = arena.empty((2, 5, 4), np.dtype(np.uint32))

    assert array.shape == (2, 5, 4)
    assert array.dtype == np.uint32
    assert array.flags.c_contiguous
    assert array.flags.aligned
