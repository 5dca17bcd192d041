"""Whole calls: what the launch looked like is not content, and every bit that was read is."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.canonical.launches import launch
from tests.canonical.layouts import layouts
from tracekit.canonical.fp8 import ScaleFormat, Stored
from tracekit.canonical.fp8_ds_mla import LatentPages, LatentStorage
from tracekit.canonical.heads import HeadShards
from tracekit.canonical.mla import latent_rows
from tracekit.canonical.page_layout import PageLayout, Place
from tracekit.canonical.paged import family_page_size, gather, page_slots, scatter
from tracekit.canonical.ring import ring_fill, ring_slots
from tracekit.canonical.selection import LiveSlots, to_logical, to_physical
from tracekit.canonical.shards import shard_rows, unshard_rows, zigzag
from tracekit.model import AttentionCall, Bits, DType, KVFamily, KVRows, Lists, Mode, Recording, Selection
from tracekit.store import write_trace
from tracekit.store.content import ContentDigest
from tracekit.store.rowlog import RowLog
from tracekit.testing.build import dense_call, sparse_call


def digest(*calls: AttentionCall) -> str:
    """The content digest of a trace of these calls, without the file."""
    log, content = RowLog(), ContentDigest()
    for index, call in enumerate(calls):
        content.add(call, log.add_call(call, index))
    return content.finish(log).hex()


def test_the_digest_of_these_tests_is_that_of_a_trace(tmp_path):
    call = launch(dense_call(lengths=(5, 9)), PageLayout(4, 2, 16), 0).record()
    assert digest(call) == write_trace(tmp_path / "x.h5", Recording(), [call]).content_digest


@st.composite
def dense(draw: st.DrawFn, *, new: bool = True) -> AttentionCall:
    """A dense call in request order; with `new` some of its requests are decodes or later chunks."""
    lengths = draw(st.lists(st.integers(1, 14), min_size=1, max_size=3))
    counts = [draw(st.integers(1, n)) for n in lengths] if new else None
    window = draw(st.none() | st.integers(1, 6))
    seed = draw(st.integers(0, 2**32 - 1))
    return dense_call(lengths=lengths, new=counts, window=window, head_dim=3, seed=seed)


@st.composite
def layout_for(draw: st.DrawFn, call: AttentionCall) -> PageLayout:
    page_size = draw(st.integers(1, 5))
    sizes = (page_size, call.num_kv_heads, call.head_dim, call.value_dim)
    return draw(st.sampled_from([one for one in layouts(*sizes) if one.place is not Place.SHARED]))


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_pages_packing_padding_and_order_are_not_content(data):
    call = data.draw(dense())
    seeds = [data.draw(st.integers(0, 2**32 - 1)) for _ in range(2)]
    first, second = (launch(call, data.draw(layout_for(call)), seed).record() for seed in seeds)
    assert digest(first) == digest(second)


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_how_rows_are_cut_into_launches_is_not_content(data):
    """One prefill; or chunks, each in other pages, over what its rows may still read; or decodes."""
    call = data.draw(dense(new=False))
    whole = launch(call, data.draw(layout_for(call)), 0).record()
    chunk = data.draw(st.integers(1, 6))
    pieces = []
    for step, start in enumerate(range(0, int(call.rows.positions.max()) + 1, chunk)):
        inside = (call.rows.positions >= start) & (call.rows.positions < start + chunk)
        piece = replace(
            call.take(np.flatnonzero(inside)), step=step, mode=Mode.DECODE if step else Mode.PREFILL
        )
        pieces.append(launch(piece, data.draw(layout_for(call)), step).record())
    assert digest(whole) == digest(*pieces)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_bit_moves_the_digest_if_and_only_if_a_row_could_read_it(data):
    call = data.draw(dense())
    layout = data.draw(layout_for(call))
    one = launch(call, layout, data.draw(st.integers(0, 2**32 - 1)))
    # Which elements are live is found by writing ones through the same tables into a shadow of the cache.
    shadow = layout.empty(layout.pages(one.cache), np.uint8)
    for number, table in enumerate(one.tables):
        begin, end = one.live(number)
        ones = np.ones((end - begin, call.num_kv_heads, call.head_dim), np.uint8)
        scatter(shadow, layout, table, begin, ones, ones)
    before = digest(one.record())
    caches, shadows = (c if isinstance(c, tuple) else (c,) for c in (one.cache, shadow))
    which = data.draw(st.integers(0, len(caches) - 1))
    at = np.unravel_index(data.draw(st.integers(0, caches[which].size - 1)), caches[which].shape)

    caches[which][at] ^= 1 << data.draw(st.integers(0, 15))

    assert (digest(one.record()) != before) is bool(shadows[which][at])


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_a_bit_of_a_query_moves_the_digest_and_one_of_its_padding_does_not(data):
    call = data.draw(dense())
    one = launch(call, data.draw(layout_for(call)), data.draw(st.integers(0, 2**32 - 1)))
    before = digest(one.record())
    at = np.unravel_index(data.draw(st.integers(0, one.q.size - 1)), one.q.shape)
    one.q[at] ^= 1 << data.draw(st.integers(0, 15))
    assert (digest(one.record()) != before) is bool(at[0] < one.cu[-1] and at[1] < call.num_heads)


def test_a_page_given_to_the_wrong_request_moves_the_digest():
    call = dense_call(lengths=(8, 8), head_dim=4)
    one = launch(call, PageLayout(4, 2, 4), 1)
    swapped = replace(one, tables=[one.tables[1], one.tables[0]])
    assert digest(one.record()) != digest(swapped.record())


@pytest.mark.parametrize("page_size", [1, 7, 64])
def test_latent_rows_are_the_same_content_at_any_page_size(page_size):
    """aiter#3095 at the level of a call: MLA, D = 6, Dv = 4, one KV head."""
    base = dense_call(lengths=(70,), heads=2, kv_heads=1, head_dim=6)
    latents = base.kv[base.rows.requests[0]][KVFamily.DENSE].keys.data
    layout = PageLayout(page_size, 1, 6, place=Place.SHARED)
    table = np.random.default_rng(page_size).permutation(80)[: -(-70 // page_size)]
    cache = layout.empty(80, np.uint16, fill=0x7FC1)
    scatter(cache, layout, table, 0, latents, None)

    def call(rows: np.ndarray) -> AttentionCall:
        keys, values = (Bits(part, base.dtype) for part in latent_rows(rows, 4))
        return base.with_kv({base.rows.requests[0]: {KVFamily.DENSE: KVRows(keys, values)}})

    assert digest(call(gather(cache, layout, table, 0, 70)[0])) == digest(call(latents))


def test_ranks_are_not_content_once_their_parts_are_joined():
    """TP 4 over 2 KV heads, and CP 2 zigzag over the keys of a sequence."""
    call = dense_call(lengths=(12,), heads=8, kv_heads=2, head_dim=4)
    (key,) = call.rows.requests
    held = call.kv[key][KVFamily.DENSE]
    heads, blocks = HeadShards(8, 2, 4), zigzag(12, 2)

    def through_ranks(bits: Bits) -> Bits:
        ranks = [[p.copy() for p in shard_rows(part, blocks)] for part in heads.shard_kv(bits.data)]
        return Bits(heads.unshard_kv([unshard_rows(parts, blocks, 12) for parts in ranks]), bits.dtype)

    joined = replace(
        call.with_kv(
            {key: {KVFamily.DENSE: KVRows(through_ranks(held.keys), through_ranks(held.value_bits))}}
        ),
        q=Bits(heads.unshard_query(heads.shard_query(call.q.data)), call.dtype),
    )
    assert digest(joined) == digest(call)


class LatentLaunch:
    """DeepSeek-V4: C4 rows in pages, recent rows in a ring, FP8 storage, a physical selection."""

    TOKENS, WINDOW = 40, 8

    def __init__(self, seed: int, block_size: int, base: int) -> None:
        random = np.random.default_rng(seed)
        self.call = sparse_call(lengths=(self.TOKENS,), new=(1,), head_dim=512, window=self.WINDOW, seed=3)
        self.compressed = LatentPages(family_page_size(block_size, KVFamily.C4), DType.FLOAT8_E4M3FN)
        self.recent = LatentPages(16, DType.FLOAT8_E4M3FN)
        self.pages = self.compressed.empty(20, fill=0x7F)
        self.ring = self.recent.empty(3, fill=0x7F)
        self.table = random.permutation(20)[: -(-10 // self.compressed.page_size)]
        self.base = base
        self.positions = range(self.TOKENS - self.WINDOW, self.TOKENS)
        slots, self.stored = ring_fill(np.full(48, -1), self.positions, base=base, length=self.WINDOW)
        self.recent.write(self.ring, slots, _latents(self.WINDOW, 1))
        self.compressed.write(self.pages, self._compressed_slots(), _latents(10, 2))
        live = [LiveSlots(self._compressed_slots())]
        self.indices = to_physical(self.call.selection.families[KVFamily.C4], [0], live, 9)

    def _compressed_slots(self) -> np.ndarray:
        return page_slots(self.table, range(10), self.compressed.page_size, pages=20)

    def record(self) -> AttentionCall:
        (key,) = self.call.rows.requests
        slots = ring_slots(self.positions, base=self.base, length=self.WINDOW, stored=self.stored)
        kv = {
            KVFamily.C4: KVRows(self.compressed.read(self.pages, self._compressed_slots()).keys(), None),
            KVFamily.RECENT: KVRows(self.recent.read(self.ring, slots).keys(), None, self.positions[0]),
        }
        chosen = to_logical(self.indices, [0], [LiveSlots(self._compressed_slots())])
        families = {KVFamily.C4: chosen, KVFamily.RECENT: self.call.selection.families[KVFamily.RECENT]}
        return replace(self.call, kv={key: kv}, selection=Selection(families))


def _latents(count: int, seed: int) -> LatentStorage:
    random = np.random.default_rng(seed)
    codes = Bits(random.integers(0, 127, (count, 448), np.uint8), DType.FLOAT8_E4M3FN)
    scales = random.integers(120, 130, (count, 7), np.uint8)
    rope = Bits(random.integers(0, 0x7F80, (count, 64), np.uint16), DType.BFLOAT16)
    return LatentStorage(Stored(codes, scales, ScaleFormat.UE8M0, 64), rope)


def test_pages_of_several_families_a_ring_and_physical_indices_are_not_content():
    launches = [LatentLaunch(0, 8, 0), LatentLaunch(1, 32, 17), LatentLaunch(2, 4, 40)]
    assert len({digest(one.record()) for one in launches}) == 1
    assert len({one.indices.tobytes() for one in launches}) == 3
    assert isinstance(launches[0].record().selection.families[KVFamily.C4], Lists)


@pytest.mark.parametrize("where", ["code", "rope", "scale", "ring", "index", "pad", "dead"])
def test_a_byte_of_a_latent_page_is_content_where_a_row_lives(where):
    one = LatentLaunch(0, 8, 0)
    before = digest(one.record())
    page, unused = int(one.table[0]), int(next(p for p in range(20) if p not in one.table))
    match where:
        case "code":
            one.pages[page, 5] ^= 1
        case "rope":
            one.pages[page, 575] ^= 1
        case "scale":
            one.pages[page, 2 * 576] += 1
        case "ring":
            one.ring[0, 5] ^= 1
        case "index":
            one.indices[0, :2] = one.indices[0, 1::-1].copy()
        case "pad":
            one.pages[page, 2 * 576 + 7] ^= 0xFF
            one.pages[page, one.compressed.used_bytes :] ^= 0xFF
        case "dead":
            one.pages[unused] ^= 0xFF
    assert (digest(one.record()) == before) is (where in ("pad", "dead"))
