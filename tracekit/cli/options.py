"""Options that several verbs share, and the parsing of their values."""

from collections.abc import Callable
from typing import Any, TypeVar

import click

from tracekit.env import parse_numbers as parse_numbers
from tracekit.gate.recorded import Judgement, Legality

Command = TypeVar("Command", bound=Callable[..., Any])


class Verb(click.Command):
    """A verb that takes an option once: of two values click would take the last and drop the first."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse, and refuse an option with one value that comes twice."""
        _, _, order = self.make_parser(ctx).parse_args(list(args))
        seen: set[str | None] = set()
        for option in order:
            single = isinstance(option, click.Option) and not (option.multiple or option.is_flag)
            if single and option.name in seen:
                raise click.UsageError(
                    f"{option.opts[-1]} is given twice, and one of the two would be left out.", ctx
                )
            seen.add(option.name)
        return super().parse_args(ctx, args)


def json_option(function: Command) -> Command:
    """Add `--json`."""
    return click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead of text.")(
        function
    )


def parse_names(text: str | None) -> tuple[str, ...] | None:
    """Parse `a,b` into names; None stays None."""
    if text is None:
        return None
    return tuple(name.strip() for name in text.split(",") if name.strip())


def history_words(judgement: Judgement) -> str:
    """Return what was found of a history, with the place where a rule is broken."""
    if judgement.status is not Legality.ILLEGAL:
        return f"{judgement.status}: {judgement.reason}"
    place = ", ".join(f"{name} {value}" for name, value in judgement.place.items())
    return f"ILLEGAL {judgement.code} at {place}: {judgement.reason}"


def size_words(count: float) -> str:
    """Return a size in bytes for people: `1.2 MB`."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"
