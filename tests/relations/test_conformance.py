"""Every relation has variants that change no number, and a twin that it refutes."""

from tracekit.relations import relation
from tracekit.testing import RelationSuite, dense_call, sparse_call, with_d_out


class TestRecorded(RelationSuite):
    relation = relation("recorded")


class TestRerun(RelationSuite):
    relation = relation("rerun")


class TestThreads(RelationSuite):
    relation = relation("threads")


class TestRequests(RelationSuite):
    relation = relation("requests")


class TestRows(RelationSuite):
    relation = relation("rows")


class TestSolo(RelationSuite):
    relation = relation("solo")


class TestSubbatch(RelationSuite):
    relation = relation("subbatch")


class TestChunks(RelationSuite):
    relation = relation("chunks")


class TestDecode(RelationSuite):
    relation = relation("decode")


class Long:
    """Calls whose rows read several leaves of TKA-1."""

    def calls(self):
        return [
            dense_call(lengths=(300, 140), new=(2, 1), sink=True, seed=5),
            sparse_call(lengths=(700,), new=(2,), top=120, seed=6),
        ]


class TestSplits(Long, RelationSuite):
    relation = relation("splits")


class TestContextRanks(Long, RelationSuite):
    relation = relation("cp")


class TestTensorRanks(Long, RelationSuite):
    relation = relation("tp")


class TestGrad(RelationSuite):
    relation = relation("grad")


class TestBackward(RelationSuite):
    relation = relation("backward")

    def calls(self):
        calls = [dense_call(lengths=(20, 11), sink=True, seed=1), sparse_call(lengths=(40, 25), seed=3)]
        return [with_d_out(call) for call in calls]


class TestPageIds(RelationSuite):
    relation = relation("page-ids")


class TestPageSize(RelationSuite):
    relation = relation("page-size")


class TestLayout(RelationSuite):
    relation = relation("layout")


class TestPadding(RelationSuite):
    relation = relation("padding")


class TestSlack(RelationSuite):
    relation = relation("slack")


class TestAfter(RelationSuite):
    relation = relation("after")


class TestControl(RelationSuite):
    relation = relation("control")


class TestHostGraph(RelationSuite):
    relation = relation("host-graph")


class TestSchedule(RelationSuite):
    relation = relation("schedule")
