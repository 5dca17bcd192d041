"""One KV entry reads a row of its log twice."""

from tests.malformed.tamper import good, table

RULE = "E-17"


def build(path):
    good(path)
    with table(path, "extents") as extents:
        assert extents.tolist()[2:5] == [(0, 2), (6, 1), (3, 3)]
        extents["row"][4] = 1
