"""Two calls share one tensor line: spans that overlap could speak of more than the file holds."""

from tests.malformed.tamper import good, table

RULE = "E-16"


def build(path):
    good(path)
    with table(path, "calls") as calls:
        calls["tensors"][1] -= 1
        calls["tensor_count"][1] += 1
