"""The KV cache of a rollout rank: pages in no order, written as rows arrive, read back through its tables."""

from itertools import pairwise

import numpy as np

from tracekit.canonical import paged
from tracekit.canonical.page_layout import PageLayout, Place
from tracekit.model import Array
from tracekit.parallel.attention import Held

Block = tuple[int, int]


class Pages:
    """The pages of one layer on one rank.

    Args:
        blocks: the tokens that the rank owns; each block has a table of its own, from its first token.
        page: tokens of a page.
        heads: KV heads of the rank.
        width: D.
        seed: of the order of the pages.
    """

    def __init__(self, blocks: tuple[Block, ...], page: int, heads: int, width: int, seed: int) -> None:
        sizes = [-(-(stop - start) // page) for start, stop in blocks]
        ids = np.random.default_rng(seed).permutation(sum(sizes)).astype(np.int64)
        cuts = np.cumsum([0, *sizes])
        self.blocks = blocks
        self.layout = PageLayout(page, heads, width, place=Place.APART)
        self.tables = [ids[a:b] for a, b in pairwise(cuts)]
        self.cache: tuple[Array, Array] = (
            np.full((max(1, len(ids)), page, heads, width), 0xFFFF, np.uint16),  # NaN until it is written
            np.full((max(1, len(ids)), page, heads, width), 0xFFFF, np.uint16),
        )

    def write(self, first: int, keys: Array, values: Array) -> None:
        """Write those of tokens `first ..` that this rank owns."""
        for (start, stop), table in zip(self.blocks, self.tables, strict=True):
            low, high = max(start, first), min(stop, first + len(keys))
            if low < high:
                rows = slice(low - first, high - first)
                paged.scatter(self.cache, self.layout, table, low - start, keys[rows], values[rows])

    def overwrite(self, token: int) -> None:
        """Put the row before a token in its place, if it is here: what a reused slot looks like."""
        for (start, stop), table in zip(self.blocks, self.tables, strict=True):
            if start < token < stop:
                keys, values = paged.gather(self.cache, self.layout, table, token - 1 - start, token - start)
                assert values is not None
                paged.scatter(self.cache, self.layout, table, token - start, keys, values)

    def read(self, end: int, *, swapped: bool = False) -> list[Held]:
        """Return what is held of tokens before `end`, read back from the pages, one a block.

        Args:
            end: tokens that were written.
            swapped: read the first two pages of each table in each other's place.
        """
        held = []
        for (start, stop), pages in zip(self.blocks, self.tables, strict=True):
            table = (
                np.concatenate([pages[1::-1], pages[2:]])
                if swapped and end - start > 2 * self.layout.page_size
                else pages
            )
            keys, values = paged.gather(self.cache, self.layout, table, 0, max(0, min(stop, end) - start))
            assert values is not None
            held.append(Held(start, keys, values))
        return held
