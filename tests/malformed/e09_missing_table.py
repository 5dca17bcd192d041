"""A table is missing."""

from tests.malformed.tamper import good, objects

RULE = "E-09"


def build(path):
    good(path)
    objects(path, lambda file: file.__delitem__("index/extents"))
