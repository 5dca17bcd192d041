"""The border of the state machine: an event holds what its annotations say, and nothing is converted.

Rules compare modes by identity and versions by order, so a text for a mode, a NaN for a version or a float
for a position would pass by rules that were made for it.
"""

from dataclasses import fields
from functools import cache
from types import UnionType
from typing import Any, get_args, get_type_hints

from tracekit.model.events import Attend, GateMode
from tracekit.model.kv import KVFamily


def check_types(event: Any) -> None:
    """Refuse an event of the wrong types. Tables of pages and scales are taken as they are.

    Raises:
        TypeError: a field holds something else than its class says; booleans and NumPy's are no integers.
    """
    if isinstance(event, Attend):
        _check_attend(event)
    else:
        kind: Any = type(event)
        for name, kinds in _fields(kind):
            _check(event, name, getattr(event, name), kinds)


def _check_attend(event: Attend) -> None:
    _check(event, "layer", event.layer, (int,))
    _check(event, "model_version", event.model_version, (int,))
    _check(event, "window", event.window, (int, type(None)))
    for span in event.spans:
        if type(span.mode) is not GateMode or type(span.request) is not str:
            raise TypeError(f"{span!r} has a request that is no text, or a mode that is no GateMode")
        if type(span.first) is not int or type(span.end) is not int:
            raise TypeError(f"{span!r} has a position that is no int")
        for read in span.reads:
            if type(read.family) is not KVFamily:
                raise TypeError(f"{read!r} has a family that is no KVFamily")
            if type(read.cache_version) is not int or type(read.first) is not int:
                raise TypeError(f"{read!r} has a number that is no int")


@cache
def _fields(kind: Any) -> tuple[tuple[str, tuple[type, ...]], ...]:
    hints = get_type_hints(kind)
    return tuple(
        (field.name, get_args(hint) if isinstance(hint := hints[field.name], UnionType) else (hint,))
        for field in fields(kind)
    )


def _check(event: Any, name: str, value: object, kinds: tuple[type, ...]) -> None:
    if type(value) not in kinds:
        wanted = " or ".join(kind.__name__ for kind in kinds)
        raise TypeError(f"{name} of {event!r} is {value!r}, which is no {wanted}")
