"""The history is in an array that is not there."""

from tests.malformed.tamper import good_history, text

RULE = "E-16"


def build(path):
    good_history(path)
    text(
        path, b'"history":0,"identity":{"architecture":"Tiny', b'"history":99,"identity":{"architecture":"Tin'
    )
