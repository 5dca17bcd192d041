"""What the variants of each claim look like on calls of known shape."""

from importlib.metadata import EntryPoint

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tracekit.errors import UsageError
from tracekit.model import Mode
from tracekit.providers.base import Capabilities
from tracekit.providers.oracle import Oracle
from tracekit.providers.placement import Layout, Padding
from tracekit.relations import claims, registry, relation
from tracekit.relations.arrange import orders
from tracekit.relations.base import on_kernel
from tracekit.relations.company import LAUNCHES, in_company
from tracekit.testing import dense_call, sparse_call
from tracekit.testing.strategies import calls


def variants(claim, call, seed=0):
    return {variant.name: variant.launch for variant in relation(claim).variants(call, seed)}


def sizes(launch):
    return [call.num_rows for call in launch.calls]


@settings(deadline=None)
@given(st.integers(1, 40), st.integers(0, 9))
def test_orders_are_permutations_and_never_the_identity(count, seed):
    found = [order.tolist() for _, order in orders(count, np.random.default_rng(seed))]
    assert all(sorted(order) == list(range(count)) for order in found)
    assert list(range(count)) not in found
    assert len({tuple(order) for order in found}) == len(found)
    assert bool(found) == (count > 1)


@settings(deadline=None, max_examples=40)
@given(calls(), st.sampled_from(sorted(claims())), st.integers(0, 3))
def test_variants_of_any_call_hold_its_rows_or_it_does_not_apply(call, claim, seed):
    one = relation(claim)
    if one.applies(call) is not None:
        return
    seen = {
        row for variant in one.variants(call, seed) for part in variant.launch.calls for row in part.rows.ids
    }
    assert set(call.rows.ids) <= seen


def test_chunks_hold_only_what_exists_at_their_end():
    call = dense_call(lengths=(20, 9))
    launch = variants("chunks", call)["chunks of 7"]
    held = [[rows["dense"].end for rows in part.kv.values()] for part in launch.calls]
    assert sizes(launch) == [14, 9, 6]
    assert held == [[7, 7], [14, 9], [20]]


def test_decode_holds_only_its_own_visible_rows():
    call = dense_call(lengths=(4,))
    (launch,) = variants("decode", call).values()
    assert sizes(launch) == [1, 1, 1, 1]
    assert [next(iter(part.kv.values()))["dense"].end for part in launch.calls] == [1, 2, 3, 4]
    assert {part.mode for part in launch.calls} == {Mode.DECODE}


def test_solo_keeps_the_kv_as_recorded():
    call = dense_call(lengths=(4, 3))
    found = variants("solo", call)
    assert sizes(found["row alone"]) == [1] * 7
    assert sizes(found["request alone"]) == [4, 3]
    assert [next(iter(part.kv.values()))["dense"].end for part in found["row alone"].calls] == [4] * 4 + [
        3
    ] * 3


def test_subbatch_crosses_thresholds_both_ways():
    call = dense_call(lengths=(6,))
    found = variants("subbatch", call)
    assert {name: sizes(launch) for name, launch in found.items()} == {
        "batches of 2": [2, 2, 2],
        "batches of 3": [3, 3],
        "batches of 4": [4, 2],
        "1 row added": [7],
        "2 rows added": [8],
        "10 rows added": [16],
        "11 rows added": [17],
        "26 rows added": [32],
        "27 rows added": [33],
        "companions of 2 and 11 rows (as in vLLM #51902)": [19],
        "companions of 17 and 65 rows": [88],
    }


@settings(deadline=None, max_examples=40)
@given(calls())
def test_company_is_a_prefill_over_shorter_and_over_longer_kv(call):
    longest = max(rows.end * family.ratio for kv in call.kv.values() for family, rows in kv.items())
    for number, (_, after, before) in enumerate(LAUNCHES):
        (_, launch), *_ = list(in_company(call))[number:]
        added = {key: kv for key, kv in launch.kv.items() if key not in call.kv}
        rows = [int((launch.rows.request == i).sum()) for i in range(len(launch.rows.requests))]
        assert [rows[0], rows[-1]] == [after, before]
        ends = [max(rows.end * family.ratio for family, rows in kv.items()) for kv in added.values()]
        assert ends[0] >= longest + after - 3  # a compressed row waits for its last token
        assert before <= ends[1] <= before + 4
        assert (launch.selection.counts()[:after] > 0).all()
        assert (launch.selection.counts()[-before:] > 0).all()


def test_requests_move_as_blocks():
    call = dense_call(lengths=(2, 3))
    (launch,) = variants("requests", call).values()
    assert launch.calls[0].rows.positions.tolist() == [0, 1, 2, 0, 1]
    assert launch.calls[0].rows.requests == call.rows.requests[::-1]


def test_seeds_are_per_claim():
    call = dense_call(lengths=(12,))

    def permutation(seed):
        return variants("rows", call, seed)["permutation 1"].calls[0].rows.positions.tolist()

    assert permutation(1) == permutation(1)
    assert permutation(1) != permutation(2)


PLACES = ("page-ids", "page-size", "layout", "padding", "slack")


def placements(claim, call, capabilities=None, seed=0):
    one = on_kernel(relation(claim), capabilities or Oracle().capabilities())
    assert one.applies(call) is None
    return {v.name: v.launch.execution.placement for v in one.variants(call, seed)}


@pytest.mark.parametrize("claim", PLACES)
def test_a_claim_about_places_says_nothing_of_a_kernel_that_takes_none(claim):
    blind = Capabilities(dtypes=frozenset())
    for one in (relation(claim), on_kernel(relation(claim), blind)):
        assert one.applies(dense_call()).startswith("the kernel takes no ")


def test_pages_get_other_numbers_behind_a_null_page():
    found = placements("page-ids", dense_call())
    names = {name: where.pages(5)[0].tolist() for name, where in found.items()}
    assert names["behind a null page"] == [1, 2, 3, 4, 5]
    assert all(len(set(part)) == 5 and min(part) >= 1 for part in names.values())
    assert len({tuple(part) for part in names.values()}) == len(found)
    assert found["scattered with gaps"].pages(5)[1] == 21
    assert placements("page-ids", dense_call(), seed=1) != found


def test_only_sizes_that_the_kernel_takes_are_asked_for():
    two = Capabilities(dtypes=frozenset(), page_sizes=(32, 64))
    found = placements("page-size", dense_call(), two)
    assert [where.page_size for where in found.values()] == [32, 64]
    one = on_kernel(relation("page-size"), Capabilities(dtypes=frozenset(), page_sizes=(16,)))
    assert one.applies(dense_call()) == "the kernel takes pages of 16 rows only"


def test_layouts_that_are_the_same_memory_count_once():
    assert set(placements("layout", dense_call(kv_heads=2))) == set(Layout) - {Layout.JOINED_NHD}
    single = placements("layout", dense_call(kv_heads=1))
    assert set(single) == {Layout.STACKED_NHD, Layout.APART_NHD, Layout.PACKED, Layout.PACKED_TRANSPOSED}
    every = on_kernel(relation("layout"), Oracle().capabilities())
    assert every.applies(sparse_call()) == "the KV of the call lies the same way in every layout"


def test_each_kind_of_padding_is_added_alone_and_with_the_others():
    found = placements("padding", dense_call())
    assert found["7 query slots added"].padding == {Padding.ROWS: 7}
    assert found["4 heads of each KV head added"].padding == {Padding.HEADS: 4}
    assert set(found["all of them added"].padding) == set(Padding)
    rows = Capabilities(dtypes=frozenset(), padding=frozenset({Padding.ROWS}))
    assert list(placements("padding", dense_call(), rows)) == [
        "1 query slots added",
        "7 query slots added",
        "64 query slots added",
    ]


def test_an_unknown_claim_lists_the_valid_ones():
    with pytest.raises(UsageError) as error:
        relation("chunk")
    assert error.value.fields["valid"] == list(claims())
    assert "Did you mean chunks?" in str(error.value)


def test_other_packages_add_claims(monkeypatch):
    entries = [EntryPoint("theirs", "tracekit.relations.rows:RowOrder", registry.GROUP)]
    monkeypatch.setattr(registry, "entry_points", lambda group: entries)
    registry.claims.cache_clear()
    try:
        assert list(claims())[-1] == "theirs"
        assert relation("theirs").promise == relation("rows").promise
    finally:
        registry.claims.cache_clear()
