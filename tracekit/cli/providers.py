"""`tracekit providers`: the kernels that can be run again, whether they can be here, and what they promise."""

import json

import click
from rich.table import Table
from rich.text import Text

from tracekit.cli.options import json_option
from tracekit.report.terminal import console
from tracekit.verdict import Exit


@click.command("providers")
@json_option
def command(as_json: bool) -> int:
    """List kernels: what each promises, or why it cannot run here; what has not run on hardware says so."""
    from tracekit.providers import registry

    found = [describe(name) for name in registry.names()]
    if as_json:
        click.echo(json.dumps(found, indent=2))
        return Exit.OK
    table = Table(box=None, show_header=False, pad_edge=False)
    for one in found:
        state = Text("here", style="green") if one["available"] else Text("missing", style="yellow")
        promised = (
            f"promises {', '.join(one['promises']) or 'nothing'}" if one["available"] else one["reason"]
        )
        table.add_row(one["provider"], state, "; ".join(filter(None, (one["label"], promised))))
    console().print(table)
    return Exit.OK


def describe(name: str) -> dict[str, object]:
    """Return what is known of one provider; one that cannot be made here says why."""
    from tracekit.errors import TracekitError
    from tracekit.providers import registry

    record: dict[str, object] = {"provider": name, "label": registry.label(name)}
    try:
        provider = registry.create(name)
    except TracekitError as error:
        return record | {"available": False, "reason": str(error), "promises": []}
    return record | {"available": True, "reason": "", "promises": sorted(provider.advertised())}
