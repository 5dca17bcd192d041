"""One step of vLLM's model runner: which tokens of which requests its rows are."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tracekit.errors import Unsupported
from tracekit.model import Array, Mode
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
        mode: why the step is made.
    """

    handles: tuple[Handle, ...]
    request: npt.NDArray[np.int32]
    positions: npt.NDArray[np.int64]
    fresh: dict[Handle, list[int]]
    mode: Mode


class Requests:
    """vLLM's request ids and the session's handles.

    An id is an alias while its request lives. A prefix-cache hit, a chunk and a preemption change where a
    step begins, never who the request is.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._handles: dict[str, Handle] = {}
        self._done: dict[Handle, int] = {}

    def begin(self, scheduled: Any) -> None:
        """Take note of what the scheduler says about requests, before the step runs.

        Raises:
            Unsupported: `V-REQUEST-ID` when a new request has the id of one that has not finished.
        """
        for name in scheduled.finished_req_ids:
            self._handles.pop(name, None)
        for new in scheduled.scheduled_new_reqs:
            if self._handles.pop(new.req_id, None) is not None:
                raise Unsupported(
                    f"two requests have the id {new.req_id!r}; their rows cannot be told apart in this step. "
                    "Give each request an id of its own.",
                    rule="V-REQUEST-ID",
                    request=new.req_id,
                )

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
        modes = set()
        start = 0
        for name, count in zip(names, counts, strict=True):
            mine = slice(start, start + count)
            first = int(positions[start])
            handle = self._handle(name, runner.requests[name], first, fresh)
            _append(self._session, handle, fresh, tokens[mine], positions[mine])
            modes.add(self._mode(handle, first))
            handles.append(handle)
            start += count
        # One word a step: rows that were computed before make it a recompute, prompt rows a prefill.
        mode = next(m for m in (Mode.RECOMPUTE, Mode.PREFILL, Mode.DECODE) if m in modes)
        request = np.repeat(np.arange(len(names), dtype=np.int32), counts)
        return Step(tuple(handles), request, positions, fresh, mode)

    def ran(self, step: Step) -> None:
        """Take note that the rows of a step were computed."""
        for place, handle in enumerate(step.handles):
            last = int(step.positions[step.request == place].max())
            self._done[handle] = max(self._done.get(handle, 0), last + 1)

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
