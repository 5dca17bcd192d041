"""A table of 2^50 rows that takes no place in the file."""

from tests.malformed.tamper import good, objects
from tracekit.store.schema import TABLES

RULE = "E-12"


def build(path):
    def change(file):
        del file["index/extents"]
        file.create_dataset("index/extents", (2**50,), TABLES["extents"])

    good(path)
    objects(path, change)
