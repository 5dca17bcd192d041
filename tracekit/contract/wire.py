"""The nouns of a binding as JSON and back, and their JSON Schema, all three from the same annotations."""

import types
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import StrEnum
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from tracekit.contract.refuse import refuse
from tracekit.errors import InvalidCall

T = TypeVar("T")


def dump(value: Any) -> Any:
    """Return a noun as JSON types: dataclasses are objects, tuples lists, enums their words."""
    if is_dataclass(value):
        return {field.name: dump(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, StrEnum):
        return value.value
    if isinstance(value, (tuple, list)):
        return [dump(item) for item in value]
    if isinstance(value, Mapping):
        return {key: dump(item) for key, item in value.items()}
    return value


def parse(kind: type[T], data: Any, where: str = "readback") -> T:
    """Return the noun that JSON types describe.

    Args:
        kind: a dataclass of this room.
        data: what `json.loads` gave.
        where: how messages name it.

    Raises:
        BindingInvalid: `B-JSON` for a missing, unknown or mistyped field; the rule of the noun otherwise.
    """
    parsed = _parse(kind, data, where)
    assert isinstance(parsed, kind)
    return parsed


def _parse(kind: Any, data: Any, where: str) -> Any:
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        if data is None and type(None) in arguments:
            return None
        (kind,) = [argument for argument in arguments if argument is not type(None)]
        return _parse(kind, data, where)
    if origin is tuple:
        return _parse_tuple(arguments, data, where)
    if origin is not None:  # a mapping of text to nouns
        items = _typed(dict, data, where).items()
        return {key: _parse(arguments[1], item, f"{where}.{key}") for key, item in items}
    if is_dataclass(kind):
        return _parse_noun(kind, data, where)
    if isinstance(kind, type) and issubclass(kind, StrEnum):
        words = [str(word) for word in kind]
        if data not in words:
            refuse("B-JSON", f"{where} is {data!r}; it is one of {', '.join(words)}.")
        return kind(data)
    return _typed(kind, data, where)


def _typed(kind: Any, data: Any, where: str) -> Any:
    """Booleans are no integers here, and nothing is converted."""
    if type(data) is not kind:
        refuse("B-JSON", f"{where} is {data!r}, which is no {kind.__name__}.")
    return data


def _parse_tuple(arguments: tuple[Any, ...], data: Any, where: str) -> tuple[Any, ...]:
    items = _typed(list, data, where)
    if arguments[-1] is Ellipsis:
        return tuple(_parse(arguments[0], item, f"{where}[{at}]") for at, item in enumerate(items))
    if len(items) != len(arguments):
        refuse("B-JSON", f"{where} holds {len(items)} items, not {len(arguments)}.")
    pairs = zip(arguments, items, strict=True)
    return tuple(_parse(kind, item, f"{where}[{at}]") for at, (kind, item) in enumerate(pairs))


def _parse_noun(kind: Any, data: Any, where: str) -> Any:
    """Every field is stated, those with a default too: what a file is silent about is not taken as sound."""
    given, hints = _typed(dict, data, where), get_type_hints(kind)
    unknown = sorted(given.keys() - hints.keys())
    missing = sorted(hints.keys() - given.keys())
    for word, names in (("does not know", unknown), ("needs", missing)):
        if names:
            refuse("B-JSON", f"{where} {word} {', '.join(names)}.")
    parsed = {name: _parse(hints[name], item, f"{where}.{name}") for name, item in given.items()}
    try:
        return kind(**parsed)
    except InvalidCall as error:  # of a noun that calls have too
        refuse("B-JSON", f"{where}: {error}")


_JSON_WORDS = {str: "string", int: "integer", bool: "boolean", float: "number"}


def schema(kind: Any) -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12) of a noun; what its constructor checks is not in it."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return {"anyOf": [schema(argument) for argument in arguments]}
    if kind is type(None):
        return {"type": "null"}
    if origin is tuple and arguments[-1] is Ellipsis:
        return {"type": "array", "items": schema(arguments[0])}
    if origin is tuple:
        return {"type": "array", "prefixItems": [schema(a) for a in arguments], "items": False,
                "minItems": len(arguments)}  # fmt: skip
    if origin is not None:
        return {"type": "object", "additionalProperties": schema(arguments[1])}
    if is_dataclass(kind):
        hints = get_type_hints(kind)
        return {
            "type": "object",
            "properties": {name: schema(hint) for name, hint in hints.items()},
            "required": list(hints),
            "additionalProperties": False,
        }
    if isinstance(kind, type) and issubclass(kind, StrEnum):
        return {"enum": [str(word) for word in kind]}
    return {"type": _JSON_WORDS[kind]}
