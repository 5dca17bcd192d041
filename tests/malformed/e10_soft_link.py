"""A soft link, which may lead in circles."""

import h5py

from tests.malformed.tamper import good, objects

RULE = "E-10"


def build(path):
    good(path)
    objects(path, lambda file: file.__setitem__("payload/loop", h5py.SoftLink("/payload")))
