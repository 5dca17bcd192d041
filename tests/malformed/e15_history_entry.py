"""An entry of the history has a name that nobody knows."""

from tests.malformed.tamper import good_history

RULE = "E-15"


def build(path):
    good_history(path, ("promote", "a"))
