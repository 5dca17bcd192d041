"""A payload dataset under gzip."""

import numpy as np

from tests.malformed.tamper import good, objects

RULE = "E-13"


def build(path):
    def change(file):
        shape = file["payload/q/0"].shape
        del file["payload/q/0"]
        q = file.create_dataset("payload/q/0", shape, "<u2", chunks=shape, compression="gzip")
        q.attrs["tracekit_dtype"] = np.bytes_("bfloat16")

    good(path)
    objects(path, change)
