"""The scores of an indexer call point past the arrays."""

from tests.malformed.tamper import good_indexer, table

RULE = "E-16"


def build(path):
    good_indexer(path)
    with table(path, "indexer_calls") as calls:
        calls["scores"][0] = 10_000
