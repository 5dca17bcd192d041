"""`tracekit bind TRAIN ROLLOUT`: may two runs be compared, and did both execute one strict contract?"""

import json
from pathlib import Path

import click
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from tracekit.cli.options import Verb, json_option
from tracekit.contract import Binding, TopologyPolicy
from tracekit.report.terminal import console
from tracekit.verdict import Exit

EXITS = {
    "passed": Exit.OK,
    "refused": Exit.REFUTED,
    "not comparable": Exit.REFUTED,
    "inconclusive": Exit.INCONCLUSIVE,
}


@click.command("bind", cls=Verb)
@click.argument("train", type=click.Path(path_type=Path))
@click.argument("rollout", type=click.Path(path_type=Path))
@click.option(
    "--topology",
    type=click.Choice([policy.value.replace("_", "-") for policy in TopologyPolicy]),
    default="must-match",
    show_default=True,
    help="Whether both runs must be cut over ranks alike.",
)
@click.option("--allow-dtype-difference", is_flag=True, help="For a sweep against a reference dtype only.")
@json_option
def command(train: Path, rollout: Path, topology: str, allow_dtype_difference: bool, as_json: bool) -> int:
    """Bind the run folders TRAIN and ROLLOUT (docs/binding.md).

    What the runs stored about themselves is checked against their traces. Exit codes: 0 passed, 1 refused or
    not comparable, 2 no run folders, 3 a rank left no evidence.
    """
    from tracekit.contract.judge import bind_runs

    found = bind_runs(
        train,
        rollout,
        topology=TopologyPolicy(topology.replace("-", "_")),
        allow_dtype_difference=allow_dtype_difference,
    )
    if as_json:
        click.echo(json.dumps(found.to_dict(), indent=2))
    else:
        console().print(_describe(train, rollout, found))
    return EXITS[found.status]


def _describe(train: Path, rollout: Path, found: Binding) -> RenderableType:
    style = {"passed": "bold green", "inconclusive": "bold yellow"}.get(found.status, "bold red")
    lines: list[RenderableType] = [
        Text.assemble(f"{train.name} against {rollout.name}: ", (found.status, style)),
    ]
    table = Table("tier", "code", "field", "why", box=None, pad_edge=False)
    for issue in found.issues:
        table.add_row(*(Text(cell) for cell in (issue.tier, issue.code, issue.field, issue.message)))
    if found.issues:
        lines.append(table)
    if found.bits.get("elements"):
        rows, elements = found.bits["rows"], found.bits["elements"]
        lines.append(Text(f"  {rows:,} rows, {elements:,} values compared in bits"))
    for name, both in found.recorded_differences.items():
        lines.append(
            Text(f"  recorded: {name} is {both['training']} in training, {both['rollout']} in rollout")
        )
    lines += [Text(f"  {sentence}", style="dim") for sentence in found.boundary]
    lines.append(Text(f"exit {int(EXITS[found.status])}"))
    return Group(*lines)
