"""Bytes that are no trace."""

RULE = "E-01"


def build(path):
    path.write_bytes(b"\0" * 1024)
