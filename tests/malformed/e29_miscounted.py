"""The ledger counts a call more of step 0 than the trace holds."""

from tests.malformed.tamper import good, text

RULE = "E-29"


def build(path):
    good(path)
    text(path, b'[0,3,2,1,1,"budget"', b'[0,3,2,2,0,"budget"')
