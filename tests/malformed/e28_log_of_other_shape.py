"""A log whose table says another shape than its dataset has."""

from tests.malformed.tamper import good, table

RULE = "E-28"


def build(path):
    good(path)
    with table(path, "logs") as logs:
        logs["key_dim"][0] = 4
