"""The GPU body (kernels/tk_block.h) without a GPU: on the host, threads in any order, and as PTX."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.tka1.cases import CASES, case, difference
from tests.tka1.gradients import backward
from tests.tka1.gradients import difference as gradient_difference
from tests.tka1.test_forms_agree import definition
from tools.portability import device, ptx
from tracekit.errors import Unsupported
from tracekit.providers.tka1 import Inputs, native, selftest
from tracekit.providers.tka1.abi import blocks

SMALL = ("causal", "two families", "scattered leaves", "binary16, wild", "binary32, wild", "no keys at all")
needs_nvcc = pytest.mark.skipif(device.nvcc() is None, reason="no nvcc")


@pytest.fixture(scope="module")
def body(tmp_path_factory: pytest.TempPathFactory) -> device.HostBody:
    return device.host_body(tmp_path_factory.mktemp("body"))


@pytest.mark.parametrize("order", [0, 1, 2, 3])
@pytest.mark.parametrize("name", [name for name in CASES if name != "no rows"])
def test_the_body_gives_the_bytes_of_the_numpy_form_in_any_order_of_threads(
    body: device.HostBody, name: str, order: int
):
    """An order of the threads between two barriers that changed a bit would be a race."""
    inputs, out, part = definition(name)
    got = body.run(inputs, order)
    assert difference(got[0], out) == ""
    assert difference(got[1], part) == ""


@pytest.mark.parametrize("order", [0, 1, 2])
@pytest.mark.parametrize("name", [name for name in CASES if name != "no rows"])
def test_the_backward_body_gives_the_bytes_of_the_cpp_in_any_order_of_threads(
    body: device.HostBody, best: native.Library, name: str, order: int
):
    """The C++ is held to the numpy form in test_backward_forms.py."""
    b = backward(name)
    assert gradient_difference(body.backward(b, order), best.backward(b)) == ""


def edited(folder: Path, edit: Callable[[str], str], name: str = "tk_block.h") -> Path:
    """The kernels with another header."""
    kernels = folder / "kernels"
    shutil.copytree(device.KERNELS, kernels)
    path = kernels / name
    text = path.read_text()
    path.write_text(edit(text))
    assert path.read_text() != text
    return kernels


def without_barrier(text: str) -> str:
    """Drop a stack entry in the phase that merges it: others still read how high the stack is."""
    barrier = "  });\n  block.phase([&](int thread) {\n    if (thread == 0) sh.depth -= sh.merges;"
    assert text.count(barrier) == 1
    return text.replace(barrier, "    if (thread == 0) sh.depth -= sh.merges;")


def test_a_missing_barrier_shows(tmp_path: Path):
    """The control: without one barrier the order of the threads decides."""
    racy = device.host_body(tmp_path, edited(tmp_path, without_barrier))
    inputs, out, _ = definition("causal")
    assert any(difference(racy.run(inputs, order)[0], out) != "" for order in (0, 1, 2, 3))


def test_a_missing_barrier_in_the_backward_shows(tmp_path: Path, best: native.Library):
    """The control: dK + dV of one tensor reads a column that another thread has merged."""
    between = "a.width); });\n  block.phase([&](int thread) {\n    for (int j = 0; j < keys; ++j) {"

    def without(text: str) -> str:
        assert text.count(between) == 1
        return text.replace(between, "a.width);\n    for (int j = 0; j < keys; ++j) {")

    racy = device.host_body(tmp_path, edited(tmp_path, without, "tk_grad_block.h"))
    b = backward("two families")
    found = [gradient_difference(racy.backward(b, order), best.backward(b)) for order in (0, 1, 2, 3)]
    assert any(found)


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory: pytest.TempPathFactory) -> device.PtxBody:
    return device.compile_ptx(tmp_path_factory.mktemp("ptx"))


def eight_blocks(inputs: Inputs) -> Inputs:
    """A launch of few rows; the interpreter does some million thread instructions a second."""
    return inputs.take(range(min(2, len(inputs.q))))


@needs_nvcc
@pytest.mark.parametrize("name", SMALL)
def test_interpreted_ptx_gives_the_bytes_of_the_host(
    interpreted: device.PtxBody, body: device.HostBody, name: str
):
    inputs = eight_blocks(case(name))
    got, want = interpreted.run(inputs), body.run(inputs)
    assert difference(got[0], want[0]) == ""
    assert difference(got[1], want[1]) == ""


@needs_nvcc
@pytest.mark.parametrize("name", ["several requests", "binary32, two families", "wild"])
def test_the_interpreted_ptx_of_the_backward_gives_the_bytes_of_the_cpp(
    interpreted: device.PtxBody, best: native.Library, name: str
):
    b = backward(name).take(range(2))
    rows = best.partials(b.inputs)
    assert gradient_difference(interpreted.backward(b, rows), best.backward(b)) == ""


@needs_nvcc
def test_ptx_with_a_coefficient_four_ulp_off_shows(interpreted: device.PtxBody):
    """The control, planted in the text of the PTX: O hides it, the partials do not."""
    wrong = [text.replace("0f3E2AAA49", "0f3E2AAA4D") for text in interpreted.texts]
    assert wrong != interpreted.texts
    inputs, _, part = definition("causal")
    got = device.PtxBody(wrong).run(inputs)
    assert difference(got[1], part) != ""


@needs_nvcc
def test_an_unknown_instruction_is_refused(interpreted: device.PtxBody):
    """An approximate reciprocal in place of an addition is not run as something else."""
    approximate = [text.replace("add.rn.f32", "rcp.approx.ftz.f32", 1) for text in interpreted.texts]
    with pytest.raises(NotImplementedError, match="approx"):
        device.PtxBody(approximate).run(case("causal"))


def test_memory_that_no_array_holds_is_refused():
    text = """
.visible .entry bad(.param .u64 bad_param_0)
{
	.reg .b64 	%rd<3>;
	.reg .f32 	%f<2>;
	ld.param.u64 	%rd1, [bad_param_0];
	ld.global.f32 	%f1, [%rd1];
	ret;
}
"""
    with pytest.raises(IndexError, match="outside"):
        ptx.launch(ptx.parse(text, "bad"), (1, 1, 1), 1, (64).to_bytes(8, "little"), ptx.Memory())


def test_more_columns_than_a_block_holds_are_refused_by_name():
    inputs = next(iter(selftest.launches()))
    family = inputs.families[0]
    wide = tuple(np.zeros((len(v), 2, 513), np.uint16) for v in family.values)
    with pytest.raises(Unsupported) as error:
        blocks(replace(inputs, families=(replace(family, values=wide),)))
    assert error.value.rule == "K-VALUE-DIM"
