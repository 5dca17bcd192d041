"""A pass in the history names a layer below 0."""

from tests.malformed.tamper import good_history

RULE = "E-15"


def build(path):
    good_history(path, ("pass", 0, [["a", 0, 1, "prefill", 0]], 0, False, [-1]))
