"""A declared convention that the numbers contradict is an error that names what would fit."""

from dataclasses import replace

import numpy as np
import pytest

from tracekit.model import Bits, DType, LseBase, Origin, Output
from tracekit.providers.oracle import Oracle
from tracekit.recorder.conventions import contradictions
from tracekit.testing.build import dense_call, record


@pytest.fixture(scope="module")
def call():
    return record(dense_call(lengths=(12,), sink=True), Oracle())


def lse_of(call, values) -> Output:
    return Output(Bits.from_float32(values.astype(np.float32), DType.FLOAT32), Origin.EXECUTED)


def test_what_was_declared_rightly_is_not_contradicted(call):
    assert list(contradictions([call, replace(call, layer=1)])) == []


def test_base_two_declared_as_natural(call):
    wrong = replace(call, lse=lse_of(call, call.lse.bits.to_float64() / np.log(2)))
    (error,) = contradictions([wrong])
    assert "base 2" in error.fields["fits"]
    right = replace(wrong, conventions=replace(call.conventions, lse_base=LseBase.TWO))
    assert list(contradictions([right])) == []


def test_a_sink_that_the_lse_counts(call):
    counted = np.logaddexp(call.lse.bits.to_float64(), call.sink.to_float64())
    (error,) = contradictions([replace(call, lse=lse_of(call, counted))])
    assert "sink counted" in error.fields["fits"]


def test_a_sink_that_o_does_not_know(call):
    bare = record(replace(call, sink=None), Oracle())
    (error,) = contradictions([replace(call, out=bare.out)])
    assert error.fields["fits"] == "O fits no sink in the denominator"


def test_another_scale_fits_no_convention(call):
    other = replace(call, conventions=replace(call.conventions, scale_bits=0x3F800000))
    (error,) = contradictions([other])
    assert "no known convention fits" in str(error)


def test_derived_outputs_are_not_asked(call):
    derived = replace(call, out=None, lse=replace(lse_of(call, np.zeros((12, 4))), origin=Origin.DERIVED))
    assert list(contradictions([derived])) == []


def test_each_layer_is_asked_once(call):
    wrong = replace(call, lse=lse_of(call, call.lse.bits.to_float64() / np.log(2)))
    assert [error.fields["layer"] for error in contradictions([wrong, wrong, replace(wrong, layer=4)])] == [
        0,
        4,
    ]
