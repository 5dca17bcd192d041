"""Tables and payload back to nouns: the inverse of `builder`."""

from typing import Any

import numpy as np

from tracekit.errors import InvalidCall, TraceCorrupt
from tracekit.model import (
    Array,
    AttentionCall,
    Bits,
    DType,
    Gradients,
    IndexerCall,
    KVFamily,
    KVRows,
    LaunchPlan,
    Lists,
    Output,
    Ranges,
    Request,
    RequestKey,
    Rows,
    Selection,
)
from tracekit.model.history import Entry
from tracekit.store.canonical import parse_canonical
from tracekit.store.head import Head
from tracekit.store.history import parse_history
from tracekit.store.launches import parse_launch
from tracekit.store.limits import MAX_CALL, NONE
from tracekit.store.payload import Payload
from tracekit.store.rules import corrupt
from tracekit.store.schema import DTYPES, FAMILIES, MODES, ORIGINS, WIDTHS, KVRole, Role, SelectionKind
from tracekit.store.texts import Texts

KV = dict[RequestKey, dict[KVFamily, KVRows]]


class Decoder:
    """Nouns of an open file whose tables are checked.

    Args:
        head: the head.
        payload: the payload.
        texts: the parsed texts.
    """

    def __init__(self, head: Head, payload: Payload, texts: Texts) -> None:
        self._head, self._tables, self._payload, self._texts = head, head.tables, payload, texts
        self._batch: tuple[int, Rows] | None = None

    def request(self, row: int, alias: str) -> Request:
        """Return a listed request.

        Raises:
            TraceCorrupt: E-19, E-20, or E-21 when the noun refuses.
        """
        entry = self._tables["requests"][row]
        tokens = self._array(int(entry["tokens"])).view(np.int64)
        try:
            return Request(self._texts.keys[row], tokens, int(entry["prompt_length"]), alias)
        except InvalidCall as error:
            raise refused(error, f"request {row}") from None

    def history(self, number: int) -> tuple[Entry, ...]:
        """Return the history, which is array `number`.

        Raises:
            TraceCorrupt: E-15, E-19, E-20.
        """
        return parse_history(self._array(number).tobytes())

    def call(self, index: int) -> AttentionCall:
        """Return call `index`.

        Raises:
            TraceCorrupt: E-15, E-19, E-20, E-27, E-28, or E-21 when a noun refuses.
        """
        entry = self._tables["calls"][index]
        try:
            return self._call(entry, index)
        except InvalidCall as error:
            raise refused(error, f"call {index}") from None
        except (ArithmeticError, LookupError) as error:  # numbers that no writer writes overflow in a noun
            raise corrupt("E-21", f"Call {index} holds impossible numbers ({error}).", call=index) from None

    def indexer_call(self, index: int) -> IndexerCall:
        """Return indexer call `index`; errors as `call`."""
        entry = self._tables["indexer_calls"][index]
        try:
            return self._indexer_call(entry, index)
        except InvalidCall as error:
            raise refused(error, f"indexer call {index}") from None
        except (ArithmeticError, LookupError) as error:
            text = f"Indexer call {index} holds impossible numbers ({error})."
            raise corrupt("E-21", text, indexer_call=index) from None

    def _indexer_call(self, entry: Any, index: int) -> IndexerCall:
        tables = self._tables
        rows = self._rows(int(entry["batch"]))
        tensors = _span(tables["tensors"], entry["tensors"], entry["tensor_count"])
        stacks = {Role(line["role"]): self._tensor(line, rows.count) for line in tensors}
        keys: dict[RequestKey, Bits] = {}
        for line in _span(tables["kv"], entry["kv"], entry["kv_count"]):
            request, held = self._texts.keys[line["request"]], self._kv_rows(line)
            plain = held.values is None and held.keys.shape[1] == 1 and held.first == 0
            if not plain or FAMILIES[line["family"]] is not KVFamily.INDEX or request in keys:
                text = f"Indexer call {index} has other keys than one log of the family index a request."
                raise corrupt("E-28", text, indexer_call=index)
            keys[request] = held.keys.part((slice(None), 0))
        return IndexerCall(
            layer=int(entry["layer"]),
            step=int(entry["step"]),
            rows=rows,
            query=stacks[Role.INDEX_Q],
            weights=stacks[Role.INDEX_W],
            keys=keys,
            top_k=Lists(*(self._array(int(entry[name])).view(np.int64) for name in ("ids", "offsets"))),
            provenance=self._texts.provenance(int(entry["provenance"])),
            k=int(entry["k"]),
            family=FAMILIES[entry["family"]],
            scale_bits=int(entry["scale_bits"]),
            scores=self._float32(int(entry["scores"])),
            rank=int(entry["rank"]),
        )

    def _call(self, entry: Any, index: int) -> AttentionCall:
        tables = self._tables
        rows = self._rows(int(entry["batch"]))
        tensors = _span(tables["tensors"], entry["tensors"], entry["tensor_count"])
        stacks = {Role(line["role"]): self._tensor(line, rows.count) for line in tensors}
        origins = {Role(line["role"]): ORIGINS[line["origin"]] for line in tensors}
        selections = _span(tables["selections"], entry["selections"], entry["selection_count"])
        selection = {FAMILIES[line["family"]]: self._selection(line) for line in selections}
        if len(selection) != len(selections):
            raise corrupt("E-28", f"Call {index} selects from one family twice.", call=index)
        kv, d_kv = self._kv(entry, index)
        sink, d_sink = (self._float32(int(entry[name])) for name in ("sink", "d_sink"))
        grads = None
        if Role.D_OUT in stacks:
            grads = Gradients(stacks[Role.D_OUT], stacks.get(Role.D_Q), d_kv, d_sink)
        elif d_kv:
            raise corrupt("E-28", f"Call {index} has gradients of KV without d_out.", call=index)
        outputs = {
            role: Output(stacks[role], origins[role]) for role in (Role.OUT, Role.LSE) if role in stacks
        }
        return AttentionCall(
            layer=int(entry["layer"]),
            step=int(entry["step"]),
            mode=MODES[entry["mode"]],
            rows=rows,
            q=stacks[Role.Q],
            kv=kv,
            sink=sink,
            selection=Selection(selection),
            conventions=self._texts.conventions(int(entry["conventions"])),
            provenance=self._texts.provenance(int(entry["provenance"])),
            out=outputs.get(Role.OUT),
            lse=outputs.get(Role.LSE),
            rank=int(entry["rank"]),
            launch=None if entry["launch"] == NONE else self._launch(int(entry["launch"]), index),
            grads=grads,
        )

    def _rows(self, batch: int) -> Rows:
        """The layers of one step share a batch, so the last one is kept."""
        if self._batch is None or self._batch[0] != batch:
            entry = self._tables["batches"][batch]
            arrays = [self._array(int(entry[name])) for name in ("request", "positions", "tokens")]
            request, positions, tokens = arrays
            rows = Rows(
                self._texts.members(batch),
                request.view(np.int32),
                positions.view(np.int64),
                tokens.view(np.int64),
            )
            self._batch = batch, rows
        return self._batch[1]

    def _tensor(self, line: Any, rows: int) -> Bits:
        path = f"{Role(line['role']).group}/{int(line['stack'])}"
        logical = self._head.payload[path].logical
        assert logical is not None  # only pools have none
        return Bits(self._payload.read(path, int(line["first"]), rows), logical)

    def _selection(self, line: Any) -> Ranges | Lists:
        a, b = (self._array(int(line[name])).view(np.int64) for name in ("a", "b"))
        return Ranges(a, b) if line["kind"] == SelectionKind.RANGES else Lists(a, b)

    def _kv(self, entry: Any, index: int) -> tuple[KV, KV]:
        both: tuple[KV, KV] = {}, {}
        for line in _span(self._tables["kv"], entry["kv"], entry["kv_count"]):
            families = both[KVRole(line["role"])].setdefault(self._texts.keys[line["request"]], {})
            family = FAMILIES[line["family"]]
            if family in families:
                raise corrupt("E-28", f"Call {index} has KV of one request and family twice.", call=index)
            families[family] = self._kv_rows(line)
        return both

    def _kv_rows(self, line: Any) -> KVRows:
        number = int(line["log"])
        log = self._tables["logs"][number]
        dtype = DTYPES[log["dtype"].decode()]
        extents = _span(self._tables["extents"], line["extents"], line["extent_count"]).tolist()

        def rows(name: str, width: int) -> Bits:
            shape = (0, int(log["heads"]), width)
            parts = [self._payload.read(f"{name}/{number}", row, count) for row, count in extents]
            if len(parts) == 1:
                return Bits(parts[0], dtype)
            return Bits(np.concatenate([np.empty(shape, dtype.container), *parts]), dtype)

        keys = rows("keys", int(log["key_dim"]))
        values = rows("values", int(log["value_dim"])) if log["value_dim"] else None
        return KVRows(keys, values, int(line["first"]), int(line["generation"]))

    def _float32(self, array: int) -> Bits | None:
        return None if array == NONE else Bits(self._array(array), DType.FLOAT32)

    def _launch(self, text: int, index: int) -> LaunchPlan:
        budget = MAX_CALL

        def load(number: int, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Array:
            nonlocal budget
            arrays = self._tables["arrays"]
            if not 0 <= number < len(arrays):
                raise corrupt(
                    "E-16", f"The launch plan of call {index} points at array {number}.", call=index
                )
            count = int(arrays["count"][number])
            size = 1
            for extent in shape:
                size *= extent
            if count != size or arrays["width"][number] != dtype.itemsize:
                raise corrupt(
                    "E-28", f"Call {index}: array {number} is no {dtype} {list(shape)}.", call=index
                )
            budget -= count * dtype.itemsize
            if budget < 0:
                raise corrupt("E-27", f"The launch plan of call {index} is over the limit.", call=index)
            return self._array(number).view(dtype).reshape(shape)

        return parse_launch(parse_canonical(self._texts.raw(text), "launch plan"), load)

    def _array(self, number: int) -> Array:
        entry = self._tables["arrays"][number]
        width = int(entry["width"])
        assert width in WIDTHS  # checked with the tables
        return self._payload.read(f"arrays/u{width}", int(entry["first"]), int(entry["count"]))


def refused(error: InvalidCall, where: str) -> TraceCorrupt:
    """Return the error for a noun that does not accept what was read."""
    return corrupt("E-21", f"In {where}: {error}", noun_rule=error.rule, **error.fields)


def _span(table: Array, first: Any, count: Any) -> Array:
    return table[int(first) : int(first) + int(count)]
