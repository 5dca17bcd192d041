"""A chunk that is no zstd frame, under a right digest."""

from tests.malformed.tamper import good, last_chunk

RULE = "E-20"


def build(path):
    good(path)
    last_chunk(path, b"no frame at all")
