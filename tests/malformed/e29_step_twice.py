"""The ledger has two lines of one step, each of which counts right."""

from tests.malformed.tamper import good, text

RULE = "E-29"


def build(path):
    good(path)
    text(path, b'[1,3,2,1,1,"budget"', b'[0,3,2,1,1,"budget"')
