"""Two chunks at one place."""

from tests.malformed.tamper import good, table

RULE = "E-18"


def build(path):
    good(path)
    with table(path, "chunks") as chunks:
        chunks["offset"][1] = chunks["offset"][0]
