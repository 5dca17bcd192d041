"""libhdf5's index says that a chunk is shorter than it is: stock tools would read other bytes."""

from tests.malformed.tamper import good, in_place

RULE = "E-24"


def build(path):
    def change(file):
        q = file["payload/q/0"].id
        mask, stored = q.read_direct_chunk((0, 0, 0))
        q.write_direct_chunk((0, 0, 0), stored[:-4], mask)

    good(path)
    in_place(path, change)
