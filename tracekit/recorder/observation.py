"""What an engine's hook reports of one launch. Everything in it is borrowed; the session owns copies."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tracekit.errors import InvalidCall
from tracekit.model import (
    Array,
    Bits,
    Conventions,
    DType,
    KVFamily,
    KVRows,
    LaunchPlan,
    Lists,
    Output,
    Provenance,
    Selection,
)
from tracekit.recorder.strip import Strip

Handle = int
"""A request as the session knows it while the engine runs; its key is known at the end only."""


class Borrowed(NamedTuple):
    """Bit patterns that belong to an engine: unsigned integers of any strides, never copied on the way in."""

    data: Array
    dtype: DType


class SeenKV(NamedTuple):
    """KV rows `first .. first + N - 1` of one request and family, as they lie in the engine's cache.

    Args:
        keys: `[Hkv, N, D]`.
        values: `[Hkv, N, Dv]`, or None where keys and values are one tensor.
        first: logical index of row 0.
        generation: write epoch, where the engine counts one.
    """

    keys: Borrowed
    values: Borrowed | None
    first: int = 0
    generation: int = 0

    @property
    def strips(self) -> tuple[Strip, ...]:
        """How the keys lie, and the values where they are apart."""
        parts = [self.keys] if self.values is None else [self.keys, self.values]
        return tuple(Strip.of(part.data, part.dtype) for part in parts)

    @property
    def end(self) -> int:
        """The logical index after the last row."""
        return self.first + int(self.keys.data.shape[1])


class ReadKV(NamedTuple):
    """KV rows as `SeenKV`, told by their addresses.

    Args:
        strips: keys, and values where they are apart.
        first: logical index of row 0.
        generation: write epoch, where the engine counts one.
    """

    strips: tuple[Strip, ...]
    first: int = 0
    generation: int = 0

    @property
    def end(self) -> int:
        """The logical index after the last row."""
        return self.first + self.strips[0].rows


@dataclass(eq=False)
class LateGradients:
    """Gradients of one launch: an engine's hooks fill them in when its backward runs, long after the launch.

    Fields as those of `model.Gradients`, by handle, None until they came. Where `d_out` never comes, the call
    has no gradients.

    Args:
        expected: whether somebody waits for them; a model in evaluation mode may run without a backward.
        lost: why some that should be there are not.
    """

    expected: bool = True
    d_out: Bits | None = None
    d_q: Bits | None = None
    d_kv: dict[Handle, dict[KVFamily, KVRows]] = field(default_factory=dict)
    d_sink: Bits | None = None
    lost: str = ""


@dataclass(frozen=True, eq=False)
class Observation:
    """One launch of one layer.

    Args:
        layer: 0-based layer.
        requests: the requests of the launch, each once, in executed order.
        request: int32 `[T]`, the index into `requests` of each row.
        positions: int64 `[T]`.
        q: `[T, H, D]`.
        kv: the rows that the kernel consumed, per request and family.
        sink: FP32 `[H]` or None.
        selection: what each row read.
        out: O `[T, H, Dv]`.
        lse: LSE where the kernel gave one, else None.
        conventions: what the numbers mean.
        provenance: what ran.
        launch: the physical side.
        gradients: where the backward of the launch will put them; None where none is expected.

    Raises:
        InvalidCall: `M-CALL-DTYPE` when q, keys, values and out have more than one dtype.
    """

    layer: int
    requests: tuple[Handle, ...]
    request: npt.NDArray[np.int32]
    positions: npt.NDArray[np.int64]
    q: Bits
    kv: Mapping[Handle, Mapping[KVFamily, SeenKV]]
    sink: Bits | None
    selection: Selection
    out: Output | None
    lse: Output | None
    conventions: Conventions
    provenance: Provenance
    launch: LaunchPlan | None = None
    gradients: LateGradients | None = None

    def __post_init__(self) -> None:
        kinds = {"q": self.q.dtype}
        for families in self.kv.values():
            for rows in families.values():
                kinds["keys"] = rows.keys.dtype
                kinds["values"] = (rows.values or rows.keys).dtype
        if self.out is not None:
            kinds["out"] = self.out.bits.dtype
        check_dtypes(self.layer, {name: dtype.value for name, dtype in kinds.items()})

    @property
    def size(self) -> int:
        """Bytes of Q and the outputs."""
        outputs = [output.bits.data.nbytes for output in (self.out, self.lse) if output is not None]
        return self.q.data.nbytes + sum(outputs)

    def take(self, order: Array) -> "Observation":
        """Return some of the rows, with the KV of the requests that keep any.

        The launch plan and the gradients are about all rows, and left out.
        """
        kept, request = np.unique(self.request[order], return_inverse=True)
        requests = tuple(self.requests[index] for index in kept)
        return replace(
            self,
            requests=requests,
            request=request.astype(np.int32),
            positions=self.positions[order],
            q=self.q.take(order),
            kv={handle: rows for handle, rows in self.kv.items() if handle in requests},
            selection=self.selection.take(order),
            out=None if self.out is None else self.out.take(order),
            lse=None if self.lse is None else self.lse.take(order),
            launch=None,
            gradients=None,
        )


def check_dtypes(layer: int, kinds: Mapping[str, str]) -> None:
    """Refuse a launch whose tensors have more than one dtype.

    Raises:
        InvalidCall: `M-CALL-DTYPE`.
    """
    if len(set(kinds.values())) > 1:
        raise InvalidCall(
            f"layer {layer} mixes dtypes ({', '.join(f'{n} {d}' for n, d in kinds.items())}); "
            "one call has one dtype: cast before the attention function, or record each side by itself.",
            rule="M-CALL-DTYPE",
            layer=layer,
            dtypes=dict(kinds),
        )


@dataclass(frozen=True, eq=False)
class Launch:
    """One launch of one layer whose description can wait: all that an engine's step has to pay for.

    Args:
        layer: 0-based layer.
        kv: the rows that the kernel consumed, per request and family; borrowed, and read at once.
        size: bytes of Q and outputs.
        describe: gives the observation, without KV, from tensors that are owned; may be called at any time
            and more than once.
    """

    layer: int
    kv: Mapping[Handle, Mapping[KVFamily, SeenKV | ReadKV]]
    size: int
    describe: Callable[[], Observation]


@dataclass(frozen=True, eq=False)
class IndexerObservation:
    """One launch of the sparse indexer of a layer; fields as those of `IndexerCall`.

    Args:
        layer: 0-based layer.
        requests: the requests of the launch, each once, in executed order.
        request: int32 `[T]`, the index into `requests` of each row.
        positions: int64 `[T]`.
        query: `[T, H, D]`.
        weights: `[T, H]`.
        keys: the keys of each request from row 0 on, with one head and without values.
        top_k: what each row chose.
        scores: FP32, one a chosen key, or None.
        k: the most keys of a row.
        family: whose rows were chosen.
        scale_bits: binary32 bits of the factor on q.k.
        provenance: what ran.
    """

    layer: int
    requests: tuple[Handle, ...]
    request: npt.NDArray[np.int32]
    positions: npt.NDArray[np.int64]
    query: Bits
    weights: Bits
    keys: Mapping[Handle, SeenKV]
    top_k: Lists
    scores: Bits | None
    k: int
    family: KVFamily
    scale_bits: int
    provenance: Provenance

    @property
    def size(self) -> int:
        """Bytes of the query, the weights, the choice and its scores."""
        scores = 0 if self.scores is None else self.scores.data.nbytes
        return self.query.data.nbytes + self.weights.data.nbytes + self.top_k.ids.nbytes + scores

    def take(self, order: Array) -> "IndexerObservation":
        """Return some of the rows, with the keys of the requests that keep any."""
        kept, request = np.unique(self.request[order], return_inverse=True)
        requests = tuple(self.requests[index] for index in kept)
        offsets = self.top_k.offsets
        places = [np.arange(offsets[row], offsets[row + 1]) for row in order]
        return replace(
            self,
            requests=requests,
            request=request.astype(np.int32),
            positions=self.positions[order],
            query=self.query.take(order),
            weights=self.weights.take(order),
            keys={handle: self.keys[handle] for handle in requests},
            top_k=self.top_k.take(order),
            scores=None if self.scores is None else self.scores.take(np.concatenate(places)),
        )
