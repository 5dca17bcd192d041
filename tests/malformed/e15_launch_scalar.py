"""A scalar of a launch plan is no hexadecimal float; found when the call is read."""

from tests.malformed.tamper import good, text

RULE = "E-15"


def build(path):
    good(path)
    text(path, b'"float":"nan"', b'"float":"nun"')
