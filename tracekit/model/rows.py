"""Who a row is: `(request key, position)`. The place in a batch is never identity."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Self

import numpy as np
import numpy.typing as npt

from tracekit.errors import InvalidCall
from tracekit.model.bits import Array

DIGEST_LENGTH = 16
UNKNOWN_TOKEN = -1


@dataclass(frozen=True, order=True)
class RequestKey:
    """A request, named by its content.

    Args:
        digest: the first 16 hexadecimal digits of the SHA-256 of the prompt's token ids.
        ordinal: 0, 1, ... among requests with the same prompt, in order of first appearance.
    """

    digest: str
    ordinal: int = 0

    def __post_init__(self) -> None:
        if (
            len(self.digest) != DIGEST_LENGTH
            or set(self.digest) - set("0123456789abcdef")
            or self.ordinal < 0
        ):
            raise InvalidCall(
                f"a request key is {DIGEST_LENGTH} hexadecimal digits and an ordinal from 0, "
                f"not {self.digest!r} and {self.ordinal}.",
                rule="M-REQUEST-KEY",
            )

    def __str__(self) -> str:
        return f"{self.digest}-{self.ordinal}"

    @classmethod
    def of_prompt(cls, token_ids: Sequence[int] | Array, ordinal: int = 0) -> Self:
        """Return the key of a prompt: SHA-256 over its token ids as little-endian int64."""
        tokens = np.ascontiguousarray(token_ids, "<i8")
        return cls(hashlib.sha256(tokens.tobytes()).hexdigest()[:DIGEST_LENGTH], ordinal)

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse `str(key)`.

        Raises:
            InvalidCall: `M-REQUEST-KEY` when the text is no key.
        """
        digest, _, ordinal = text.rpartition("-")
        return cls(digest, int(ordinal) if ordinal.isdecimal() else -1)


@dataclass(frozen=True, order=True)
class RowId:
    """One query row: the request and the 0-based absolute token position in it."""

    request: RequestKey
    position: int


@dataclass(frozen=True, eq=False)
class Rows:
    """The query rows of one launch, in executed order.

    Args:
        requests: the requests of the launch, each once, in executed order.
        request: int32 `[T]`, the index into `requests` of each row.
        positions: int64 `[T]`, 0-based absolute token positions.
        token_ids: int64 `[T]`, the token of each row; -1 where it is not known.

    Raises:
        InvalidCall: `M-ROWS-SHAPE`, `M-ROWS-REQUEST`, `M-ROWS-POSITION`, `M-ROWS-DUPLICATE`.
    """

    requests: tuple[RequestKey, ...]
    request: npt.NDArray[np.int32]
    positions: npt.NDArray[np.int64]
    token_ids: npt.NDArray[np.int64]

    def __post_init__(self) -> None:
        for name, dtype in (("request", np.int32), ("positions", np.int64), ("token_ids", np.int64)):
            array = np.array(getattr(self, name), dtype, copy=True)
            array.flags.writeable = False
            object.__setattr__(self, name, array)
        if not self.request.shape == self.positions.shape == self.token_ids.shape or self.request.ndim != 1:
            raise InvalidCall(
                f"request, positions and token_ids are [T] each, not {self.request.shape}, "
                f"{self.positions.shape} and {self.token_ids.shape}.",
                rule="M-ROWS-SHAPE",
            )
        if len(set(self.requests)) != len(self.requests):
            raise InvalidCall("each request of a launch is listed once.", rule="M-ROWS-REQUEST")
        if self.count and not 0 <= self.request.min() <= self.request.max() < len(self.requests):
            raise InvalidCall(
                f"a row points at request {int(self.request.max())} of {len(self.requests)}.",
                rule="M-ROWS-REQUEST",
            )
        if self.count and self.positions.min() < 0:
            raise InvalidCall(f"position {int(self.positions.min())} is below 0.", rule="M-ROWS-POSITION")
        order = np.lexsort((self.positions, self.request))
        request, positions = self.request[order], self.positions[order]
        if ((request[1:] == request[:-1]) & (positions[1:] == positions[:-1])).any():
            raise InvalidCall(
                "one request has the same position twice in one launch; a row is (request, position).",
                rule="M-ROWS-DUPLICATE",
            )

    @property
    def count(self) -> int:
        """T, the number of rows."""
        return int(self.request.size)

    @cached_property
    def ids(self) -> tuple[RowId, ...]:
        """The identity of each row, in executed order."""
        pairs = zip(self.request.tolist(), self.positions.tolist(), strict=True)
        return tuple(RowId(self.requests[r], p) for r, p in pairs)

    def take(self, order: Array) -> "Rows":
        """Return some rows in another order; requests that lose all rows are dropped.

        Requests keep their order of first appearance in the new order.
        """
        request = self.request[order]
        kept, first = np.unique(request, return_index=True)
        kept = kept[np.argsort(first)]
        renumber = np.full(len(self.requests), -1, np.int32)
        renumber[kept] = np.arange(kept.size, dtype=np.int32)
        return Rows(
            tuple(self.requests[i] for i in kept),
            renumber[request],
            self.positions[order],
            self.token_ids[order],
        )
