"""A link into another file."""

import h5py

from tests.malformed.tamper import good, objects

RULE = "E-10"


def build(path):
    good(path)
    objects(path, lambda file: file.__setitem__("index/other", h5py.ExternalLink("/etc/passwd", "/")))
