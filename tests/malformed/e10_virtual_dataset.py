"""A virtual dataset."""

import h5py

from tests.malformed.tamper import good, objects

RULE = "E-10"


def build(path):
    def change(file):
        del file["index/members"]
        layout = h5py.VirtualLayout((4,), "<u4")
        layout[:] = h5py.VirtualSource("/etc/hostname", "x", (4,))
        file.create_virtual_dataset("index/members", layout)

    good(path)
    objects(path, change)
