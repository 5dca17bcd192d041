"""A group stands where a table should."""

from tests.malformed.tamper import good, objects

RULE = "E-09"


def build(path):
    def change(file):
        del file["index/extents"]
        file.create_group("index/extents")

    good(path)
    objects(path, change)
