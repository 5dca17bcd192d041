"""`tracekit diff BASE TARGET`: two traces in logical coordinates, and where they first diverge."""

import json
from pathlib import Path

import click
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from tracekit.cli.options import Verb, json_option
from tracekit.compare.diff import Diff
from tracekit.report.terminal import console
from tracekit.report.words import place_words, values_words


@click.command("diff", cls=Verb)
@click.argument("base", type=click.Path(path_type=Path))
@click.argument("target", type=click.Path(path_type=Path))
@json_option
def command(base: Path, target: Path, as_json: bool) -> int:
    """Compare Q, KV, sink, selection, O and LSE of BASE and TARGET, layer by layer, in that order.

    Requests are paired by their token ids. Exit codes: 0 every row of both was compared and is equal, 1 they
    differ, 3 they do not, but something was not compared: layers, requests or rows that one of them lacks.
    """
    from tracekit.api import diff

    found = diff(base, target)
    if as_json:
        click.echo(json.dumps(found.to_dict(), indent=2))
    else:
        console().print(_describe(base, target, found))
    return found.exit_code


def _describe(base: Path, target: Path, found: Diff) -> RenderableType:
    lines: list[RenderableType] = [Text(f"{base.name} against {target.name}", style="bold")]
    for pair in found.pairs:
        lines.append(Text(f"  {pair.base} with {pair.target}: {pair.tokens} common tokens"))
    table = Table("layer", "tensor", "verdict", "compared", "differ", "ULP", box=None, pad_edge=False)
    for part in found.parts:
        style = {"equal": "green", "differs": "bold red", "absent": "dim"}.get(part.verdict, "yellow")
        table.add_row(
            str(part.layer) if not part.rank else f"{part.layer} rank {part.rank}",
            part.tensor,
            Text(part.verdict if not part.reason else f"{part.verdict}: {part.reason}", style=style),
            f"{part.compared.elements:,}",
            f"{part.differences.elements:,}",
            f"{part.differences.max_ulps:,}" if part.differences.elements else "",
        )
    lines.append(table)
    lines.extend(Text(note) for note in found.notes)
    first = found.first
    if first is not None and first.place is not None:
        lines.append(Text(f"  {place_words(first.place)}"))
        lines.append(Text(f"  {values_words(first.place)}"))
    lines.append(Text(f"{found.summary}. exit {found.exit_code}"))
    return Group(*lines)
