"""An array whose start and count wrap past 2^64."""

from tests.malformed.tamper import good, table

RULE = "E-16"


def build(path):
    good(path)
    with table(path, "arrays") as arrays:
        arrays["first"][0] = 2**64 - 2
