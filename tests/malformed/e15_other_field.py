"""The recording has a field under another name."""

from tests.malformed.tamper import good, text

RULE = "E-15"


def build(path):
    good(path)
    text(path, b'"ledger"', b'"ledges"')
