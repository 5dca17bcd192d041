"""Equal bits of nothing are no evidence: NaN, infinities, and outputs that nobody wrote."""

from dataclasses import replace

import numpy as np
import pytest

from tracekit.model import Bits, KVRows
from tracekit.replayer import replay
from tracekit.testing import MemoryTrace, dense_call, with_d_out
from tracekit.verdict import Exit, Status

CALL = dense_call(lengths=(6, 4), seed=1)


@pytest.mark.parametrize("kernel", ["GivesNan", "GivesOneInfinity", "GivesNanLse", "WritesNothing"])
@pytest.mark.parametrize("claim", ["rerun", "rows", "solo"])
def test_an_answer_that_is_none_is_held_by_no_claim(kernel, claim):
    report = replay([MemoryTrace((CALL,))], providers=[f"tests.replayer.faulty:{kernel}"], claims=[claim])

    assert report.find(claim).status is Status.INCONCLUSIVE
    assert "prove nothing" in report.find(claim).reason
    assert report.exit_code == Exit.INCONCLUSIVE


@pytest.mark.parametrize("kernel", ["NanGradient", "ZeroKeyGradients"])
def test_gradients_that_are_none_are_not_held(kernel):
    trace = MemoryTrace((with_d_out(CALL),))
    report = replay([trace], providers=[f"tests.replayer.faulty:{kernel}"], claims=["backward"])

    assert report.find("backward").status is Status.INCONCLUSIVE
    assert "prove nothing" in report.find("backward").reason


def test_zeros_that_are_the_right_answer_are_one():
    kv = {
        key: {family: KVRows(rows.keys, Bits(np.zeros_like(rows.value_bits.data), rows.value_bits.dtype))
              for family, rows in families.items()}
        for key, families in CALL.kv.items()
    }  # fmt: skip

    report = replay([MemoryTrace((replace(CALL, kv=kv),))], providers=["tka1"], claims=["rows"])

    assert report.find("rows").status is Status.HELD
