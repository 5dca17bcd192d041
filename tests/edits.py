"""Documents changed in one place."""

import copy
from typing import Any

Path = tuple[str | int, ...]


def edited(told: Any, path: Path, value: Any, *, gone: bool = False) -> Any:
    """Return a copy with another value at one place, or without it."""
    whole = copy.deepcopy(told)
    parent = whole
    for key in path[:-1]:
        parent = parent[key]
    if gone:
        del parent[path[-1]]
    else:
        parent[path[-1]] = value
    return whole
