"""A scale that is the bits of a NaN: well formed, but no convention."""

from tests.malformed.tamper import good, text

RULE = "E-21"


def build(path):
    good(path)
    text(path, b'"scale_bits":1040187392', b'"scale_bits":4290772992')
