"""An indexer call has q, which only calls of attention have, in place of weights."""

import numpy as np

from tests.malformed.tamper import good_indexer, table
from tracekit.store.schema import Role

RULE = "E-28"


def build(path):
    good_indexer(path)
    with table(path, "tensors") as tensors:
        row = int(np.argmax(tensors["role"] == Role.INDEX_W))
        tensors["role"][row] = Role.Q
