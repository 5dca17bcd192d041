"""The keys of an indexer call are rows of the family recent."""

from tests.malformed.tamper import good_indexer, table
from tracekit.model import KVFamily
from tracekit.store.schema import FAMILIES

RULE = "E-28"


def build(path):
    good_indexer(path)
    with table(path, "kv") as kv:
        kv["family"][-1] = FAMILIES.index(KVFamily.RECENT)
