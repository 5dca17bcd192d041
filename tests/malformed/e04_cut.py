"""The last byte is missing."""

from tests.malformed.tamper import good

RULE = "E-04"


def build(path):
    good(path)
    path.write_bytes(path.read_bytes()[:-1])
