"""S14: owners of some leaves compute partials from their own rows; merged, they are the unsplit launch."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.tka1.cases import case, difference
from tracekit.errors import InvalidCall
from tracekit.providers import tka1
from tracekit.providers.tka1 import Form, Inputs, Partials, Run

FORMS: tuple[Form, ...] = ("auto", "numpy")
CASES = (
    "causal",
    "two families",
    "several requests",
    "scattered leaves",
    "wild",
    "decode",
    "binary32",
    "binary16",
)


def leaves_of(inputs: Inputs) -> list[tuple[int, int]]:
    """(family, leaf) of every given row."""
    return [
        (number, leaf)
        for number, f in enumerate(inputs.families)
        for leaf in sorted(
            {
                i
                for k, x in zip(f.keys, f.first, strict=True)
                for i in range(x // 128, (x + len(k) + 127) // 128)
            }
        )
    ]


def only(inputs: Inputs, owned: set[tuple[int, int]]) -> Inputs:
    """The launch as an owner sees it: the rows of other owners are NaN."""
    families = []
    for number, f in enumerate(inputs.families):
        keys, values, nan = [], [], inputs.q.dtype.type(0x7FC00000 if inputs.q.itemsize == 4 else 0x7FFF)
        for k, v, first in zip(f.keys, f.values, f.first, strict=True):
            foreign = np.array([(number, (first + i) // 128) not in owned for i in range(len(k))], bool)
            keys.append(np.where(foreign[:, None, None], nan, k))
            values.append(np.where(foreign[:, None, None], nan, v))
        families.append(replace(f, keys=tuple(keys), values=tuple(values)))
    return replace(inputs, families=tuple(families))


def partials_of_owners(inputs: Inputs, owners: list[set[tuple[int, int]]], form: Form) -> dict[Run, Partials]:
    parts = {}
    for owned in owners:
        mine = only(inputs, owned)
        for family in (0, 1):
            for run in tka1.fewest_runs(family, [leaf for f, leaf in owned if f == family]):
                parts[run] = tka1.partials(mine, run=run, form=form, threads=2)
    return parts


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("count", [2, 3, 8])
@pytest.mark.parametrize("name", CASES)
def test_owners_that_see_only_their_own_rows_give_the_unsplit_launch(name: str, count: int, form: Form):
    inputs = case(name)
    leaves = leaves_of(inputs)
    contiguous = [set(map(tuple, x)) for x in np.array_split(np.array(leaves), count) if len(x)]
    turns = [set(leaves[i::count]) for i in range(count) if leaves[i::count]]
    for owners in (contiguous, turns):
        parts = partials_of_owners(inputs, owners, form)
        shuffled = {run: parts[run] for run in sorted(parts, reverse=True)}
        assert (
            difference(tka1.merge(shuffled, inputs.sink, inputs.dtype), tka1.attention(inputs, form=form))
            == ""
        )


def test_a_partial_that_is_missing_or_from_foreign_rows_shows():
    """The control: what is merged matters."""
    inputs = case("causal")
    leaves = leaves_of(inputs)
    parts = partials_of_owners(inputs, [{x} for x in leaves], "auto")
    want = tka1.attention(inputs)
    fewer = {run: part for run, part in parts.items() if run.first != 1}
    assert difference(tka1.merge(fewer, inputs.sink), want) != ""

    foreign = parts | {Run(0, 1, 0): tka1.partials(only(inputs, {(0, 0)}), run=Run(0, 1, 0))}
    assert difference(tka1.merge(foreign, inputs.sink), want) != ""


def test_a_run_of_everything_is_the_whole_row():
    inputs = case("causal")
    assert difference(tka1.partials(inputs, run=Run(0, 0, 26)), tka1.partials(inputs)) == ""


@given(st.sets(st.integers(0, 200), max_size=60))
def test_the_fewest_runs_hold_exactly_the_leaves(leaves: set[int]):
    runs = tka1.fewest_runs(0, leaves)

    held = [i for run in runs for i in range(run.first, run.first + (1 << run.level))]
    assert sorted(held) == sorted(leaves)
    buddies = {(run.level, (run.first >> run.level) ^ 1) for run in runs}
    assert not any((run.level, run.first >> run.level) in buddies for run in runs)  # no two make a larger one


@pytest.mark.parametrize("wrong", [(0, 1, 1), (2, 0, 0), (0, -1, 0), (0, 0, 27), (0, 1 << 26, 0)])
def test_a_run_that_is_no_node_is_refused(wrong: tuple[int, int, int]):
    with pytest.raises(InvalidCall) as error:
        Run(*wrong)
    assert error.value.rule == "S14-ALIGNED"


def test_runs_that_share_a_leaf_are_refused():
    inputs = case("causal")
    parts = {run: tka1.partials(inputs, run=run) for run in (Run(0, 0, 1), Run(0, 1, 0))}
    with pytest.raises(InvalidCall) as error:
        tka1.merge(parts)
    assert error.value.rule == "S14-OVERLAP"


def test_partials_of_different_launches_are_refused():
    parts = {
        Run(0, i, 0): tka1.partials(case(n), run=Run(0, i, 0)) for i, n in enumerate(("causal", "decode"))
    }
    for given_parts in (parts, {}):
        with pytest.raises(InvalidCall) as error:
            tka1.merge(given_parts)
        assert error.value.rule == "S14-SHAPE"
