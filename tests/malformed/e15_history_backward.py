"""Gradients in the history name a layer that is no number."""

from tests.malformed.tamper import good_history

RULE = "E-15"


def build(path):
    good_history(path, ("backward", 0, ["first"], "kernel", 0, False))
