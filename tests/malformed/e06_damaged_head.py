"""One bit of the head is flipped."""

from tests.malformed.tamper import good

RULE = "E-06"


def build(path):
    good(path)
    data = bytearray(path.read_bytes())
    data[600] ^= 1
    path.write_bytes(data)
