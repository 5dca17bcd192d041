"""`tracekit providers`: the kernels that can be run again, and what they promise or lack here."""

import json
from dataclasses import dataclass

import click
from rich.table import Table
from rich.text import Text

from tracekit.cli.options import Verb, json_option
from tracekit.report.terminal import console
from tracekit.verdict import Exit


@dataclass(frozen=True)
class Described:
    """One provider: what must be said beside it, why it cannot run here (or empty), its promises."""

    provider: str
    label: str
    reason: str
    promises: tuple[str, ...]


@click.command("providers", cls=Verb)
@json_option
def command(as_json: bool) -> int:
    """List kernels: what each promises, or why it cannot run here; what has not run on hardware says so."""
    from tracekit.providers import registry

    found = [describe(name) for name in registry.names()]
    if as_json:
        click.echo(json.dumps([vars(one) for one in found], indent=2))
        return Exit.OK
    table = Table(box=None, show_header=False, pad_edge=False)
    for one in found:
        here = not one.reason
        state = Text("here", style="green") if here else Text("missing", style="yellow")
        said = f"promises {', '.join(one.promises) or 'nothing'}" if here else one.reason
        table.add_row(one.provider, state, "; ".join(filter(None, (one.label, said))))
    console().print(table)
    return Exit.OK


def describe(name: str) -> Described:
    """Return what is known of one provider."""
    from tracekit.errors import TracekitError
    from tracekit.providers import registry

    try:
        provider = registry.create(name)
    except TracekitError as error:
        return Described(name, registry.label(name), str(error), ())
    return Described(name, registry.label(name), "", tuple(sorted(provider.advertised())))
