"""A trace without calls."""

from tests.malformed.tamper import good, in_place
from tracekit.store.schema import TABLES

RULE = "E-25"


def build(path):
    def change(file):
        del file["index/calls"]
        file.create_dataset("index/calls", (0,), TABLES["calls"])

    good(path)
    in_place(path, change)
