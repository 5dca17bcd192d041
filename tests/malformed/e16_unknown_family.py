"""A family code that means nothing."""

from tests.malformed.tamper import good, table

RULE = "E-16"


def build(path):
    good(path)
    with table(path, "kv") as kv:
        kv["family"][0] = 9
