"""One bit of a chunk is flipped; the payload digest is right again."""

from tests.malformed.tamper import block, good, reseal

RULE = "E-19"


def build(path):
    good(path)
    before = block(path)
    data = bytearray(path.read_bytes())
    data[-20] ^= 1
    path.write_bytes(data)
    reseal(path, before)
