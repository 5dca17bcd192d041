"""A payload dataset of floats."""

import hdf5plugin
import numpy as np

from tests.malformed.tamper import good, objects

RULE = "E-11"


def build(path):
    def change(file):
        shape = file["payload/lse/0"].shape
        del file["payload/lse/0"]
        lse = file.create_dataset(
            "payload/lse/0", shape, "<f4", chunks=shape, shuffle=True, **hdf5plugin.Zstd(clevel=1)
        )
        lse.attrs["tracekit_dtype"] = np.bytes_("float32")

    good(path)
    objects(path, change)
