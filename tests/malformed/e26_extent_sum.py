"""A KV entry says that it holds one row more than its extents."""

from tests.malformed.tamper import good, table

RULE = "E-26"


def build(path):
    good(path)
    with table(path, "kv") as kv:
        kv["count"][0] += 1
