"""`tracekit record`: run a model on a prompt and keep what its attention read and answered."""

import json
from pathlib import Path

import click

from tracekit.cli.options import json_option, parse_numbers, size_words
from tracekit.cli.progress import progress
from tracekit.errors import UsageError
from tracekit.store.target import check_target
from tracekit.verdict import Exit

IMPLEMENTATIONS = ("sdpa", "eager", "tracekit")


@click.command("record")
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True, help="The trace to write.")
@click.option("--engine", type=click.Choice(["transformers"]), default="transformers", show_default=True)
@click.option(
    "--model",
    required=True,
    metavar="DIR_OR_ID",
    help="A model folder, a hub id, smollm2, or tiny-qwen3, tiny-gpt-oss, tiny-deepseek-v4 and "
    "tiny-deepseek-v32 (random; --prompt-ids only).",
)
@click.option("--prompt", "prompts", multiple=True, metavar="TEXT", help="A prompt; several make a batch.")
@click.option("--prompt-ids", "prompt_ids", multiple=True, metavar="N,N,...", help="A prompt as token ids.")
@click.option("--max-new-tokens", type=click.IntRange(min=0), default=8, show_default=True)
@click.option(
    "--attn",
    type=click.Choice(IMPLEMENTATIONS),
    help="The attention the model runs on; `tracekit` is TKA-1. Default: the model's own choice.",
)
@click.option("--layers", metavar="N,A-B", help="Only these layers.")
@click.option("--force", is_flag=True, help="Write over an existing trace.")
@json_option
def command(
    output: Path,
    engine: str,
    model: str,
    prompts: tuple[str, ...],
    prompt_ids: tuple[str, ...],
    max_new_tokens: int,
    attn: str | None,
    layers: str | None,
    force: bool,
    as_json: bool,
) -> int:
    """Record MODEL on one or several prompts: the prefill and greedy decode steps.

    Recording your own loop is `with tracekit.record("run.h5", model=model): ...` in Python.
    """
    if bool(prompts) == bool(prompt_ids):
        raise UsageError(
            "give the prompts either as --prompt TEXT or as --prompt-ids N,N,...; at least one.",
            rule="U-PROMPT",
        )
    check_target(output, force=force)
    from tracekit.engines.driver import run_transformers

    with progress("record") as advance:
        summary = run_transformers(
            model=model,
            prompts=list(prompts) or [_parse_ids(text) for text in prompt_ids],
            max_new_tokens=max_new_tokens,
            attn_implementation=attn,
            layers=parse_numbers(layers, "--layers"),
            out=output,
            force=force,
            progress=advance,
        )
    size = output.stat().st_size
    if as_json:
        facts = {
            "path": str(output),
            "engine": engine,
            "steps": summary.steps,
            "calls": summary.calls,
            "bytes": size,
            "content_digest": summary.content_digest,
            "generated": summary.generated,
            "problems": summary.problems,
        }
        click.echo(json.dumps(facts, indent=2))
    else:
        click.echo(f"{output}: {summary.calls:,} calls of {summary.steps:,} steps, {size_words(size)}")
        for text in summary.text:
            click.echo(f"generated {text!r}")
        click.echo(f"next: tracekit replay {output}")
    for problem in summary.problems:
        click.echo(f"tracekit: not recorded: {problem}", err=True)
    return Exit.INCONCLUSIVE if summary.problems else Exit.OK


def _parse_ids(text: str) -> list[int]:
    try:
        ids = [int(part) for part in text.split(",")]
    except ValueError:
        ids = []
    if not ids or min(ids) < 0:
        raise UsageError(
            f"--prompt-ids takes token ids such as 12,7,99, not {text!r}.", rule="U-PROMPT-IDS", value=text
        )
    return ids
