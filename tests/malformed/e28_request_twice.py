"""Two requests under one name."""

from tests.malformed.tamper import good, table

RULE = "E-28"


def build(path):
    good(path)
    with table(path, "requests") as requests:
        requests["digest"][1] = requests["digest"][0]
