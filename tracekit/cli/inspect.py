"""`tracekit inspect TRACE`: what a trace holds, without decoding its tensors."""

import json
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
from rich.console import Group
from rich.table import Table
from rich.text import Text

from tracekit.cli.options import Verb, json_option, size_words
from tracekit.model import Tag
from tracekit.model.history import Unproven
from tracekit.report.terminal import console
from tracekit.store import Trace, open_trace

_COUNTS = ("expected", "fired", "recorded", "filtered", "wanted", "written", "left_out")


@click.command("inspect", cls=Verb)
@click.argument("trace", type=click.Path(path_type=Path))
@click.option("--calls", "show_calls", is_flag=True, help="List every call (--json always does).")
@json_option
def command(trace: Path, show_calls: bool, as_json: bool) -> int:
    """Show model, requests, calls, capture ledger and digests of TRACE."""
    with open_trace(trace) as opened:
        if as_json:
            click.echo(json.dumps(facts(opened), indent=2))
        else:
            console().print(describe(opened, show_calls))
    return 0


def facts(trace: Trace) -> dict[str, Any]:
    """Return everything that `--json` prints."""
    recording = trace.recording
    return {
        "path": str(trace.path),
        "bytes": trace.path.stat().st_size,
        "content_digest": trace.content_digest,
        "file_digest": trace.file_digest,
        "model": {
            name: getattr(recording.identity, name) for name in recording.identity.__dataclass_fields__
        },
        "notes": dict(recording.notes),
        "share": None if recording.share is None else asdict(recording.share),
        "requests": [
            {
                "key": str(request.key),
                "alias": request.alias,
                "tokens": int(request.token_ids.size),
                "prompt": request.prompt_length,
            }
            for request in recording.requests
        ],
        "calls": [
            {
                "index": head.index,
                "layer": head.layer,
                "step": head.step,
                "mode": head.mode.value,
                "rows": head.num_rows,
                "heads": head.num_heads,
                "kv_heads": head.num_kv_heads,
                "head_dim": head.head_dim,
                "dtype": head.dtype.value,
                "kernel": head.kernel,
                "kv_source": head.kv_source.value,
                "sink": head.has_sink,
                "out": head.out.value if head.out else None,
                "lse": head.lse.value if head.lse else None,
                "launch_plan": head.has_launch_plan,
            }
            for head in trace.heads
        ],
        "indexer_calls": [
            {
                "index": head.index,
                "layer": head.layer,
                "step": head.step,
                "rows": head.num_rows,
                "heads": head.num_heads,
                "head_dim": head.head_dim,
                "k": head.k,
                "family": head.family.value,
                "kernel": head.kernel,
                "scores": head.has_scores,
            }
            for head in trace.indexer_heads
        ],
        "history": None if recording.history is None else len(recording.history),
        "unproven": [entry.reason for entry in recording.history or () if isinstance(entry, Unproven)],
        "ledger": [
            {name: getattr(record, name) for name in record.__dataclass_fields__}
            for record in recording.ledger
        ],
    }


def describe(trace: Trace, show_calls: bool) -> Group:
    """Return the text for a terminal."""
    told = facts(trace)
    lines = [
        Text(f"{trace.path.name} · {size_words(told['bytes'])}", style="bold"),
        Text(f"model     {told['model']['model'] or 'unknown'} ({told['model']['architecture'] or '?'})"),
        Text(f"content   {trace.content_digest}"),
    ]
    if trace.recording.share is not None:
        lines.append(Text(f"part      {trace.recording.share}"))
    for request in told["requests"]:
        alias = f" ({request['alias']})" if request["alias"] else ""
        lines.append(
            Text(
                f"request   {request['key']}{alias}: {request['prompt']} prompt tokens of {request['tokens']}"
            )
        )
    notes = ", ".join(f"{name} {value}" for name, value in told["notes"].items())
    if notes:
        lines.append(Text(f"notes     {notes}"))
    tables = [_calls(told["calls"]) if show_calls else _shapes(told["calls"])]
    if told["indexer_calls"]:
        tables.append(_indexers(told["indexer_calls"], show_calls))
    return Group(*lines, *tables, _ledger(told["ledger"]), Text(_history(told["history"], told["unproven"])))


def _history(entries: int | None, unproven: list[str]) -> str:
    if entries is None:
        return "history   none was recorded: nobody knows whether it was legal"
    if unproven:
        return f"history   nobody knows whether it was legal: {unproven[0]}"
    return f"history   {entries} entries; `tracekit verify --history` proves them"


def _shapes(calls: list[dict[str, Any]]) -> Table:
    """One line a kind of call: how many, in which layers and steps."""
    kinds = Counter(
        (
            c["kernel"],
            c["mode"],
            c["heads"],
            c["kv_heads"],
            c["head_dim"],
            c["dtype"],
            c["kv_source"],
            c["sink"],
            c["out"],
            c["lse"],
        )
        for c in calls
    )
    table = Table(
        "kernel", "mode", "calls", "heads", "D", "dtype", "KV", "sink", "O", "LSE", box=None, pad_edge=False
    )
    for (kernel, mode, heads, kv_heads, dim, dtype, source, sink, out, lse), count in kinds.items():
        table.add_row(
            kernel, mode, f"{count:,}", f"{heads}/{kv_heads}", str(dim), dtype, source,
            "yes" if sink else "no", out or "none", lse or "none",
        )  # fmt: skip
    return table


def _calls(calls: list[dict[str, Any]]) -> Table:
    table = Table(
        "call", "layer", "step", "mode", "rows", "kernel", "KV", "O", "LSE", box=None, pad_edge=False
    )
    names = ("index", "layer", "step", "mode", "rows", "kernel", "kv_source", "out", "lse")
    for call in calls:
        table.add_row(*(str(call[name]) for name in names))
    return table


def _indexers(calls: list[dict[str, Any]], show_calls: bool) -> Table:
    """One line a kind of indexer call, or one a call."""
    if show_calls:
        table = Table("indexer call", "layer", "step", "rows", "k", "kernel", box=None, pad_edge=False)
        for call in calls:
            table.add_row(*(str(call[name]) for name in ("index", "layer", "step", "rows", "k", "kernel")))
        return table
    kinds = Counter((c["kernel"], c["family"], c["k"], c["heads"], c["head_dim"], c["scores"]) for c in calls)
    table = Table("indexer", "rows of", "k", "calls", "heads", "D", "scores", box=None, pad_edge=False)
    for (kernel, family, k, heads, dim, scores), count in kinds.items():
        table.add_row(
            kernel, family, str(k), f"{count:,}", str(heads), str(dim), "yes" if scores else "no"
        )  # fmt: skip
    return table


def _ledger(ledger: list[dict[str, Any]]) -> Text:
    """What was captured of how many steps, what else the engine ran, and what is cut."""
    steps = [line for line in ledger if line["tag"] == Tag.NORMAL]
    total = {name: sum(line[name] for line in steps) for name in _COUNTS}
    text = [
        f"ledger    {len(steps)} steps: {total['expected']} hooks expected, {total['fired']} fired, "
        f"{total['recorded']} recorded, {total['filtered']} filtered"
    ]
    if total["wanted"]:
        left = f", {total['left_out']:,} query rows left out" if total["left_out"] else ""
        text.append(
            f"          {size_words(total['written'])} captured of {size_words(total['wanted'])} wanted{left}"
        )
    for tag, count in Counter(line["tag"] for line in ledger if line["tag"] != Tag.NORMAL).items():
        fired = sum(line["fired"] for line in ledger if line["tag"] == tag)
        text.append(f"          {count} {tag} runs, {fired} hooks fired in them, none recorded")
    text += [f"          cut at step {line['step']}: {line['cut']}" for line in steps if line["cut"]]
    return Text("\n".join(text))
