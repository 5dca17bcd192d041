"""The table of indexer calls is there and has no row."""

from tests.malformed.tamper import good, objects
from tracekit.store.schema import TABLES

RULE = "E-12"


def build(path):
    good(path)

    def add(file):
        file["index"].create_dataset("indexer_calls", (0,), TABLES["indexer_calls"], track_times=False)

    objects(path, add)
