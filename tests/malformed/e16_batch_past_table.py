"""A call points at a batch that is not there."""

from tests.malformed.tamper import good, table

RULE = "E-16"


def build(path):
    good(path)
    with table(path, "calls") as calls:
        calls["batch"][1] = 77
