"""Every relation has variants that change no number, and a twin that it refutes."""

from tracekit.relations import relation
from tracekit.testing import RelationSuite


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
