"""Canaries, the filled heap, and a kernel that writes where it may not."""

import ctypes

import numpy as np
import pytest

from tests.tka1.cases import case, difference
from tracekit.errors import ProviderFailed
from tracekit.model import DType
from tracekit.providers import tka1
from tracekit.providers.base import Execution, Launch
from tracekit.providers.guarded import GUARD, Guarded, filled_heap
from tracekit.providers.placement import Fill, Placement
from tracekit.providers.portable import Tka1
from tracekit.providers.tka1 import native, numpy_form, numpy_guarded
from tracekit.testing import dense_call


@pytest.mark.parametrize("fill", list(Fill))
@pytest.mark.parametrize("offset", [-1, 0])
@pytest.mark.parametrize("output", [False, True])
def test_a_byte_beside_a_buffer_is_found(fill, offset, output):
    memory = Guarded(fill)
    array = memory.empty((3, 5), DType.BFLOAT16, "O") if output else memory.held(np.zeros((3, 5), np.uint16))
    memory.check()
    at = array.ctypes.data + (offset if offset < 0 else array.nbytes)
    ctypes.c_uint8.from_address(at).value ^= 1
    with pytest.raises(ProviderFailed, match="wrote into memory") as error:
        memory.check()
    assert error.value.rule == "P-CANARY"
    assert GUARD >= 4096


def test_an_input_that_the_launch_changed_is_found_and_an_output_is_not():
    memory = Guarded(Fill.A5)
    out, q = memory.empty((4,), DType.FLOAT32), memory.held(np.arange(4, dtype=np.uint32), name="Q")
    assert set(out.tobytes()) == {0xA5}
    out[:] = 1
    memory.check()
    q[2] = 7
    with pytest.raises(ProviderFailed, match="wrote into Q"):
        memory.check()


@pytest.mark.parametrize(("fill", "byte"), [(Fill.A5, 0xA5), (Fill.NANS, 0x7F)])
def test_the_heap_is_filled_and_then_as_before(fill, byte):
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    libc.free.argtypes = [ctypes.c_void_p]
    size = 1 << 26  # more than glibc ever keeps: fresh from the system each time, zero without the fill
    found = []
    for filled in (True, False):
        if filled:
            with filled_heap(fill):
                at = libc.malloc(size)
        else:
            at = libc.malloc(size)
        found.append(set(ctypes.string_at(at + 64, 1 << 20)))
        libc.free(at)
    assert found == [{byte}, {0}]


def test_a_kernel_that_writes_one_element_too_far_gives_no_answer(monkeypatch):
    """TKA-1 itself, told that there is one row more than the launch has room for."""
    real = native.arguments

    def one_more(inputs, place, results):
        args = real(inputs, place, results)
        args.lse += 4  # every LSE one element further on
        return args

    inputs = case("several requests")
    library = native.load(native.available()[0])
    for fill in Fill:
        assert np.array_equal(library.guarded(inputs, 1, fill).out, library.run(inputs).out)
    monkeypatch.setattr(native, "arguments", one_more)
    with pytest.raises(ProviderFailed, match="memory behind the LSE"):
        library.guarded(inputs, 1, Fill.NANS)


@pytest.mark.parametrize("fill", list(Fill))
def test_the_launch_of_tka1_really_lies_between_canaries(fill, monkeypatch):
    seen = []
    real = Guarded.check
    monkeypatch.setattr(Guarded, "check", lambda self: seen.append(self.fill) or real(self))
    Tka1().run(Launch((dense_call(),), Execution(placement=Placement(fill=fill))))
    assert seen == [fill]


@pytest.mark.parametrize("fill", list(Fill))
def test_the_numpy_form_lies_between_canaries_too(fill, monkeypatch):
    inputs = case("two families")
    want = numpy_form.run(inputs)
    assert np.array_equal(numpy_guarded.run(inputs, fill).out, want.out)

    def writes(launch, threads=1):
        launch.q[0, 0, 0] ^= 1
        return want

    monkeypatch.setattr(numpy_form, "run", writes)
    with pytest.raises(ProviderFailed, match="the kernel wrote into an input"):
        tka1.attention(inputs, form="numpy", fill=fill)


def test_the_numpy_form_reads_nothing_beside_its_inputs():
    """The memory around each of them is NaN; all cases, so that every kind of selection is read."""
    for name in ("causal", "scattered leaves", "several requests", "wild"):
        for fill in Fill:
            assert difference(numpy_guarded.run(case(name), fill), numpy_form.run(case(name))) == ""
