"""A table of variable-length strings."""

import h5py

from tests.malformed.tamper import good, objects

RULE = "E-11"


def build(path):
    def change(file):
        del file["index/text"]
        file.create_dataset("index/text", data=["a"], dtype=h5py.string_dtype())

    good(path)
    objects(path, change)
