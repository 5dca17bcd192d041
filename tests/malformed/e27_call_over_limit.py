"""A call that decodes to more than the limit, which the test lowers."""

from tests.malformed.tamper import good

RULE = "E-27"
PATCH = {"tracekit.store.checks.MAX_CALL": 1000}


def build(path):
    good(path)
