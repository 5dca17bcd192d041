"""A number is spelt in another way."""

from tests.malformed.tamper import good, text

RULE = "E-15"


def build(path):
    good(path)
    text(path, b'"threads":0}', b'"threads":-0')
