"""`tracekit demo`: from nothing to a recorded and replayed real model, with its report."""

from pathlib import Path

import click

from tracekit.cli.options import Verb
from tracekit.cli.progress import progress
from tracekit.report.terminal import console, render

PROMPT = (
    "A recorded attention call says what a kernel was given and what it answered. Replaying it alone, in "
    "another order, in other chunks and one token at a time shows which promises the kernel keeps. The same "
    "row should give the same bits whatever stands beside it in the batch, and a verdict should say how much "
    "was compared. When a row alone and the same row in its batch differ, training and rollout disagree."
)
FINDING = (
    "torch's CPU flash attention picks other code for another number of query rows, and another exponential\n"
    "for keys outside a full vector: a row alone is not the row in its batch (docs/findings.md)."
)


@click.command("demo", cls=Verb)
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default=Path("demo"),
    show_default=True,
    help="Folder to write into.",
)
@click.option("--layers", default="0,1,15,29", show_default=True, metavar="N,A-B", help="Layers to record.")
def command(out: Path, layers: str) -> int:
    """Record SmolLM2-135M on a prompt, replay it with TKA-1, then probe torch's CPU flash attention."""
    from tracekit.api import replay
    from tracekit.cli.options import parse_numbers
    from tracekit.engines.driver import run_transformers
    from tracekit.verdict import worst

    out.mkdir(parents=True, exist_ok=True)
    trace = out / "smollm2.h5"
    screen = console()
    screen.print("[bold]1. record[/] SmolLM2-135M, real weights, prefill and 4 decode steps")
    with progress("record") as advance:
        summary = run_transformers(
            model="smollm2",
            prompts=[PROMPT],
            max_new_tokens=4,
            attn_implementation="sdpa",
            layers=parse_numbers(layers, "--layers"),
            out=trace,
            force=True,
            progress=advance,
        )
    screen.print(f"   {trace}: {summary.calls} calls, {trace.stat().st_size:,} bytes\n")

    screen.print("[bold]2. replay[/] every claim on TKA-1, and the recorded kernel on its own launch")
    with progress("replay") as advance:
        held = replay(trace, progress=advance)
    screen.print(render(held.verdicts, held.exit_code))

    screen.print("\n[bold]3. probe[/] what torch's CPU flash attention never promised")
    with progress("probe") as advance:
        probed = replay(trace, provider="torch-flash-cpu", probe=True, progress=advance)
    screen.print(render(probed.verdicts, probed.exit_code))
    screen.print(FINDING)
    screen.print(
        f"\nnext: tracekit inspect {trace}; tracekit replay {trace} --provider torch-flash-cpu --claim solo"
    )
    return worst([held.exit_code, probed.exit_code])
