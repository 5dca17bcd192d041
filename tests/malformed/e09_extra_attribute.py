"""An attribute that no trace has."""

from tests.malformed.tamper import good, objects

RULE = "E-09"


def build(path):
    good(path)
    objects(path, lambda file: file["index/calls"].attrs.create("note", 1))
