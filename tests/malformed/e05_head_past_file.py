"""The head is longer than the file."""

from tests.malformed.tamper import block, good, seal

RULE = "E-05"


def build(path):
    good(path)
    seal(path, head=block(path).length)
