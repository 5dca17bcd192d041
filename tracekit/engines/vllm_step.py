"""One step of vLLM's model runner: which tokens of which requests its rows are, and how it came to them."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tracekit.engines.vllm_prefixes import Holding, Prefixes, Tables
from tracekit.errors import Unsupported
from tracekit.model import Array, Mode
from tracekit.model.events import Adopt, Evict, Finish, Preempt, ResetCache
from tracekit.recorder.history import Computed
from tracekit.recorder.observation import Handle
from tracekit.recorder.session import Session


@dataclass(frozen=True, eq=False)
class Step:
    """The rows of one step, in executed order.

    Args:
        handles: the request of each place of the batch.
        request: int32 `[N]`, the place of each row.
        positions: int64 `[N]`.
        fresh: tokens that were not known before this step.
        generations: write epoch of the KV rows of each request.
        spans: what each request computes and why, in the order in which the scheduler planned it.
        mode: why the step is made.
    """

    handles: tuple[Handle, ...]
    request: npt.NDArray[np.int32]
    positions: npt.NDArray[np.int64]
    fresh: dict[Handle, list[int]]
    generations: dict[Handle, int]
    spans: dict[Handle, Computed]
    mode: Mode


class Requests:
    """vLLM's request ids and the session's handles, and what happens to their rows.

    An id is an alias while its request lives. A prefix-cache hit, a chunk and a preemption change where a
    step begins, never who the request is. Rows that are written again after a preemption have a higher
    generation; rows that are taken over keep that of their giver.

    Args:
        session: is told.
        prefixes: who holds which pages.
    """

    def __init__(self, session: Session, prefixes: Prefixes) -> None:
        self._session = session
        self._prefixes = prefixes
        self._handles: dict[str, Handle] = {}
        self._done: dict[Handle, int] = {}
        self._next: dict[Handle, int] = {}
        self._weights: dict[Handle, int] = {}
        self._generations: dict[Handle, int] = {}
        self._floor = 0

    def begin(self, scheduled: Any) -> None:
        """Take note of what the scheduler says about requests, before the step runs.

        Raises:
            Unsupported: `V-REQUEST-ID` when a new request has the id of one that has not finished.
        """
        history = self._session.history
        for name in sorted(scheduled.finished_req_ids):
            handle = self._handles.pop(name, None)
            if handle is not None and handle in self._done:
                history.tell(Finish(str(handle)))
                self._prefixes.finish(handle)
        for name in sorted(scheduled.preempted_req_ids or ()):
            handle = self._handles.get(name)
            if handle is not None and self._next.pop(handle, 0):
                history.tell(Preempt(str(handle)))
                self._generations[handle] += 1
        for new in scheduled.scheduled_new_reqs:
            if self._handles.pop(new.req_id, None) is not None:
                raise Unsupported(
                    f"two requests have the id {new.req_id!r}; their rows cannot be told apart in this step. "
                    "Give each request an id of its own.",
                    rule="V-REQUEST-ID",
                    request=new.req_id,
                )

    def reset_cache(self) -> None:
        """The cache was emptied: what was written so far is void, and new rows have a generation above it."""
        self._floor = max([self._floor, *self._generations.values()]) + 1
        self._session.history.tell(ResetCache(self._floor))

    def read(self, runner: Any, scheduled: Any) -> Step:
        """Read the step out of the buffers that the model reads.

        Raises:
            Unsupported: `V-EMBEDS`, `V-TOKENS`, `V-POSITION`.
        """
        names = list(runner.input_batch.req_ids)
        counts = [int(scheduled.num_scheduled_tokens[name]) for name in names]
        total = sum(counts)
        tokens = _host(runner.input_ids.gpu[:total])
        positions = _host(runner.positions[:total])
        handles: list[Handle] = []
        fresh: dict[Handle, list[int]] = {}
        firsts = {}
        start = 0
        for name, count in zip(names, counts, strict=True):
            mine = slice(start, start + count)
            firsts[name] = int(positions[start])
            handle = self._handle(name, runner.requests[name], firsts[name], fresh)
            _append(self._session, handle, fresh, tokens[mine], positions[mine])
            handles.append(handle)
            start += count
        spans = {
            self._handles[name]: self._compute(
                name, runner.requests[name].block_ids, firsts[name], int(count)
            )
            for name, count in scheduled.num_scheduled_tokens.items()
        }
        # One word a step: rows that were computed before make it a recompute, prompt rows a prefill.
        modes = {span.mode for span in spans.values()}
        mode = next(m for m in (Mode.RECOMPUTE, Mode.PREFILL, Mode.DECODE) if m in modes)
        request = np.repeat(np.arange(len(names), dtype=np.int32), counts)
        generations = {handle: spans[handle].cache_version for handle in handles}
        return Step(tuple(handles), request, positions, fresh, generations, spans, mode)

    def ran(self, step: Step) -> None:
        """Take note that the rows of a step were computed."""
        for handle, span in step.spans.items():
            self._done[handle] = max(self._done.get(handle, 0), span.end)
            self._next[handle] = span.end

    def _compute(self, name: str, tables: Tables, first: int, count: int) -> Computed:
        """What a request computes in this step, and where the rows before it came from."""
        handle, weights = self._handles[name], self._session.weights
        held = self._prefixes.get(handle)
        generation = max(self._generations.get(handle, 0), 0 if handle in self._next else self._floor)
        adopt = None
        if first < self._next.get(handle, 0):
            generation += 1  # no event says so: rows are written again
        if first and handle not in self._next:
            giver = self._giver(name, tables, first)
            if giver is not None:
                generation = max(generation, giver.generation)
                adopt = Adopt(str(handle), first, giver.weights, str(giver.handle))
        if self._weights.get(handle, weights) != weights and handle not in self._next:
            self._done[handle] = 0  # under other weights they are other rows
        mode = self._mode(handle, first)
        if held is None or handle not in self._next or first < held.rows:
            held = Holding(handle, [], 0, first, generation, weights)
        held.rows, held.first = first + count, first
        for gone in self._prefixes.compute(held, tables, first):
            self._session.history.tell(Evict(str(gone)))
        self._generations[handle], self._weights[handle] = generation, weights
        return Computed(first, first + count, mode, generation, adopt)

    def _giver(self, name: str, tables: Tables, at: int) -> Holding | None:
        """Who holds the prefix that a request begins with; without one the history is lost."""
        givers = list(self._prefixes.givers(tables, at))
        for giver in givers:
            if self._prefixes.keeps_window(giver, at):
                return giver
        self._session.history.lose(
            f"request {name} begins with {at} rows of the prefix cache "
            + (
                "behind the sliding window of the request that wrote them"
                if givers
                else "that no single request of the recording wrote; they were there before it, or have "
                "several writers"
            )
        )
        return None

    def _handle(self, name: str, state: Any, first: int, fresh: dict[Handle, list[int]]) -> Handle:
        if name not in self._handles:
            if state.prompt_token_ids is None:
                raise Unsupported(
                    f"request {name} has a prompt of embeddings; rows are known by their token ids.",
                    rule="V-EMBEDS",
                    request=name,
                )
            prompt = [int(token) for token in state.prompt_token_ids]
            handle = self._session.requests.open(name, prompt_length=len(prompt))
            # A recording that begins in the middle of a request takes over what it has generated.
            fresh[handle] = prompt + [int(t) for t in state.output_token_ids[: max(first - len(prompt), 0)]]
            self._handles[name] = handle
        return self._handles[name]

    def _mode(self, handle: Handle, first: int) -> Mode:
        if first < self._done.get(handle, 0):
            return Mode.RECOMPUTE
        return Mode.PREFILL if first < self._session.requests[handle].prompt_length else Mode.DECODE


def _append(
    session: Session, handle: Handle, fresh: dict[Handle, list[int]], tokens: Array, positions: Array
) -> None:
    """Check the rows of one request against its known tokens, and note the new ones."""
    if (np.diff(positions) != 1).any():
        raise Unsupported(
            f"request {handle} has rows at positions {positions[:4].tolist()}..., which are not consecutive.",
            rule="V-POSITION",
        )
    known = [*session.requests[handle].tokens, *fresh.get(handle, [])]
    for token, position in zip(tokens.tolist(), positions.tolist(), strict=True):
        if position == len(known):
            known.append(token)
            fresh.setdefault(handle, []).append(token)
        elif position > len(known) or known[position] != token:
            raise Unsupported(
                f"request {handle} runs token {token} at position {position}, where "
                f"{known[position] if position < len(known) else 'nothing'} was expected.",
                rule="V-TOKENS",
                position=position,
            )


def _host(tensor: Any) -> npt.NDArray[np.int64]:
    return np.asarray(tensor.detach().cpu().numpy(), np.int64).copy()
