"""The KV of a call starts after the rows that its selection reads; found when the call is read."""

from tests.malformed.tamper import good, table

RULE = "E-21"


def build(path):
    good(path)
    with table(path, "kv") as kv:
        kv["first"][0] = 1
