"""What the writer refuses: tensors that the format cannot hold."""

from collections.abc import Iterator

from tracekit.errors import Unsupported
from tracekit.model import AttentionCall, Bits, IndexerCall, KVRows, Origin
from tracekit.store.limits import MAX_CALL, MAX_DIMENSION, MAX_NUMBER, MAX_ROW, NONE
from tracekit.store.schema import Role


def tensors_of(call: AttentionCall) -> Iterator[tuple[Role, Bits, Origin]]:
    """Yield every tensor of a call that has one row a query row."""
    yield Role.Q, call.q, Origin.EXECUTED
    for role, output in ((Role.OUT, call.out), (Role.LSE, call.lse)):
        if output is not None:
            yield role, output.bits, output.origin
    if call.grads is not None:
        yield Role.D_OUT, call.grads.d_out, Origin.EXECUTED
        if call.grads.d_q is not None:
            yield Role.D_Q, call.grads.d_q, Origin.EXECUTED


def kv_of(call: AttentionCall) -> Iterator[KVRows]:
    """Yield the KV of a call and its gradients."""
    gradients = {} if call.grads is None else call.grads.d_kv
    for kv in (call.kv, gradients):
        for families in kv.values():
            yield from families.values()


def check_call(call: AttentionCall) -> None:
    """Refuse what cannot be stored.

    Raises:
        Unsupported: S-LIMIT, over a limit of docs/format.md.
    """
    _check_numbers(call, max(key.ordinal for key in (*call.kv, *call.rows.requests)))
    tensors = [bits for _, bits, _ in tensors_of(call)]
    for rows in kv_of(call):
        tensors += [rows.keys, *([] if rows.values is None else [rows.values])]
        if max(rows.generation, rows.end) >= MAX_NUMBER:
            raise _limit("a KV row or generation", "below 2^62")
    _check_tensors(tensors)


def check_indexer_call(call: IndexerCall) -> None:
    """Refuse what cannot be stored.

    Raises:
        Unsupported: S-LIMIT, over a limit of docs/format.md.
    """
    _check_numbers(call, max(key.ordinal for key in (*call.keys, *call.rows.requests)))
    if call.k >= NONE:
        raise _limit(f"a top-k of {call.k}", f"below {NONE}")
    _check_tensors([call.query, call.weights, *call.keys.values()])


def _check_numbers(call: AttentionCall | IndexerCall, ordinal: int) -> None:
    for name, number, limit in (
        ("layer", call.layer, NONE),
        ("rank", call.rank, NONE),
        ("step", call.step, MAX_NUMBER),
        ("ordinal", ordinal, NONE),
    ):
        if number >= limit:
            raise _limit(f"{name} {number}", f"0 to {limit - 1}")


def _check_tensors(tensors: list[Bits]) -> None:
    for bits in tensors:
        row = bits.data.itemsize
        for size in bits.shape[1:]:
            row *= size
        if not all(0 < size <= MAX_DIMENSION for size in bits.shape[1:]) or row > MAX_ROW:
            raise _limit(
                f"a tensor {list(bits.shape)}", f"dimensions 1 to {MAX_DIMENSION}, rows {MAX_ROW} bytes"
            )
    total = sum(bits.data.nbytes for bits in tensors)
    if total > MAX_CALL:
        raise _limit(f"a call of {total} bytes", f"at most {MAX_CALL}")


def _limit(what: str, limit: str) -> Unsupported:
    return Unsupported(
        f"A trace does not hold {what}: the limit is {limit} (docs/format.md, Limits).", rule="S-LIMIT"
    )
