"""A chunk that decodes to a gigabyte, under a right digest."""

import zstandard

from tests.malformed.tamper import good, last_chunk

RULE = "E-20"


def build(path):
    good(path)
    bomb = zstandard.ZstdCompressor(level=1, write_checksum=True).compressobj(size=1 << 30)
    zeros = bytes(1 << 20)
    last_chunk(path, b"".join([*(bomb.compress(zeros) for _ in range(1024)), bomb.flush()]))
