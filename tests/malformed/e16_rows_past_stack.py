"""The rows of a call end past their stack."""

from tests.malformed.tamper import good, table

RULE = "E-16"


def build(path):
    good(path)
    with table(path, "tensors") as tensors:
        tensors["first"][0] = 10
