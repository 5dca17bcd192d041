"""Gradients in the history do not say whether their graph was kept."""

from tests.malformed.tamper import good_history

RULE = "E-15"


def build(path):
    good_history(path, ("backward", 0, [1], "kernel", 0))
