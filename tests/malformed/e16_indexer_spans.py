"""The tensors of an indexer call do not follow those of the call before."""

from tests.malformed.tamper import good_indexer, table

RULE = "E-16"


def build(path):
    good_indexer(path)
    with table(path, "indexer_calls") as calls:
        calls["tensors"][1] -= 1
