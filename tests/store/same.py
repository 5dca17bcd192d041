"""Equality of calls and recordings, down to the bits."""

import numpy as np

from tracekit.model import AttentionCall, Bits, KVRows, Lists, Ranges, Recording


def _arrays(left, right) -> bool:
    left, right = np.asarray(left), np.asarray(right)
    return left.dtype == right.dtype and left.shape == right.shape and left.tobytes() == right.tobytes()


def _bits(left: Bits | None, right: Bits | None) -> bool:
    return left is right if left is None or right is None else left.same(right)


def _kv_rows(left: KVRows, right: KVRows) -> bool:
    return (
        _bits(left.keys, right.keys)
        and _bits(left.values, right.values)
        and (left.first, left.generation) == (right.first, right.generation)
    )


def _kv(left, right) -> bool:
    flat = [
        [(key, family, rows) for key, fs in kv.items() for family, rows in fs.items()] for kv in (left, right)
    ]
    return [item[:2] for item in flat[0]] == [item[:2] for item in flat[1]] and all(
        _kv_rows(a[2], b[2]) for a, b in zip(*flat, strict=True)
    )


def _part(left: Ranges | Lists, right: Ranges | Lists) -> bool:
    names = ("lo", "hi") if isinstance(left, Ranges) else ("ids", "offsets")
    return type(left) is type(right) and all(_arrays(getattr(left, n), getattr(right, n)) for n in names)


def _output(left, right) -> bool:
    return (
        left is right
        if left is None or right is None
        else (left.bits.same(right.bits) and left.origin is right.origin)
    )


def _optional(left, right) -> bool:
    return left is right if left is None or right is None else _arrays(left, right)


def _scalar(value) -> tuple[str, str]:
    return type(value).__name__, value.hex() if isinstance(value, float) else repr(value)


def _launch(left, right) -> bool:
    if left is None or right is None:
        return left is right
    plain = ("kernel", "slots", "head_padding", "page_size")
    tables = zip(left.block_tables, right.block_tables, strict=True)
    return (
        all(getattr(left, name) == getattr(right, name) for name in plain)
        and _arrays(left.row_slots, right.row_slots)
        and all(_arrays(a, b) for a, b in tables)
        and _optional(left.cu_seqlens, right.cu_seqlens)
        and {k: _scalar(v) for k, v in left.scalars.items()}
        == {k: _scalar(v) for k, v in right.scalars.items()}
        and left.arrays.keys() == right.arrays.keys()
        and all(_arrays(left.arrays[name], right.arrays[name]) for name in left.arrays)
    )


def _grads(left, right) -> bool:
    if left is None or right is None:
        return left is right
    return all(_bits(getattr(left, n), getattr(right, n)) for n in ("d_out", "d_q", "d_sink")) and _kv(
        left.d_kv, right.d_kv
    )


def differences(left: AttentionCall, right: AttentionCall) -> list[str]:
    """Return the names of the fields that differ."""
    found = [
        name
        for name in ("layer", "step", "rank", "mode", "conventions", "provenance")
        if getattr(left, name) != getattr(right, name)
    ]
    checks = {
        "rows": left.rows.requests == right.rows.requests
        and all(
            _arrays(getattr(left.rows, n), getattr(right.rows, n))
            for n in ("request", "positions", "token_ids")
        ),
        "q": _bits(left.q, right.q),
        "kv": _kv(left.kv, right.kv),
        "sink": _bits(left.sink, right.sink),
        "selection": list(left.selection.families) == list(right.selection.families)
        and all(
            _part(part, right.selection.families[family]) for family, part in left.selection.families.items()
        ),
        "out": _output(left.out, right.out),
        "lse": _output(left.lse, right.lse),
        "launch": _launch(left.launch, right.launch),
        "grads": _grads(left.grads, right.grads),
    }
    return found + [name for name, same in checks.items() if not same]


def same_recording(left: Recording, right: Recording) -> bool:
    """Say whether two recordings are equal."""
    return (
        (left.identity, left.ledger, left.notes) == (right.identity, right.ledger, right.notes)
        and [(r.key, r.prompt_length, r.alias) for r in left.requests]
        == [(r.key, r.prompt_length, r.alias) for r in right.requests]
        and all(_arrays(a.token_ids, b.token_ids) for a, b in zip(left.requests, right.requests, strict=True))
    )
