"""`tracekit record`: a command with all its processes, or the built-in driver on a prompt."""

import json
import os
from pathlib import Path
from typing import Any

import click

from tracekit.cli.options import Verb, json_option, parse_numbers, size_words
from tracekit.cli.progress import progress
from tracekit.env import check_budget, parse_settings
from tracekit.errors import UsageError
from tracekit.store.target import check_target
from tracekit.verdict import Exit

IMPLEMENTATIONS = ("sdpa", "eager", "tracekit")
STARTUP = Path(__file__).parents[1] / "engines" / "startup"


@click.command("record", cls=Verb, context_settings={"allow_interspersed_args": False})
@click.argument("command", nargs=-1, metavar="[-- CMD ARGS...]")
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True, help="The trace to write.")
@click.option(
    "--engine",
    type=click.Choice(["transformers", "vllm", "megatron"]),
    help="Record this engine only. Default: any.",
)
@click.option("--layers", metavar="N,A-B", help="Only these layers.")
@click.option("--steps", metavar="N,A-B", help="Only these steps of an engine.")
@click.option("--rows", metavar="N,A-B", help="Only query rows at these positions; the KV they read stays.")
@click.option(
    "--include",
    multiple=True,
    metavar="GLOB",
    help="Only rows whose layer's module (model.layers.3.*) or request matches a glob; may be repeated.",
)
@click.option("--exclude", multiple=True, metavar="GLOB", help="No rows that match a glob; may be repeated.")
@click.option(
    "--max-size-gb",
    type=float,
    metavar="G",
    help="Stop recording a process after 10^9 * G bytes of rows. CMD goes on.",
)
@click.option(
    "--model",
    metavar="DIR_OR_ID",
    help="Without CMD: a model folder, a hub id, smollm2, or tiny-qwen3, tiny-gpt-oss, tiny-deepseek-v4 and "
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
@click.option("--force", is_flag=True, help="Write over an existing trace.")
@json_option
def command(
    command: tuple[str, ...],
    output: Path,
    engine: str | None,
    layers: str | None,
    steps: str | None,
    rows: str | None,
    include: tuple[str, ...],
    exclude: tuple[str, ...],
    max_size_gb: float | None,
    model: str | None,
    prompts: tuple[str, ...],
    prompt_ids: tuple[str, ...],
    max_new_tokens: int,
    attn: str | None,
    force: bool,
    as_json: bool,
) -> int:
    """Record what the attention of a program, or of a model on a prompt, reads and answers.

    `tracekit record -o run.h5 -- python serve.py` runs a command. Each of its processes that runs a model of
    an engine writes a trace when it ends, and they are merged: heads of tensor-parallel ranks together,
    data-parallel ranks side by side. The exit code is that of CMD; 3 where CMD's is 0 and something of it
    was not recorded.

    `tracekit record -o run.h5 --model smollm2 --prompt TEXT` runs the prefill and greedy decode steps of a
    model. Recording your own loop is `with tracekit.record("run.h5", model=model): ...` in Python.
    """
    numbers = {
        name: parse_numbers(text, f"--{name}")
        for name, text in {"layers": layers, "steps": steps, "rows": rows}.items()
    }
    if max_size_gb is not None:
        check_budget(max_size_gb, "--max-size-gb")
    if bool(command) == bool(model):
        raise UsageError(
            "give what to record: a command behind --, or --model with prompts; one of them.", rule="U-RECORD"
        )
    if not command:
        if bool(prompts) == bool(prompt_ids):
            raise UsageError(
                "give the prompts either as --prompt TEXT or as --prompt-ids N,N,...; at least one.",
                rule="U-PROMPT",
            )
        if engine not in (None, "transformers"):
            raise UsageError(f"--model runs in transformers, not in {engine}.", rule="U-ENGINE")
        check_target(output, force=force)
        filters: dict[str, Any] = {
            **numbers, "include": include, "exclude": exclude, "max_size_gb": max_size_gb,
        }  # fmt: skip
        texts: list[Any] = [*prompts, *(_parse_ids(text) for text in prompt_ids)]
        return _record_model(output, str(model), texts, max_new_tokens, attn, filters, force, as_json)
    if prompts or prompt_ids or attn:
        raise UsageError("--prompt, --prompt-ids and --attn belong to --model, not to CMD.", rule="U-RECORD")
    check_target(output, force=force)
    environ = _environment(
        {
            "ENGINE": engine,
            "LAYERS": layers,
            "STEPS": steps,
            "ROWS": rows,
            "INCLUDE": _joined(include, "--include"),
            "EXCLUDE": _joined(exclude, "--exclude"),
            "MAX_SIZE_GB": None if max_size_gb is None else repr(max_size_gb),
        }
    )
    # A setting that is wrong would be told by every process, and recorded by none.
    parse_settings(environ)
    return _record_command(command, output, environ, as_json)


def _record_command(command: tuple[str, ...], output: Path, environ: dict[str, str], as_json: bool) -> int:
    from tracekit.recorder.job import run_job

    with progress("merge", started=False) as advance:
        outcome = run_job(command, output, environ, STARTUP, advance)
    summary = outcome.summary
    code = outcome.code or (Exit.INCONCLUSIVE if outcome.problems else Exit.OK)
    if as_json:
        facts = {
            "path": str(output) if summary else None,
            "command": list(command),
            "command_exit_code": outcome.code,
            "exit_code": int(code),
            "processes": outcome.traces,
            "calls": summary.calls if summary else 0,
            "requests": summary.requests if summary else 0,
            "steps": summary.steps if summary else 0,
            "bytes": summary.size if summary else 0,
            "content_digest": summary.content_digest if summary else None,
            "problems": list(outcome.problems),
            "kept": str(outcome.kept) if outcome.kept else None,
        }
        click.echo(json.dumps(facts, indent=2))
    elif summary:
        click.echo(
            f"{output}: {summary.calls:,} calls of {summary.steps:,} steps of {outcome.traces} "
            f"process{'' if outcome.traces == 1 else 'es'}, {size_words(summary.size)}",
            err=True,
        )
    for problem in outcome.problems:
        click.echo(f"tracekit: {problem}", err=True)
    if outcome.kept:
        click.echo(f"tracekit: what could not be used stays in {outcome.kept}", err=True)
    return int(code)


def _environment(settings: dict[str, str | None]) -> dict[str, str]:
    """The environment of the command; what was set outside is no filter of this recording."""
    own = {f"TRACEKIT_{name}": value for name, value in settings.items()}
    rest = {name: value for name, value in os.environ.items() if name not in own}
    return rest | {name: value for name, value in own.items() if value is not None}


def _joined(globs: tuple[str, ...], option: str) -> str | None:
    if any("," in glob for glob in globs):
        raise UsageError(f"{option} takes one glob without a comma; repeat it for several.", rule="U-GLOB")
    return ",".join(globs) or None


def _record_model(
    output: Path,
    model: str,
    prompts: list[Any],
    max_new_tokens: int,
    attn: str | None,
    filters: dict[str, Any],
    force: bool,
    as_json: bool,
) -> int:
    from tracekit.engines.driver import run_transformers

    with progress("record") as advance:
        summary = run_transformers(
            model=model,
            prompts=prompts,
            max_new_tokens=max_new_tokens,
            attn_implementation=attn,
            out=output,
            force=force,
            progress=advance,
            **filters,
        )
    size = output.stat().st_size
    if as_json:
        facts = {
            "path": str(output),
            "engine": "transformers",
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
