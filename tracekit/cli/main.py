"""`tracekit`: finds the verb, runs it, and turns what happened into an exit code.

A verb's module is imported only when the verb is used, so that `tracekit --help` needs neither h5py nor
torch.
"""

import importlib
import json
import signal
import sys
import traceback
from typing import Any

import click

from tracekit import __version__
from tracekit.cli.output import Output
from tracekit.errors import TracekitError
from tracekit.verdict import Exit

VERBS = {
    "record": "record the attention of a model into a trace",
    "merge": "merge the traces of the processes of one job",
    "replay": "run claims on traces and print verdicts",
    "diff": "compare two traces in logical coordinates",
    "bind": "judge whether training and rollout executed one strict contract",
    "inspect": "show what a trace holds",
    "verify": "check every rule and digest of a trace",
    "providers": "list the kernels that can be run again, and what they promise",
    "doctor": "show what works on this machine and what is missing",
    "demo": "record a real model, replay it, show the report",
}


class _Verbs(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in VERBS:
            return None
        command: click.Command = importlib.import_module(f"tracekit.cli.{cmd_name}").command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Verbs"):
            formatter.write_dl(list(VERBS.items()))


@click.group(cls=_Verbs, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, prog_name="tracekit", message="%(prog)s %(version)s")
def cli() -> None:
    """Record what attention kernels read and answered; prove later, in bits, which promises they keep.

    Exit codes: 0 held or bounded, 1 refuted, 2 wrong usage or unreadable file, 3 inconclusive, 4 a named
    claim was not run, 5 nothing selected, 6 internal error.
    """


def main(argv: list[str] | None = None) -> None:
    """Run the command line and exit."""
    output = Output()
    arguments = sys.argv[1:] if argv is None else argv
    sys.exit(output.code(run(arguments)))


def run(arguments: list[str]) -> int:
    """Run the command line and return its exit code; nothing escapes as a traceback but a fault of ours."""
    try:
        result = cli.main(args=arguments, prog_name="tracekit", standalone_mode=False)
    except click.exceptions.Exit as stop:
        return stop.exit_code
    except click.ClickException as wrong:
        facts = {"error": "UsageError", "rule": "U-USAGE", "message": wrong.format_message()}
        _tell_json(facts, Exit.USAGE, arguments)
        wrong.show()
        return Exit.USAGE
    except click.Abort:
        click.echo("tracekit: interrupted.", err=True)
        return 130
    except TracekitError as known:
        return _tell(known, arguments)
    except SystemExit as stop:
        # click turns a closed pipe into code 1, which would mean refuted.
        if isinstance(stop.__context__, OSError):
            return 128 + signal.SIGPIPE
        raise
    except Exception as fault:
        facts = {"error": type(fault).__name__, "rule": "", "message": str(fault)}
        _tell_json(facts, Exit.INTERNAL, arguments)
        traceback.print_exc()
        click.echo("tracekit: this is a fault of tracekit, not of your input; please report it.", err=True)
        return Exit.INTERNAL
    return result if isinstance(result, int) else Exit.OK


def _tell(error: TracekitError, arguments: list[str]) -> int:
    _tell_json(error.to_dict(), error.exit_code, arguments)
    click.echo(f"tracekit: {error}", err=True)
    return error.exit_code


def _tell_json(facts: dict[str, Any], code: int, arguments: list[str]) -> None:
    """Print an error as the one document of a run that was asked for JSON; options behind -- are not ours."""
    ours = arguments[: arguments.index("--")] if "--" in arguments else arguments
    if "--json" in ours:
        click.echo(json.dumps({**facts, "exit_code": code}, indent=2, default=str))
