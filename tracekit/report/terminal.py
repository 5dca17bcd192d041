"""The report on a terminal: a word and a colour for each verdict, never a colour alone."""

from collections.abc import Mapping, Sequence
from itertools import groupby

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from tracekit.report.words import summary, verdict_lines
from tracekit.verdict import Status, Verdict

STYLES = {
    Status.HELD: "green",
    Status.BOUNDED: "green",
    Status.REFUTED: "bold red",
    Status.INCONCLUSIVE: "yellow",
    Status.OBSERVED_VARIES: "magenta",
    Status.OBSERVED_SAME: "cyan",
    Status.NOT_APPLICABLE: "dim",
    Status.NOT_RUN: "dim",
}


def render(verdicts: Sequence[Verdict], code: int) -> RenderableType:
    """Return the report of some verdicts, grouped by trace and provider, with its closing line."""
    blocks: list[RenderableType] = []
    for (trace, provider), group in groupby(verdicts, key=lambda verdict: (verdict.trace, verdict.provider)):
        members = list(group)
        executed = next((verdict.executed for verdict in members if verdict.executed), {})
        blocks.append(Text(" · ".join([trace, provider, *_ran(executed)]), style="bold"))
        blocks.append(_table(members))
    blocks.append(Text(summary(verdicts, code)))
    return Group(*blocks)


def _ran(executed: Mapping[str, str]) -> list[str]:
    """What really ran, in reading order: the kernel, its libraries by name, where."""
    plain = [executed[name] for name in ("device", "arch", "isa") if executed.get(name)]
    libraries = [
        f"{name} {version}"
        for name, version in executed.items()
        if name not in ("kernel", "device", "arch", "isa")
    ]
    return [name for name in (executed.get("kernel"), *libraries, " ".join(plain)) if name]


def _table(verdicts: Sequence[Verdict]) -> Table:
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for verdict in verdicts:
        status = Text(_shown(verdict.status), style=STYLES[verdict.status])
        table.add_row("", verdict.claim, status, Text("\n".join(verdict_lines(verdict))))
    return table


def _shown(status: Status) -> str:
    return "REFUTED" if status is Status.REFUTED else status.value


def console(*, stderr: bool = False) -> Console:
    """Return a console that honours NO_COLOR and FORCE_COLOR and does not guess a narrow width in a pipe."""
    out = Console(stderr=stderr, highlight=False, soft_wrap=False)
    if not out.is_terminal:
        out = Console(stderr=stderr, highlight=False, width=160)
    return out
