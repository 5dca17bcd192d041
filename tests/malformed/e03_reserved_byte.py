"""A reserved byte is set, under a right digest."""

import xxhash

from tests.malformed.tamper import good

RULE = "E-03"


def build(path):
    good(path)
    data = bytearray(path.read_bytes())
    data[200] = 1
    data[496:512] = xxhash.xxh3_128_digest(bytes(data[:496]))
    path.write_bytes(data)
