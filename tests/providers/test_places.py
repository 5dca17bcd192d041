"""A call through pages and padding: the same rows come back, and hot memory is really hot."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tracekit.controls.paged import misread
from tracekit.errors import InvalidCall
from tracekit.model import Bits, DType, KVFamily
from tracekit.providers.base import Tensors
from tracekit.providers.padding import padded, without_padding
from tracekit.providers.pages import hot_rows, read_back, through_pages, write
from tracekit.providers.placement import NULL_PAGE, Layout, Padding, Placement
from tracekit.testing import dense_call
from tracekit.testing.strategies import calls

WHERE = st.builds(
    Placement,
    page_size=st.sampled_from([None, 1, 3, 16, 32]),
    shuffle=st.none() | st.integers(0, 99),
    gaps=st.integers(0, 2),
    layout=st.none() | st.sampled_from(list(Layout)),
)


def same_rows(call, other):
    return all(
        rows.keys.same(other.kv[key][family].keys) and rows.value_bits.same(other.kv[key][family].value_bits)
        for key, families in call.kv.items()
        for family, rows in families.items()
    )


@settings(deadline=None, max_examples=60)
@given(calls(), WHERE)
def test_rows_come_back_from_any_place(call, where):
    assert same_rows(call, through_pages(call, where))
    # The reader of the twins checks nothing, but without a mistake it reads the same.
    assert same_rows(call, misread(call, where, lambda paged: paged))


def test_what_holds_no_row_is_hot_and_finite():
    call = dense_call(lengths=(20, 3))
    paged = write(call, KVFamily.DENSE, Placement(gaps=1))
    keys, _ = paged.layout.views(paged.cache)
    real = np.concatenate(paged.tables)
    assert NULL_PAGE not in real
    free = Bits(np.delete(keys, real, axis=0), DType.BFLOAT16).to_float32()
    tail = Bits(keys[paged.tables[1][-1], 3:], DType.BFLOAT16).to_float32()
    for part in (free, tail):
        assert part.size
        assert np.isfinite(part).all()
        assert (part != 0).mean() > 0.9
    odd = Bits(np.array([[[0x7FC0, 0x3F80]]], np.uint16), DType.BFLOAT16)
    assert hot_rows(odd).tolist() == [[[0x3F80, 0]]]


def test_behind_a_window_the_table_names_the_null_page():
    call = dense_call(lengths=(50,), new=(1,), window=10)
    key = call.rows.requests[0]
    held = call.kv[key][KVFamily.DENSE].window(40, 50)
    call = call.with_kv({key: {KVFamily.DENSE: held}})
    paged = write(call, KVFamily.DENSE, Placement(page_size=16))
    assert paged.tables[0].tolist() == [NULL_PAGE, NULL_PAGE, 1, 2]
    assert same_rows(call, read_back(call, {KVFamily.DENSE: paged}))


def test_a_wrong_table_is_refused_by_the_canonicaliser():
    call = dense_call(lengths=(40,))
    paged = write(call, KVFamily.DENSE, Placement())
    for table in (paged.tables[0] * 0, paged.tables[0] + 90, paged.tables[0][:1]):
        with pytest.raises(InvalidCall, match="table"):
            read_back(call, {KVFamily.DENSE: replace(paged, tables=(table,))})


@settings(deadline=None, max_examples=40)
@given(calls(), st.dictionaries(st.sampled_from(list(Padding)), st.integers(0, 5)))
def test_padding_goes_away_again(call, padding):
    where = Placement(padding=padding)
    whole = padded(call, where)
    assert whole.num_rows == call.num_rows + padding.get(Padding.ROWS, 0)
    assert whole.num_heads == call.num_heads + call.num_kv_heads * padding.get(Padding.HEADS, 0)
    assert (whole.selection.counts() > 0).sum() == (call.selection.counts() > 0).sum()
    assert same_rows(call, whole)
    assert without_padding(Tensors(whole.q, None), call, where).out.same(call.q)
