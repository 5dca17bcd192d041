"""The content digest: the same for the same content however it was run and stored, another for any bit."""

from dataclasses import replace

import numpy as np
import pytest

from tests.store.calls import KEYS, bits, plan, prefill, recording, two_families
from tracekit.model import (
    Bits,
    Conventions,
    ExecutedIdentity,
    KVFamily,
    KVRows,
    Lists,
    Mode,
    Origin,
    Output,
    Provenance,
    Ranges,
    Recording,
    Rows,
    Selection,
)
from tracekit.store import open_trace, verify_trace, write_trace
from tracekit.store.codec import Setting


@pytest.fixture
def digest(tmp_path):
    """Return the content digest of calls, after a whole verification."""

    def write(*calls, around=None):
        path = tmp_path / "x.h5"
        summary = write_trace(path, around or Recording(), calls)
        assert verify_trace(path) == []
        return summary.content_digest

    return write


CALL = prefill(3, (6, 4), launch=plan(10))


def cut(call, *pieces, mode=Mode.PREFILL):
    """The rows of a call in several calls, each with only the KV that its rows may see."""
    return [
        replace(call.take(np.array(piece)).visible_kv(), mode=mode, step=i) for i, piece in enumerate(pieces)
    ]


def test_launch_plan_provenance_step_and_surroundings_are_not_content(digest):
    other = Provenance("engine 2", "flash", ExecutedIdentity("flash"), 4, {"a": "b"})
    assert digest(CALL) == digest(replace(CALL, launch=None, provenance=other, step=9), around=recording())


def test_order_of_rows_and_requests_is_not_content(digest):
    order = np.random.default_rng(0).permutation(10)
    assert digest(CALL) == digest(CALL.take(order)) == digest(CALL.take(np.arange(10)[::-1]))


def test_how_rows_are_cut_into_calls_is_not_content(digest):
    """Both requests at once; request by request; chunks; the last rows as a decode."""
    whole = digest(CALL)
    assert whole == digest(*cut(CALL, range(6), range(6, 10)))
    assert whole == digest(*cut(CALL, range(6, 10), range(6)))
    assert whole == digest(*cut(CALL, [0, 1, 2, 6], [3, 4, 7, 8], [5, 9]))
    assert whole == digest(*cut(CALL, range(6), range(6, 9)), *cut(CALL, [9], mode=Mode.DECODE))


def test_compression_is_not_content(digest, tmp_path, monkeypatch):
    call = prefill(1, (500,), dims=(32, 32))
    repeating = replace(
        call, q=Bits(np.arange(500 * 4 * 32, dtype=np.uint16).reshape(500, 4, 32) % 7, call.dtype)
    )
    digests, files = set(), set()
    for setting in Setting:
        monkeypatch.setattr("tracekit.store.column.choose", lambda chunk, setting=setting: setting)
        digests.add(digest(repeating))
        files.add((tmp_path / "x.h5").read_bytes())
    assert (len(digests), len(files)) == (1, 2)


def test_a_range_is_the_list_of_its_rows(digest):
    part = CALL.selection.families[KVFamily.DENSE]
    lists = Lists.of([part.row(t) for t in range(part.rows)])
    assert digest(CALL) == digest(replace(CALL, selection=Selection({KVFamily.DENSE: lists})))


def flipped(bits: Bits, at: int = 0) -> Bits:
    data = bits.data.copy()
    data.reshape(-1)[at] ^= 1
    return Bits(data, bits.dtype)


def with_kv(call, change):
    kv = {key: dict(families) for key, families in call.kv.items()}
    kv[KEYS[1]][KVFamily.DENSE] = change(kv[KEYS[1]][KVFamily.DENSE])
    return replace(call, kv=kv)


def _tokens(call):
    tokens = call.rows.token_ids.copy()
    tokens[0] += 1
    return replace(call, rows=Rows(call.rows.requests, call.rows.request, call.rows.positions, tokens))


def _narrower(call):
    part = call.selection.families[KVFamily.DENSE]
    lo = part.lo.copy()
    lo[5] += 1
    return replace(call, selection=Selection({KVFamily.DENSE: Ranges(lo, part.hi)}))


GRADS = prefill(3, (6, 4), grads=True)
CHANGES = {
    "q": lambda c: replace(c, q=flipped(c.q, -1)),
    "out": lambda c: replace(c, out=replace(c.out, bits=flipped(c.out.bits))),
    "lse": lambda c: replace(c, lse=replace(c.lse, bits=flipped(c.lse.bits))),
    "sink": lambda c: replace(c, sink=flipped(c.sink)),
    "no sink": lambda c: replace(c, sink=None),
    "no lse": lambda c: replace(c, lse=None),
    "origin": lambda c: replace(c, lse=Output(c.lse.bits, Origin.EXECUTED)),
    "keys": lambda c: with_kv(c, lambda kv: replace(kv, keys=flipped(kv.keys))),
    "values": lambda c: with_kv(c, lambda kv: replace(kv, values=flipped(kv.values, -1))),
    "shared": lambda c: replace(
        c, kv={k: {f: replace(r, values=None) for f, r in v.items()} for k, v in c.kv.items()}
    ),
    "generation": lambda c: with_kv(c, lambda kv: replace(kv, generation=1)),
    "token": _tokens,
    "selection": _narrower,
    "layer": lambda c: replace(c, layer=1),
    "rank": lambda c: replace(c, rank=1),
    "mode": lambda c: replace(c, mode=Mode.RECOMPUTE),
    "conventions": lambda c: replace(c, conventions=Conventions(c.conventions.scale_bits, sink_in_lse=True)),
    "d_out": lambda c: replace(c, grads=replace(c.grads, d_out=flipped(c.grads.d_out))),
    "d_q": lambda c: replace(c, grads=replace(c.grads, d_q=flipped(c.grads.d_q))),
    "d_sink": lambda c: replace(c, grads=replace(c.grads, d_sink=flipped(c.grads.d_sink))),
    "d_kv": lambda c: replace(
        c,
        grads=replace(
            c.grads,
            d_kv={
                k: {f: replace(r, keys=flipped(r.keys)) for f, r in v.items()}
                for k, v in c.grads.d_kv.items()
            },
        ),
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_any_change_of_content_moves_it(digest, change):
    assert digest(GRADS) != digest(CHANGES[change](GRADS))


def test_the_order_of_a_list_and_of_the_families_is_content(digest):
    call = two_families()
    families = call.selection.families
    turned = Selection({family: families[family] for family in reversed(families)})
    lists = [families[KVFamily.C4].row(t) for t in range(3)]
    sorted_lists = Selection({**families, KVFamily.C4: Lists.of([np.sort(ids) for ids in lists])})
    found = {
        digest(call),
        digest(replace(call, selection=turned)),
        digest(replace(call, selection=sorted_lists)),
    }
    assert len(found) == 3


def test_which_version_of_a_row_a_call_read_is_content(digest):
    """Two calls read KV that was overwritten in between; exchanged, the same rows read other bytes."""
    call = prefill(0, (4,))
    rng = np.random.default_rng(9)
    versions = [KVRows(bits(rng, (4, 2, 8)), bits(rng, (4, 2, 8))) for _ in range(2)]
    first, second = cut(call, [2], [3])

    def reading(one, other):
        pairs = ((first, versions[one].until(3)), (second, versions[other]))
        return [replace(part, kv={KEYS[0]: {KVFamily.DENSE: rows}}) for part, rows in pairs]

    found = {digest(*reading(a, b)) for a, b in ((0, 1), (1, 0), (0, 0), (1, 1))}
    assert len(found) == 4


def test_it_is_the_one_that_the_reader_shows(digest, tmp_path):
    expected = digest(CALL)
    with open_trace(tmp_path / "x.h5") as trace:
        assert trace.content_digest == expected == trace.summary().content_digest
