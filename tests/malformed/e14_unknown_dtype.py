"""The dtype of a dataset is none that tracekit knows."""

import numpy as np

from tests.malformed.tamper import good, objects

RULE = "E-14"


def build(path):
    good(path)
    objects(path, lambda file: file["payload/q/0"].attrs.create("tracekit_dtype", np.bytes_("bfloat17")))
