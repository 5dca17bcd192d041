"""Where a provider rounds: by its capabilities, or call by call where it says so itself."""

from dataclasses import replace

import pytest

from tracekit.model import DType, ExecutedIdentity
from tracekit.providers.base import roundings
from tracekit.providers.registry import create
from tracekit.testing import dense_call

BF16, FP32 = DType.BFLOAT16, DType.FLOAT32


def test_capabilities_say_where_a_kernel_rounds():
    assert roundings(create("tka1"), dense_call()) == (FP32, FP32)


@pytest.mark.parametrize(("kernel", "score"), [("sdpa", FP32), ("eager", BF16)])
def test_transformers_rounds_where_the_function_of_the_call_does(kernel, score):
    """Of a call of sdpa the bound is that of its own conventions, not the looser one of eager."""
    pytest.importorskip("transformers")
    call = dense_call()
    executed = ExecutedIdentity(f"transformers.{kernel}")
    call = replace(call, provenance=replace(call.provenance, executed=executed))
    assert roundings(create("transformers"), call) == (score, BF16)
