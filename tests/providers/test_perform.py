"""Launches before a launch run first, and a mode is really left on, and put back."""

import numpy as np
import pytest

from tracekit.errors import Unsupported
from tracekit.providers.base import Execution, Launch
from tracekit.providers.mode import FloatMode
from tracekit.providers.perform import left_in, perform
from tracekit.providers.portable import Tka1, Tka1Numpy
from tracekit.testing import dense_call

SMALL = np.full(64, 2**-140, np.float32)
ONE, LITTLE = np.float32(1), np.float32(-(2**-30))


def test_a_mode_is_left_on_and_put_back():
    with left_in(FloatMode.FLUSHED):
        flushed = SMALL * ONE
    with left_in(FloatMode.TOWARD_ZERO):
        down = ONE + LITTLE
    assert not flushed.any()
    assert down < 1
    assert (SMALL * ONE).all()
    assert ONE + LITTLE == 1


def test_a_mode_is_put_back_behind_a_kernel_that_refuses():
    launch = Launch((dense_call(),), Execution(mode=FloatMode.FLUSHED))
    with pytest.raises(Unsupported, match="flush"):
        perform(Tka1Numpy(), launch)
    assert (SMALL * ONE).all()


def test_numpy_does_not_promise_what_depends_on_a_mode_or_needs_a_kernel():
    assert {"after", "host-graph", "schedule"} <= Tka1().advertised()
    assert not {"after", "host-graph", "schedule"} & Tka1Numpy().advertised()


def test_earlier_launches_run_first_and_only_the_last_is_answered():
    sizes = []

    class Watched(Tka1):
        def run(self, launch):
            sizes.append(launch.calls[0].num_rows)
            return super().run(launch)

    small, large = dense_call(lengths=(3,)), dense_call(lengths=(9,))
    answer = perform(Watched(), Launch((large,), before=(Launch((small,)),)))
    assert sizes == [3, 9]
    assert answer.tensors[0].out.shape[0] == 9
