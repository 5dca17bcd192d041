"""A payload dataset that may grow."""

import hdf5plugin
import numpy as np

from tests.malformed.tamper import good, objects

RULE = "E-12"


def build(path):
    def change(file):
        shape = file["payload/q/0"].shape
        del file["payload/q/0"]
        q = file.create_dataset(
            "payload/q/0",
            shape,
            "<u2",
            maxshape=(None, *shape[1:]),
            chunks=shape,
            shuffle=True,
            **hdf5plugin.Zstd(clevel=1),
        )
        q.attrs["tracekit_dtype"] = np.bytes_("bfloat16")

    good(path)
    objects(path, change)
