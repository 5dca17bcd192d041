"""`tracekit verify TRACE...`: every rule of docs/format.md and every digest."""

import json
from pathlib import Path

import click

from tracekit.api import history as judge_trace
from tracekit.cli.options import Verb, history_words, json_option
from tracekit.errors import TracekitError
from tracekit.gate.recorded import Legality
from tracekit.store import Violation, verify_trace
from tracekit.verdict import Exit, worst


@click.command("verify", cls=Verb)
@click.argument("traces", type=click.Path(path_type=Path), nargs=-1, required=True)
@click.option("--history", is_flag=True, help="Also prove that the history of requests was legal.")
@json_option
def command(traces: tuple[Path, ...], history: bool, as_json: bool) -> int:
    """Check every rule and digest of TRACES; exits 2 when one is broken.

    With --history it also exits 1 where a history was not legal (docs/gate.md), and 3 where nobody knows.
    """
    found = {str(path): _violations(path) for path in traces}
    judged = {path: judge_trace(path) for path, broken in found.items() if history and not broken}
    if as_json:
        told = {
            path: [{"rule": v.rule, "message": v.message, **v.fields} for v in violations]
            for path, violations in found.items()
        }
        histories = {path: judgement.to_dict() for path, judgement in judged.items()}
        click.echo(json.dumps({"files": told, "histories": histories} if history else told, indent=2))
    else:
        for path, violations in found.items():
            click.echo(f"{path}: {'sound' if not violations else f'{len(violations)} broken'}")
            for violation in violations:
                click.echo(f"  {violation.rule}  {violation.message}")
            if path in judged:
                click.echo(f"  history {history_words(judged[path])}")
    codes = [Exit.USAGE for broken in found.values() if broken]
    codes += [_CODES[judgement.status] for judgement in judged.values()]
    return worst(codes)


_CODES = {
    Legality.LEGAL: Exit.OK,
    Legality.ILLEGAL: Exit.REFUTED,
    Legality.UNKNOWN: Exit.INCONCLUSIVE,
}


def _violations(path: Path) -> list[Violation]:
    """A file that cannot be read at all is told like a broken one, so that the other files are still told."""
    try:
        return verify_trace(path)
    except TracekitError as error:
        return [Violation(error.rule, str(error), error.fields)]
