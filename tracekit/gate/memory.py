"""Where rows lie and how they are scaled: pages with one owner, blocks with one generation."""

from dataclasses import dataclass
from typing import NoReturn

from tracekit.gate.refusal import refuse
from tracekit.gate.state import Phase, RequestState, Stream, StreamKey
from tracekit.model.events import Pages, Read, Scales, Span


@dataclass(frozen=True, slots=True)
class Memory:
    """The requests of a ledger while a launch moves them.

    Args:
        requests: by name; changed in place, as nothing else sees it before the launch is legal.
        layer: of the launch.
        scale_generation: the scales in force.
    """

    requests: dict[str, RequestState]
    layer: int
    scale_generation: int

    def refuse(self, code: str, span: Span, read: Read, row: int, problem: str) -> NoReturn:
        """Refuse a launch because of KV row `row` of a family."""
        refuse(
            code,
            problem,
            request=span.request,
            layer=self.layer,
            family=read.family.value,
            position=row * read.family.ratio,
        )


def place_rows(memory: Memory, span: Span, read: Read, old: Stream | None) -> int:
    """Check scales and pages of a stream.

    Args:
        memory: the other requests; those whose cached pages are taken are changed.
        span: the rows of the request.
        read: the stream as the launch sees it.
        old: the stream before; None where it has no rows.

    Returns:
        The rows that may still lie on pages of others.

    Raises:
        GateRefused: `G-SCALE...`, `G-SLOT...`.
    """
    before, rows = span.first // read.family.ratio, span.end // read.family.ratio
    if old is None or not before:
        old, before = None, 0
    _check_scales(memory, span, read, old, before, rows)
    return _check_pages(memory, span, read, old, before, rows)


def blocks(rows: int, size: int) -> int:
    """How many blocks of some size hold so many rows."""
    return -(-rows // size)


def cut(stream: Stream, rows: int) -> tuple[Scales | None, Pages | None, int]:
    """Scales, pages and shared rows of a stream that keeps only its first rows."""
    scales, pages = stream.scales, stream.pages
    if scales is not None:
        scales = Scales(scales.rows, scales.generations[: blocks(rows, scales.rows)])
    if pages is not None:
        pages = Pages(pages.rows, pages.table[: blocks(rows, pages.rows)])
    return scales, pages, min(stream.shared, rows)


def _check_scales(memory: Memory, span: Span, read: Read, old: Stream | None, before: int, rows: int) -> None:
    scales = read.scales
    if old is not None and (old.scales is None) != (scales is None):
        memory.refuse(
            "G-SCALE-MISSING", span, read, before, "its rows had scales before or have them now, not both"
        )
    if scales is None:
        return
    size, generations = scales
    if size < 1 or len(generations) != blocks(rows, size) or (old and old.scales and old.scales.rows != size):
        text = f"{rows} rows and scales of {len(generations)} blocks of {size}"
        memory.refuse("G-SCALE-MISSING", span, read, before, text)
    held = old.scales.generations[: blocks(before, size)] if old is not None and old.scales else ()
    for number, (written, found) in enumerate(zip(held, generations, strict=False)):
        if written != found:
            text = f"block {number} was written with scales {written} and is read with {found}"
            memory.refuse("G-SCALE", span, read, number * size, text)
    # New rows fill up a block that has a scale already; one scale stands for all rows of a block.
    for number in range(before // size, blocks(rows, size) if rows > before else 0):
        if generations[number] != memory.scale_generation:
            new, force = generations[number], memory.scale_generation
            text = f"block {number} is written with scales {new} while {force} are in force"
            memory.refuse("G-SCALE-STALE", span, read, number * size, text)


def _check_pages(memory: Memory, span: Span, read: Read, old: Stream | None, before: int, rows: int) -> int:
    """Return the rows that may still be shared."""
    pages = read.pages
    if old is not None and (old.pages is None) != (pages is None):
        text = "its rows had pages before or have them now, not both"
        memory.refuse("G-SLOT-MISSING", span, read, before, text)
    if pages is None:
        return 0
    size, table = pages
    if size < 1 or len(table) < blocks(rows, size) or (old and old.pages and old.pages.rows != size):
        text = f"{rows} rows on {len(table)} pages of {size}"
        memory.refuse("G-SLOT-MISSING", span, read, before, text)
    start, taken, shared = read.first // size, 0, 0
    if old is not None:
        taken, shared = _check_held(memory, span, read, old, before, rows)
    used = table[start : blocks(rows, size)]
    if len(set(used)) != len(used):
        twice = next(page for at, page in enumerate(used) if page in used[:at])
        memory.refuse("G-SLOT-REUSED", span, read, before, f"two places lie on page {twice}")
    for number in range(taken, blocks(rows, size)):
        _take(memory, span, read, max(before, number * size), table[number])
    return shared


def _check_held(
    memory: Memory, span: Span, read: Read, old: Stream, before: int, rows: int
) -> tuple[int, int]:
    """Rows stay where they are; return the first page that is new to the request, and its shared rows."""
    assert old.pages is not None
    assert read.pages is not None
    size, table = read.pages
    held, shared, full = old.pages.table, old.shared, before // size
    for number in range(read.first // size, blocks(before, size)):
        if table[number] == held[number]:
            continue
        copied = number == full and rows > before and number * size < shared
        if not (copied and _reader(memory, span, read, held[number])):
            text = f"it was on page {held[number]} and is on {table[number]}"
            memory.refuse("G-SLOT-MOVED", span, read, number * size, text)
        return full, full * size  # the half-full page was shared, and is copied before it is written
    if before % size and rows > before and full * size < shared:
        reader = _reader(memory, span, read, table[full])
        if reader is not None:
            text = f"it is written on page {table[full]}, which request {reader} reads too"
            memory.refuse("G-SLOT-SHARED", span, read, before, text)
        _uncache(memory, read, table[full], before % size)
    return blocks(before, size), shared


def _live(request: RequestState, key: StreamKey, rows: int) -> tuple[int, ...]:
    """The pages of a request that hold rows before `rows` of a stream."""
    stream = request.streams.get(key)
    if stream is None or stream.pages is None:
        return ()
    size, table = stream.pages
    return table[stream.first // size : blocks(rows, size)]


def _reader(memory: Memory, span: Span, read: Read, page: int) -> str | None:
    """The other request whose live rows lie on a page."""
    key = memory.layer, read.family
    for name, other in memory.requests.items():
        if name != span.request and other.phase is Phase.ACTIVE:
            held = other.ahead if key in other.done else other.length
            if page in _live(other, key, held // read.family.ratio):
                return name
    return None


def _take(memory: Memory, span: Span, read: Read, row: int, page: int) -> None:
    """Give a page to a request: no live rows are on it."""
    reader = _reader(memory, span, read, page)
    if reader is not None:
        text = f"it is written on page {page}, which holds rows of request {reader}"
        memory.refuse("G-SLOT-REUSED", span, read, row, text)
    _uncache(memory, read, page, 0)


def _uncache(memory: Memory, read: Read, page: int, offset: int) -> None:
    """A page is written from a row on: nobody may adopt what was there, or came behind it."""
    key, ratio = (memory.layer, read.family), read.family.ratio
    for name, other in list(memory.requests.items()):
        if not other.cached or other.phase is Phase.ACTIVE:
            continue
        kept = _live(other, key, other.cached // ratio)
        if page in kept:
            stream = other.streams[key]
            assert stream.pages is not None
            size = stream.pages.rows
            last = ((stream.first // size + kept.index(page)) * size + offset) * ratio
            memory.requests[name] = other._replace(cached=min(other.cached, last))
