"""The head ends in the middle of the metadata; what lies behind it reaches libhdf5 as zeros."""

from tests.malformed.tamper import block, good, reseal

RULE = "E-08"


def build(path):
    good(path)
    reseal(path, block(path), head=600)
