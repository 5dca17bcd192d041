"""One bit of the user block is flipped."""

from tests.malformed.tamper import good

RULE = "E-03"


def build(path):
    good(path)
    data = bytearray(path.read_bytes())
    data[70] ^= 1
    path.write_bytes(data)
