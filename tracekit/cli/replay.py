"""`tracekit replay TRACE...`: claims on recorded calls, one verdict each."""

import json
from pathlib import Path

import click

from tracekit.cli.options import Verb, history_words, json_option, parse_names, parse_numbers
from tracekit.cli.progress import progress
from tracekit.report.terminal import console, render


@click.command("replay", cls=Verb)
@click.argument("traces", type=click.Path(path_type=Path), nargs=-1, required=True)
@click.option(
    "--provider",
    metavar="ID,...",
    help="Kernels to run: a built-in, an installed one, or package.module:factory. "
    "Default: tka1, and the recorded kernel where it is the one installed here.",
)
@click.option("--claim", metavar="ID,...", help="Claims to judge. Default: those that the kernel promises.")
@click.option(
    "--probe",
    is_flag=True,
    help="Also try claims that the kernel does not promise; never changes the exit code.",
)
@click.option("--layers", metavar="N,A-B", help="Only these layers.")
@click.option("--calls", metavar="N,A-B", help="Only these calls (numbers of `tracekit inspect --calls`).")
@click.option(
    "--requests", metavar="KEY,...", help="Only calls that hold one of these requests (a key or its start)."
)
@click.option(
    "--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Seed of random variants."
)
@click.option("--threads", type=click.IntRange(min=1), help="Threads of the CPU kernels.")
@click.option(
    "--timeout",
    type=click.FloatRange(min=0, min_open=True),
    metavar="SECONDS",
    help="Longest time of one launch.",
)
@click.option(
    "--jobs",
    type=click.IntRange(min=1),
    metavar="N",
    help="Traces at a time, each with kernel processes of its own. Default: the cores that it may use.",
)
@json_option
def command(
    traces: tuple[Path, ...],
    provider: str | None,
    claim: str | None,
    probe: bool,
    layers: str | None,
    calls: str | None,
    requests: str | None,
    seed: int,
    threads: int | None,
    timeout: float | None,
    jobs: int | None,
    as_json: bool,
) -> int:
    """Re-run the attention calls of TRACES in other arrangements and compare the answers in bits.

    Exit codes: 0 every judged claim held or bounded, 1 refuted, 2 wrong usage or unreadable file,
    3 inconclusive, 4 a named claim was not run, 5 nothing selected.
    """
    from tracekit.api import replay

    with progress("replay") as advance:
        report = replay(
            list(traces),
            provider=parse_names(provider),
            claims=parse_names(claim),
            probe=probe,
            layers=parse_numbers(layers, "--layers"),
            calls=parse_numbers(calls, "--calls"),
            requests=parse_names(requests),
            seed=seed,
            threads=threads or 0,
            timeout=timeout,
            jobs=jobs,
            progress=advance,
        )
    if as_json:
        click.echo(json.dumps(report.to_dict(), indent=2))
    else:
        console().print(render(report.verdicts, report.exit_code))
        for trace, judgement in report.histories:
            if judgement.entries:
                click.echo(f"{trace} · history {history_words(judgement)}")
    for error in report.errors:
        click.echo(f"tracekit: {error['message']}", err=True)
    return report.exit_code
