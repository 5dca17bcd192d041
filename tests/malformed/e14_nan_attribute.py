"""The dtype of a dataset is a NaN."""

from tests.malformed.tamper import good, objects

RULE = "E-14"


def build(path):
    def change(file):
        del file["payload/q/0"].attrs["tracekit_dtype"]
        file["payload/q/0"].attrs["tracekit_dtype"] = float("nan")

    good(path)
    objects(path, change)
