"""A byte that belongs to no chunk."""

from tests.malformed.tamper import block, good, reseal

RULE = "E-18"


def build(path):
    good(path)
    before = block(path)
    path.write_bytes(path.read_bytes() + b"\0")
    reseal(path, before)
