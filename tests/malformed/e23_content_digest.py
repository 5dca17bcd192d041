"""The calls have another content digest than the user block says."""

from tests.malformed.tamper import good, seal

RULE = "E-23"


def build(path):
    good(path)
    seal(path, content_digest=bytes(32))
