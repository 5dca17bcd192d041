"""Four ways in which a captured launch goes wrong, by its own buffers; `host-graph` refutes each."""

import pytest

from tracekit.controls.graph_padding import SlotsUnwritten
from tracekit.controls.graph_pointer import DeadPointer
from tracekit.controls.graph_workspace import WorkspaceShared
from tracekit.controls.host_graph import StalePlan
from tracekit.errors import ProviderFailed, Unsupported
from tracekit.model import AttentionCall, Bits
from tracekit.providers.base import Execution, Launch
from tracekit.providers.graphs.kind import GraphKind
from tracekit.providers.graphs.sequence import replayed
from tracekit.providers.oracle import Oracle
from tracekit.providers.perform import perform
from tracekit.providers.portable import Captured, Tka1
from tracekit.relations import relation
from tracekit.replayer import replay
from tracekit.testing import MemoryTrace, RelationSuite, dense_call, record, sparse_call
from tracekit.verdict import Status

TWINS = (StalePlan, DeadPointer, SlotsUnwritten, WorkspaceShared)
HOST = Execution(graph=GraphKind.HOST)
CALLS = (
    dense_call(lengths=(20, 11), seed=1),
    dense_call(lengths=(18, 7, 9), new=(1, 1, 1), sink=True, seed=2),
    sparse_call(lengths=(40, 33), new=(1, 1), seed=4),
)


class Judge(RelationSuite):
    """The judgement of the suite, outside a test class."""

    relation = relation("host-graph")


@pytest.mark.parametrize("twin", TWINS)
@pytest.mark.parametrize("call", CALLS, ids=["prefill", "decode", "sparse decode"])
def test_a_fault_of_captured_launches_is_refuted(twin, call):
    judge = Judge()
    subject = judge.bound.subject(call)
    assert judge._judge(twin(), subject).first is not None
    assert judge._judge(Tka1(), subject).first is None


@pytest.mark.parametrize("twin", TWINS)
def test_eager_launches_of_a_twin_are_right(twin):
    for call in CALLS:
        (right,), (wrong,) = (kernel.run(Launch((call,))).tensors for kernel in (Tka1(), twin()))
        assert right.out.same(wrong.out)
        assert right.lse.same(wrong.lse)


def test_a_replay_of_a_whole_trace_refutes_a_twin_by_its_place():
    trace = MemoryTrace((record(CALLS[0], Tka1()),))
    twin = "tracekit.controls.graph_padding:SlotsUnwritten"
    report = replay([trace], providers=[twin], claims=["host-graph"])
    (verdict,) = report.verdicts
    assert verdict.status is Status.REFUTED
    assert verdict.variant == "captured as it stands with empty slots"
    assert verdict.first.request.endswith("-700000000")  # a slot of padding, and no row


def test_a_launch_that_writes_into_its_inputs_gives_no_answer():
    class Writes(Captured):
        def read(self):
            raise AssertionError("nothing is read behind a broken input")

        def poison(self, fill):
            super().poison(fill)
            self.launch.q[0, 0, 0] ^= 1

    class Provider(Tka1):
        def static(self, calls, execution, pool):
            return Writes(super().static(calls, execution, pool).launch, self)

    with pytest.raises(ProviderFailed, match="a replay changed Q"):
        replayed(Provider(), Launch((CALLS[0],), HOST))


def test_calls_that_differ_by_value_share_no_launch():
    one, other = dense_call(lengths=(5,)), dense_call(lengths=(6,))
    with pytest.raises(Unsupported, match="keeps its rows") as error:
        perform(Tka1(), Launch((one, other), HOST))
    assert error.value.rule == "P-GRAPH"


def test_a_provider_without_static_launches_is_refused():
    with pytest.raises(Unsupported, match="cannot be captured"):
        perform(Oracle(), Launch((CALLS[0],), HOST))


def test_a_replay_follows_numbers_that_changed_in_place():
    """Both calls of one launch, each to its own eager bits, in both orders."""
    call = CALLS[0]
    changed: AttentionCall = dense_call(lengths=(20, 11), seed=9)
    (one,), (two,) = (Tka1().run(Launch((c,))).tensors for c in (call, changed))
    for calls, wanted in (((call, changed, call), (one, two, one)), ((changed, call), (two, one))):
        got: tuple[Bits, ...] = tuple(t.out for t in perform(Tka1(), Launch(calls, HOST)).tensors)
        assert all(a.same(b.out) for a, b in zip(got, wanted, strict=True))
