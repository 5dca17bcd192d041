"""`tracekit verify TRACE...`: every rule of docs/format.md and every digest."""

import json
from pathlib import Path

import click

from tracekit.cli.options import json_option
from tracekit.errors import TracekitError
from tracekit.store import Violation, verify_trace
from tracekit.verdict import Exit


@click.command("verify")
@click.argument("traces", type=click.Path(path_type=Path), nargs=-1, required=True)
@json_option
def command(traces: tuple[Path, ...], as_json: bool) -> int:
    """Check every rule and digest of TRACES; exits 2 when one is broken."""
    found = {str(path): _violations(path) for path in traces}
    if as_json:
        click.echo(
            json.dumps(
                {
                    path: [{"rule": v.rule, "message": v.message, **v.fields} for v in violations]
                    for path, violations in found.items()
                },
                indent=2,
            )
        )
    else:
        for path, violations in found.items():
            click.echo(f"{path}: {'sound' if not violations else f'{len(violations)} broken'}")
            for violation in violations:
                click.echo(f"  {violation.rule}  {violation.message}")
    return Exit.USAGE if any(found.values()) else Exit.OK


def _violations(path: Path) -> list[Violation]:
    """A file that cannot be read at all is told like a broken one, so that the other files are still told."""
    try:
        return verify_trace(path)
    except TracekitError as error:
        return [Violation(error.rule, str(error), error.fields)]
