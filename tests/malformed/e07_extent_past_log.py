"""The last KV extent ends one row past its log."""

from tests.malformed.tamper import good, table

RULE = "E-07"


def build(path):
    good(path)
    with table(path, "extents") as extents:
        extents["row"][1] = extents["row"][1] + 8
