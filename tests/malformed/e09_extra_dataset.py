"""A dataset that no trace has."""

from tests.malformed.tamper import good, objects

RULE = "E-09"


def build(path):
    good(path)
    objects(path, lambda file: file.create_dataset("payload/q/extra", data=[1]))
