"""Launches before a launch run first, and a mode is really left on, and put back."""

import threading

import numpy as np
import pytest

from tracekit.errors import Unsupported
from tracekit.providers.base import Execution, Launch
from tracekit.providers.mode import FloatMode
from tracekit.providers.perform import perform
from tracekit.providers.portable import Tka1, Tka1Numpy
from tracekit.testing import dense_call

SMALL = np.full(64, 2**-140, np.float32)
ONE, LITTLE = np.float32(1), np.float32(-(2**-30))


class Mode(Tka1):
    """Tells the mode of the thread that runs it, and of a thread which that one starts."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def run(self, launch):
        self._see()
        started = threading.Thread(target=self._see)
        started.start()
        started.join()
        return super().run(launch)

    def _see(self):
        self.seen.append((not (SMALL * ONE).any(), bool(ONE + LITTLE < 1)))


@pytest.mark.parametrize(
    ("mode", "seen"),
    [(None, (False, False)), (FloatMode.FLUSHED, (True, False)), (FloatMode.TOWARD_ZERO, (False, True))],
)
def test_a_mode_is_left_on_in_all_threads_of_a_launch_and_in_no_other(mode, seen):
    kernel = Mode()
    perform(kernel, Launch((dense_call(),), Execution(mode=mode)))
    assert kernel.seen == [seen, seen]
    kernel._see()
    assert kernel.seen[-1] == (False, False)


def test_a_kernel_that_refuses_in_a_mode_is_heard():
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
