"""The payload has another digest than the user block says."""

from tests.malformed.tamper import good, seal

RULE = "E-22"


def build(path):
    good(path)
    seal(path, payload_digest=bytes(32))
