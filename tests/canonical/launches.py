"""A call as an engine would launch it, and the call read back from nothing but the launch."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from tracekit.canonical.heads import drop_heads, pad_heads
from tracekit.canonical.packed import PackedBatch
from tracekit.canonical.page_layout import Cache, PageLayout
from tracekit.canonical.paged import gather, scatter
from tracekit.canonical.window import live_rows, window_ranges
from tracekit.model import AttentionCall, Bits, KVFamily, KVRows, RequestKey, Rows, Selection


@dataclass(frozen=True, eq=False)
class Launch:
    """A packed launch over a paged cache.

    Args:
        call: whose identity, conventions and sink are taken; no tensor of it is.
        requests: in executed order.
        cu: query starts.
        q: `[slots, padded heads, D]`.
        tokens: of each query slot.
        seq_lens: keys of each request.
        layout: of the cache.
        cache: the cache.
        tables: block table of each request.
    """

    call: AttentionCall
    requests: tuple[RequestKey, ...]
    cu: np.ndarray
    q: np.ndarray
    tokens: np.ndarray
    seq_lens: np.ndarray
    layout: PageLayout
    cache: Cache
    tables: Sequence[np.ndarray]

    def live(self, number: int) -> tuple[int, int]:
        """The rows of a request that this launch may read."""
        new = int(self.cu[number + 1] - self.cu[number])
        return live_rows(int(self.seq_lens[number]), new, self.call.conventions.window)

    def record(self) -> AttentionCall:
        """The call, from the physical side."""
        batch = PackedBatch.of_cu_seqlens(self.cu, len(self.q))
        positions, slots = batch.positions(self.seq_lens), batch.row_slots
        kv = {}
        for number, key in enumerate(self.requests):
            first, end = self.live(number)
            keys, values = gather(self.cache, self.layout, self.tables[number], first, end)
            assert values is not None
            held = KVRows(Bits(keys, self.call.dtype), Bits(values, self.call.dtype), first)
            kv[key] = {KVFamily.DENSE: held}
        return replace(
            self.call,
            rows=Rows(self.requests, batch.request, positions, self.tokens[slots]),
            q=Bits(drop_heads(self.q, self.call.num_heads)[slots], self.call.dtype),
            kv=kv,
            selection=Selection({KVFamily.DENSE: window_ranges(positions, self.call.conventions.window)}),
        )


def launch(call: AttentionCall, layout: PageLayout, seed: int) -> Launch:
    """Launch a dense call: requests and pages in any order, slots and heads padded, garbage elsewhere."""
    random = np.random.default_rng(seed)
    order = random.permutation(len(call.rows.requests))
    requests = tuple(call.rows.requests[i] for i in order)
    mine = [np.flatnonzero(call.rows.request == i) for i in order]
    mine = [rows[np.argsort(call.rows.positions[rows])] for rows in mine]
    cu = np.cumsum([0, *(rows.size for rows in mine)])
    slots = int(cu[-1]) + int(random.integers(0, 4))
    garbage = 0x7FC1
    q = np.full((slots, call.num_heads + int(random.integers(0, 3)), call.head_dim), garbage, np.uint16)
    q[: cu[-1]] = pad_heads(call.q.data[np.concatenate(mine)], q.shape[1], fill=garbage)
    tokens = np.full(slots, -7)
    tokens[: cu[-1]] = call.rows.token_ids[np.concatenate(mine)]

    seq_lens = np.array([int(call.rows.positions[rows[-1]]) + 1 for rows in mine])
    places = [-(-int(n) // layout.page_size) for n in seq_lens]
    ids = random.permutation(sum(places) + 3)
    cache = layout.empty(ids.size, np.uint16, fill=garbage)
    tables = []
    for number, key in enumerate(requests):
        first, end = live_rows(int(seq_lens[number]), mine[number].size, call.conventions.window)
        table = ids[sum(places[:number]) : sum(places[: number + 1])].copy()
        # Behind the window stands whatever an engine left there: holes, pages of others, no pages at all.
        table[: first // layout.page_size] = random.choice([-1, 0, 10**6], first // layout.page_size)
        held = call.kv[key][KVFamily.DENSE].window(first, end)
        scatter(cache, layout, table, first, held.keys.data, held.value_bits.data)
        tables.append(table)
    return Launch(call, requests, cu, q, tokens, seq_lens, layout, cache, tables)
