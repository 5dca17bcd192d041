"""Requests while an engine runs, and their keys when it has finished."""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from tracekit.errors import InvalidCall
from tracekit.model import Array, Mode, Request, RequestKey
from tracekit.recorder.observation import Handle, IndexerObservation, Observation


@dataclass(frozen=True)
class Lost:
    """Since when a request is not followed.

    Args:
        step: where its KV was seen to have changed.
        generation: of its KV there; a higher one begins anew.
        sound: its tokens before that step, which its KV was made of.
    """

    step: int
    generation: int
    sound: int


@dataclass
class OpenRequest:
    """One request: its tokens so far, where its prompt ends, and whether its cache still holds its tokens.

    Args:
        alias: the engine's name for it.
        tokens: as far as they were seen.
        prompt_length: how many of them are prompt; found out on the way where the engine does not say.
        told: whether the engine said it.
        decoding: whether a single token has followed the prompt.
        lost: since when its KV is not that of its tokens; None while it is.
    """

    alias: str
    tokens: list[int] = field(default_factory=list)
    prompt_length: int = 0
    told: bool = False
    decoding: bool = False
    lost: Lost | None = None

    def lose(self, step: int, generation: int = 0) -> None:
        """Its KV is not that of its tokens from a step on, whose tokens are not added yet."""
        if self.lost is None:
            self.lost = Lost(step, generation, len(self.tokens))

    def extend(self, tokens: Array) -> Mode:
        """Append the tokens of a step and say what the step is for this request.

        Where the engine does not say how long the prompt is, it is the first step and every following step
        of more than one token (chunked prefill); from the first single token on, the request decodes.
        """
        if self.told:
            mode = Mode.PREFILL if len(self.tokens) < self.prompt_length else Mode.DECODE
            self.tokens.extend(int(token) for token in tokens)
            return mode
        if self.tokens and len(tokens) == 1:
            self.decoding = True
        self.tokens.extend(int(token) for token in tokens)
        if self.decoding:
            return Mode.DECODE
        self.prompt_length = len(self.tokens)
        return Mode.PREFILL


class RequestTable:
    """Every request of a recording, by handle."""

    def __init__(self) -> None:
        self._requests: list[OpenRequest] = []
        self._keys: list[RequestKey] = []

    def open(self, alias: str = "", prompt_length: int | None = None) -> Handle:
        """Begin a request and return its handle.

        Args:
            alias: the engine's name for it.
            prompt_length: tokens of its prompt, where the engine says so.
        """
        told = prompt_length is not None
        self._requests.append(OpenRequest(alias, prompt_length=prompt_length or 0, told=told))
        return len(self._requests) - 1

    def __getitem__(self, handle: Handle) -> OpenRequest:
        return self._requests[handle]

    def tokens(self, handle: Handle, positions: Array) -> npt.NDArray[np.int64]:
        """Return the token ids at some positions of a request.

        Raises:
            InvalidCall: `R-POSITION` when a position has no token yet.
        """
        known = self._requests[handle].tokens
        if positions.size and int(positions.max()) >= len(known):
            raise InvalidCall(
                f"request {handle} has {len(known)} tokens; a row at position {int(positions.max())} has "
                "none. Give the step its tokens before its calls.",
                rule="R-POSITION",
            )
        return np.array([known[position] for position in positions.tolist()], np.int64)

    def tokens_of(self, seen: Observation | IndexerObservation) -> npt.NDArray[np.int64]:
        """Return the token id of each row of a launch.

        Raises:
            InvalidCall: `R-POSITION`.
        """
        token_ids = np.full(seen.positions.shape, -1, np.int64)
        for index, handle in enumerate(seen.requests):
            mine = seen.request == index
            token_ids[mine] = self.tokens(handle, seen.positions[mine])
        return token_ids

    def resolve(self) -> tuple[Request, ...]:
        """Give every request its key: the digest of its prompt and an ordinal among equal prompts."""
        seen: dict[str, int] = {}
        resolved = []
        for open_request in self._requests:
            sound = None if open_request.lost is None else open_request.lost.sound
            tokens = np.array(open_request.tokens[:sound], np.int64)
            prompt_length = min(open_request.prompt_length, tokens.size)
            digest = RequestKey.of_prompt(tokens[:prompt_length]).digest
            key = RequestKey(digest, seen.get(digest, 0))
            seen[digest] = key.ordinal + 1
            self._keys.append(key)
            resolved.append(Request(key, tokens, prompt_length, open_request.alias))
        return tuple(resolved)

    def key(self, handle: Handle) -> RequestKey:
        """Return the key of a request; only after `resolve`."""
        return self._keys[handle]
