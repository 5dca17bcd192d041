"""libhdf5's own superblock is damaged, under a right head digest."""

from tests.malformed.tamper import block, good, reseal

RULE = "E-08"


def build(path):
    good(path)
    before = block(path)
    data = bytearray(path.read_bytes())
    data[512 + 20] ^= 0xFF
    path.write_bytes(data)
    reseal(path, before)
