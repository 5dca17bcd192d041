"""`tracekit merge RANK... -o TRACE`: the traces of a job's processes become one."""

import json
from pathlib import Path

import click

from tracekit.cli.options import Verb, json_option, size_words
from tracekit.cli.progress import progress
from tracekit.model import Tag
from tracekit.recorder.merge import merge
from tracekit.store import open_trace
from tracekit.verdict import Exit


@click.command("merge", cls=Verb)
@click.argument("ranks", type=click.Path(path_type=Path), nargs=-1, required=True, metavar="RANK...")
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True, help="The trace to write.")
@click.option("--force", is_flag=True, help="Write over an existing trace.")
@json_option
def command(ranks: tuple[Path, ...], output: Path, force: bool, as_json: bool) -> int:
    """Merge the traces of the processes of one job, RANK..., given in any order.

    Data-parallel processes bring other requests, tensor-parallel ones other heads of the same calls.
    Replicas must be equal in bits. Traces that contradict each other are refused, and nothing is written. The
    exit code is 3 where the merged trace lacks calls, such as those of a rank that was not given.
    """
    with progress("merge") as advance:
        summary = merge(ranks, output, force=force, progress=advance)
    with open_trace(output) as trace:
        cut = [line for line in trace.recording.ledger if line.tag is Tag.NORMAL and not line.complete]
        silent = not trace.recording.ledger
    code = Exit.INCONCLUSIVE if cut or silent else Exit.OK
    if as_json:
        facts = {
            "path": str(output),
            "merged": [str(rank) for rank in ranks],
            "calls": summary.calls,
            "requests": summary.requests,
            "bytes": summary.size,
            "content_digest": summary.content_digest,
            "lacking": [f"step {line.step}: {line.cut}" for line in cut],
            "exit_code": int(code),
        }
        click.echo(json.dumps(facts, indent=2))
    else:
        click.echo(
            f"{output}: {summary.calls:,} calls of {summary.requests:,} requests out of {len(ranks)} traces, "
            f"{size_words(summary.size)}"
        )
    if cut:
        more = f" (and {len(cut) - 1} more steps)" if len(cut) > 1 else ""
        click.echo(f"tracekit: {output} lacks calls of step {cut[0].step}: {cut[0].cut}{more}", err=True)
    if silent:
        click.echo(f"tracekit: {output} has no ledger, so nobody knows whether calls are missing", err=True)
    return int(code)
