"""The history is in an array of numbers, not of bytes."""

from tests.malformed.tamper import good_history, text

RULE = "E-28"


def build(path):
    good_history(path)
    text(path, b'"history":0', b'"history":1')
