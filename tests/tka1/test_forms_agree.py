"""C++ in every build and the numpy form give the same bytes; what S15 calls free changes none of them."""

from functools import cache

import numpy as np
import pytest

from tests.tka1.cases import CASES, case, difference
from tracekit.providers.tka1 import Inputs, Outputs, Partials, numpy_form
from tracekit.providers.tka1.native import Library


@cache
def definition(name: str) -> tuple[Inputs, Outputs, Partials]:
    inputs = case(name)
    return inputs, numpy_form.run(inputs), numpy_form.partials(inputs)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_the_cpp_gives_the_bytes_of_the_numpy_form(build: Library, name: str, threads: int):
    inputs, out, part = definition(name)

    assert difference(build.run(inputs, threads), out) == ""
    assert difference(build.partials(inputs, threads), part) == ""


@pytest.mark.parametrize("name", CASES)
def test_the_clear_form_gives_the_bytes_of_the_numpy_form(build: Library, name: str):
    inputs, out, part = definition(name)

    assert difference(build.clear_run(inputs), out) == ""
    assert difference(build.clear_partials(inputs), part) == ""


@pytest.mark.parametrize("name", CASES)
def test_a_row_does_not_depend_on_its_neighbours(best: Library, name: str):
    inputs, out, _ = definition(name)
    rows = np.arange(len(inputs.q))
    orders = [rows[::-1], np.roll(rows, 3), np.random.default_rng(1).permutation(rows), *rows[:, None]]

    for order in orders:
        want = Outputs(out.out[order], out.lse[order], out.lse_with_sink[order])
        assert difference(best.run(inputs.take(order), 2), want) == ""
        assert len(order) == 1 or difference(numpy_form.run(inputs.take(order)), want) == ""


def test_the_cases_hold_what_they_are_for():
    """The comparison is worth something only where the values vary: NaN, zero, subnormal, and finite."""
    _, _, part = definition("wild")
    acc = part.acc.view(np.float32)
    share = [float(np.mean(x)) for x in (np.isnan(acc), np.isfinite(acc) & (acc != 0))]
    assert min(share) > 0.1
    _, out, _ = definition("underflowing")
    assert np.count_nonzero(((out.out & 0x7F80) == 0) & ((out.out & 0x7F) != 0)) > 100
    assert (definition("no keys at all")[1].out == 0).all()
