"""A pass in the history ends in an empty list, which is left out: two spellings of one entry."""

from tests.malformed.tamper import good_history

RULE = "E-15"


def build(path):
    good_history(path, ("pass", 0, [["a", 0, 1, "prefill", 0]], 0, False, []))
