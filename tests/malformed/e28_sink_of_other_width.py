"""The sink points at an array of positions."""

from tests.malformed.tamper import good, table

RULE = "E-28"


def build(path):
    good(path)
    with table(path, "batches") as batches:
        positions = batches["positions"][0]
    with table(path, "calls") as calls:
        calls["sink"][0] = positions
