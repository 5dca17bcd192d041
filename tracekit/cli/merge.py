"""`tracekit merge RANK... -o TRACE`: the traces of a job's processes become one."""

import json
from pathlib import Path

import click

from tracekit.cli.options import json_option, size_words
from tracekit.cli.progress import progress
from tracekit.recorder.merge import merge


@click.command("merge")
@click.argument("ranks", type=click.Path(path_type=Path), nargs=-1, required=True, metavar="RANK...")
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True, help="The trace to write.")
@click.option("--force", is_flag=True, help="Write over an existing trace.")
@json_option
def command(ranks: tuple[Path, ...], output: Path, force: bool, as_json: bool) -> int:
    """Merge the traces of the processes of one job, RANK..., given in any order.

    Data-parallel processes bring other requests, tensor-parallel ones other heads of the same calls.
    Replicas must be equal in bits. Traces that contradict each other are refused, and nothing is written.
    """
    with progress("merge") as advance:
        summary = merge(ranks, output, force=force, progress=advance)
    if as_json:
        facts = {
            "path": str(output),
            "merged": [str(rank) for rank in ranks],
            "calls": summary.calls,
            "requests": summary.requests,
            "bytes": summary.size,
            "content_digest": summary.content_digest,
        }
        click.echo(json.dumps(facts, indent=2))
    else:
        click.echo(
            f"{output}: {summary.calls:,} calls of {summary.requests:,} requests out of {len(ranks)} traces, "
            f"{size_words(summary.size)}"
        )
    return 0
