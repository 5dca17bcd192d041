"""A step that has a call has no line."""

from tests.malformed.tamper import good, text

RULE = "E-29"


def build(path):
    good(path)
    text(path, b'[1,3,2,1,1,"budget"', b'[7,3,2,0,1,"budget"')
