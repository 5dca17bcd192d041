"""A table whose bytes lie in another file."""

import numpy as np

from tests.malformed.tamper import good, objects
from tracekit.store.schema import TABLES

RULE = "E-10"


def build(path):
    def change(file):
        del file["index/extents"]
        dtype = TABLES["extents"]
        size = 4 * np.dtype(dtype).itemsize
        file.create_dataset("index/extents", (4,), dtype, external=[("/etc/hostname", 0, size)])

    good(path)
    objects(path, change)
