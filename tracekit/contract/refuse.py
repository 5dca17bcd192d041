"""How the nouns of a binding refuse what cannot be one."""

from typing import Any, NoReturn

from tracekit.errors import BindingInvalid


def refuse(rule: str, problem: str, **fields: Any) -> NoReturn:
    """Refuse a noun that breaks its own rules.

    Raises:
        BindingInvalid: always.
    """
    raise BindingInvalid(f"{problem} Rule: docs/binding.md, {rule}.", rule=rule, **fields)
