"""Row and count of an extent add up past 2^64, to a small number."""

from tests.malformed.tamper import good, table

RULE = "E-07"


def build(path):
    good(path)
    with table(path, "extents") as extents:
        extents["row"][0] = 2**64 - 1
