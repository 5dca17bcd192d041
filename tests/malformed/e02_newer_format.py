"""A file of format 1.0, sound in itself."""

from tests.malformed.tamper import good, seal

RULE = "E-02"


def build(path):
    good(path)
    seal(path, version=(1, 0))
