"""An indexer says that it chose among rows of 128 tokens, which its rows do not have yet."""

from tests.malformed.tamper import good_indexer, table
from tracekit.model import KVFamily
from tracekit.store.schema import FAMILIES

RULE = "E-21"


def build(path):
    good_indexer(path)
    with table(path, "indexer_calls") as calls:
        calls["family"][0] = FAMILIES.index(KVFamily.C128)
