"""Recording an attention function of your own, without an engine adapter."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

from tracekit.canonical.kv_axis import split_kv
from tracekit.errors import InvalidCall, UsageError
from tracekit.model import (
    Bits,
    Conventions,
    ExecutedIdentity,
    KVFamily,
    KVSource,
    Mode,
    Origin,
    Output,
    Provenance,
    Ranges,
    Selection,
    scale_to_bits,
)
from tracekit.recorder.observation import Borrowed, Handle, Observation, SeenKV
from tracekit.recorder.session import Session
from tracekit.recorder.tensors import as_bits


class ManualSession(Session):
    """A session that can also be fed by hand: one `step` a forward, one `attention` a layer."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._handles: dict[str, Handle] = {}
        self._new: dict[str, int] = {}

    @contextmanager
    def step(
        self, tokens: Mapping[str, Sequence[int]], *, calls: int | None = None, mode: Mode | None = None
    ) -> Iterator[None]:
        """One forward of the model.

        Args:
            tokens: the new token ids of each request, by a name of yours; a new name is a new request.
            calls: how many `attention` calls the step should see; None takes what comes.
            mode: why the step is made; None tells prefill from decode by the tokens.
        """
        for alias in tokens:
            if alias not in self._handles:
                self._handles[alias] = self.requests.open(alias)
        self._new = {alias: len(ids) for alias, ids in tokens.items()}
        self.begin(
            {self._handles[alias]: np.asarray(ids, np.int64) for alias, ids in tokens.items()},
            expected=calls,
            mode=mode,
        )
        try:
            yield
        finally:
            self.end()

    def attention(
        self,
        *,
        layer: int,
        q: Any,
        scale: float,
        keys: Any = None,
        values: Any = None,
        kv: Any = None,
        num_kv_heads: int = 0,
        kv_axis: int | None = None,
        out: Any = None,
        lse: Any = None,
        sink: Any = None,
        window: int | None = None,
        generation: int = 0,
        kv_source: KVSource | str = KVSource.WRITTEN,
        kernel: str = "custom",
        libraries: Mapping[str, str] | None = None,
    ) -> None:
        """Record one causal attention call over the new rows of the step.

        Args:
            layer: 0-based layer.
            q: `[T, H, D]`, the new rows of the step's requests, one request after the other.
            scale: the factor on q.k.
            keys: `[N, Hkv, D]` from row 0 on, or a mapping from request name to that.
            values: `[N, Hkv, Dv]`, likewise.
            kv: keys and values in one array, in place of both; see `split_kv`.
            num_kv_heads: Hkv of this rank; needed with `kv`.
            kv_axis: the axis that tells K from V in `kv`, where more than one could.
            out: O `[T, H, Dv]`.
            lse: FP32 `[T, H]`, natural logarithm, sink not counted.
            sink: FP32 `[H]` logit that joins the denominator.
            window: sliding window in tokens.
            generation: write epoch of the KV rows; raise it when you have written rows over.
            kv_source: `consumed` where keys and values are what the kernel read (read back from its cache),
                `written` where they are what was computed for it.
            kernel: name of the kernel that ran.
            libraries: package -> version of what ran.

        Raises:
            ConventionAmbiguous: `C-KV-AXIS` when `kv` can be read in two ways.
            InvalidCall: `R-SHAPE`, `R-TENSOR`, `M-CALL-DTYPE` when shapes or dtypes do not fit.
            UsageError: `R-MANUAL` when neither `kv` nor keys and values were given; `R-KV-SOURCE`.
        """
        if not self.wants(layer):
            self.skip()
            return
        aliases = [alias for alias, count in self._new.items() if count]
        request, positions = self._new_rows(aliases)
        packed = None if kv is None else (kv, num_kv_heads, kv_axis)
        held = {
            self._handles[alias]: {KVFamily.DENSE: SeenKV(_head_major(k), _head_major(v), 0, generation)}
            for alias, (k, v) in self._kv_of(aliases, packed, keys, values).items()
        }
        lo = np.zeros_like(positions) if window is None else np.maximum(positions - window + 1, 0)
        self.observe(
            Observation(
                layer=layer,
                requests=tuple(self._handles[alias] for alias in aliases),
                request=request,
                positions=positions,
                q=_queries(q, positions.size),
                kv=held,
                sink=None if sink is None else as_bits(sink, "sink"),
                selection=Selection({KVFamily.DENSE: Ranges(lo, positions + 1)}),
                out=None if out is None else Output(as_bits(out, "out"), Origin.EXECUTED),
                lse=None if lse is None else Output(as_bits(lse, "lse"), Origin.EXECUTED),
                conventions=Conventions(scale_to_bits(scale), window=window, kv_source=_source(kv_source)),
                provenance=Provenance("manual", kernel, ExecutedIdentity(kernel, dict(libraries or {}))),
            )
        )

    def _new_rows(self, aliases: list[str]) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]:
        """The index of the request of each new row of the step, and its position."""
        counts = [self._new[alias] for alias in aliases]
        ends = [len(self.requests[self._handles[alias]].tokens) for alias in aliases]
        positions = [np.arange(end - n, end) for end, n in zip(ends, counts, strict=True)]
        request = np.repeat(np.arange(len(aliases), dtype=np.int32), counts)
        return request, np.concatenate([np.zeros(0, np.int64), *positions])

    def _kv_of(
        self, aliases: list[str], packed: tuple[Any, int, int | None] | None, keys: Any, values: Any
    ) -> dict[str, tuple[Bits, Bits]]:
        """Keys and values of each request, out of one array each or apart."""
        per_kv = {} if packed is None else _by_request(packed[0], aliases)
        per_key, per_value = _by_request(keys, aliases), _by_request(values, aliases)
        found = {}
        for alias in aliases:
            if packed is not None and alias in per_kv:
                bits = as_bits(per_kv[alias], "kv")
                k, v = (Bits(a, bits.dtype) for a in split_kv(bits.data, *packed[1:]))
            elif alias in per_key and alias in per_value:
                k, v = as_bits(per_key[alias], "keys"), as_bits(per_value[alias], "values")
            else:
                raise UsageError(
                    f"request {alias!r} has no KV: pass keys= and values=, or kv= with num_kv_heads=.",
                    rule="R-MANUAL",
                    request=alias,
                )
            tokens = len(self.requests[self._handles[alias]].tokens)
            found[alias] = (
                _held(k, f"keys of request {alias!r}", "[N, Hkv, D]", tokens),
                _held(v, f"values of request {alias!r}", "[N, Hkv, Dv]", tokens),
            )
        return found


def _source(value: KVSource | str) -> KVSource:
    try:
        return KVSource(value)
    except ValueError:
        valid = [source.value for source in KVSource]
        raise UsageError(
            f"kv_source is {' or '.join(valid)}, not {value!r}.", rule="R-KV-SOURCE", value=value, valid=valid
        ) from None


def _queries(q: Any, count: int) -> Bits:
    bits = as_bits(q, "q")
    if len(bits.shape) != 3 or bits.shape[0] != count:
        raise _shape(f"q is [T, H, D] with T = {count} rows, the new tokens of the step", bits)
    return bits


def _held(bits: Bits, name: str, axes: str, tokens: int) -> Bits:
    if len(bits.shape) != 3 or bits.shape[0] < tokens:
        raise _shape(f"{name} are {axes} with N = {tokens} rows from position 0 on", bits)
    return bits


def _shape(text: str, bits: Bits) -> InvalidCall:
    return InvalidCall(
        f"{text}, not {list(bits.shape)}; pass that shape.", rule="R-SHAPE", shape=list(bits.shape)
    )


def _by_request(value: Any, aliases: list[str]) -> Mapping[str, Any]:
    if value is None:
        return {}
    if isinstance(value, Mapping):
        return value
    if len(aliases) != 1:
        raise UsageError(
            f"the step has {len(aliases)} requests; pass a mapping from request name to array.",
            rule="R-MANUAL",
            requests=aliases,
        )
    return {aliases[0]: value}


def _head_major(bits: Bits) -> Borrowed:
    return Borrowed(bits.data.transpose(1, 0, 2), bits.dtype)
