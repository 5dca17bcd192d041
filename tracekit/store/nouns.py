"""Nouns that are stored as texts: conventions, provenance, identity, ledger."""

from dataclasses import asdict, dataclass
from typing import Any

from tracekit.errors import InvalidCall
from tracekit.model import (
    Conventions,
    DType,
    EmptyLse,
    ExecutedIdentity,
    Identity,
    KVSource,
    LseBase,
    Provenance,
    Recording,
    Share,
    StepRecord,
    Tag,
)
from tracekit.store.canonical import parse_object, parse_strings
from tracekit.store.rules import corrupt

_NONE = type(None)
_CONVENTIONS = {
    "scale_bits": (int,),
    "causal": (bool,),
    "window": (int, _NONE),
    "lse_base": (str,),
    "sink_in_lse": (bool,),
    "empty_lse": (str,),
    "output_boundary": (str,),
    "score_dtype": (str,),
    "probability_dtype": (str,),
    "kv_source": (str,),
}
_ENUMERATIONS = {
    "lse_base": LseBase,
    "empty_lse": EmptyLse,
    "score_dtype": DType,
    "probability_dtype": DType,
    "kv_source": KVSource,
}
_PROVENANCE = {
    "engine": (str,),
    "requested": (str,),
    "executed": (dict,),
    "threads": (int,),
    "details": (dict,),
}
_EXECUTED = {"kernel": (str,), "libraries": (dict,), "device": (str,), "arch": (str,), "isa": (str,)}
_IDENTITY = {
    "model": (str,),
    "architecture": (str,),
    "weights_digest": (str,),
    "config_digest": (str,),
    "model_version": (int,),
}
_RECORDING = {"aliases": (list,), "identity": (dict,), "ledger": (list,), "notes": (dict,)}
_SHARE = dict.fromkeys(Share.__dataclass_fields__, (int,))
_LINE = (int, int, int, int, int, str, str, int, int, int)
"""A line of the ledger. Files of the first days of 0.1 stop after the reason: normal, no bytes known."""
_SHORT_LINE = _LINE[:6]


def conventions_to_json(conventions: Conventions) -> dict[str, Any]:
    """Return the fields, enumerations as their value."""
    return asdict(conventions)


def parse_conventions(value: Any) -> Conventions:
    """Parse what `conventions_to_json` returns.

    Raises:
        TraceCorrupt: E-15, or E-21 when the noun refuses.
    """
    fields = dict(parse_object(value, _CONVENTIONS, "conventions"))
    try:
        for name, enumeration in _ENUMERATIONS.items():
            fields[name] = enumeration(fields[name])
    except ValueError as error:
        raise corrupt("E-15", f"conventions: {error}.", where="conventions") from None
    try:
        return Conventions(**fields)
    except InvalidCall as error:
        raise corrupt("E-21", f"conventions: {error}", noun_rule=error.rule) from None


def provenance_to_json(provenance: Provenance) -> dict[str, Any]:
    """Return the fields."""
    executed = provenance.executed
    return {
        "engine": provenance.engine,
        "requested": provenance.requested,
        "executed": {
            "kernel": executed.kernel,
            "libraries": dict(executed.libraries),
            "device": executed.device,
            "arch": executed.arch,
            "isa": executed.isa,
        },
        "threads": provenance.threads,
        "details": dict(provenance.details),
    }


def parse_provenance(value: Any) -> Provenance:
    """Parse what `provenance_to_json` returns.

    Raises:
        TraceCorrupt: E-15.
    """
    fields = dict(parse_object(value, _PROVENANCE, "provenance"))
    executed = dict(parse_object(fields["executed"], _EXECUTED, "executed identity"))
    parse_strings(executed["libraries"], "libraries")
    parse_strings(fields["details"], "details")
    fields["executed"] = ExecutedIdentity(**executed)
    return Provenance(**fields)


def recording_to_json(recording: Recording, history: int | None = None) -> dict[str, Any]:
    """Return the recording without its arrays: token ids, and its history, which is array `history`."""
    told: dict[str, Any] = {
        "aliases": [request.alias for request in recording.requests],
        "identity": asdict(recording.identity),
        "ledger": [
            [getattr(line, name) for name in StepRecord.__dataclass_fields__] for line in recording.ledger
        ],
        "notes": dict(recording.notes),
    }
    if recording.share is not None:
        told["share"] = asdict(recording.share)
    if history is not None:
        told["history"] = history
    return told


@dataclass(frozen=True)
class RecordingText:
    """What the text of a recording says; its requests are in tables.

    Args:
        aliases: one a listed request.
        identity: which model.
        ledger: one record a step.
        notes: free text by name.
        share: which part of a job.
        history: the array that holds the history, None where there is none.
    """

    aliases: list[str]
    identity: Identity
    ledger: tuple[StepRecord, ...]
    notes: dict[str, str]
    share: Share | None
    history: int | None


def parse_recording(value: Any) -> RecordingText:
    """Parse what `recording_to_json` returns.

    Raises:
        TraceCorrupt: E-15, or E-21 when the noun of a ledger line or a share refuses.
    """
    optional = {"share": (dict,), "history": (int,)}
    present = {name: kind for name, kind in optional.items() if isinstance(value, dict) and name in value}
    fields = parse_object(value, {**_RECORDING, **present}, "recording")
    identity = Identity(**parse_object(fields["identity"], _IDENTITY, "identity"))
    notes = parse_strings(fields["notes"], "notes")
    if any(type(alias) is not str for alias in fields["aliases"]):
        raise corrupt("E-15", "recording: an alias is text.", where="recording")
    share = parse_object(fields["share"], _SHARE, "share") if "share" in fields else None
    try:
        return RecordingText(
            fields["aliases"],
            identity,
            tuple(_parse_line(line) for line in fields["ledger"]),
            notes,
            None if share is None else Share(**share),
            fields.get("history"),
        )
    except InvalidCall as error:
        raise corrupt("E-21", f"recording: {error}", noun_rule=error.rule) from None


def _parse_line(line: Any) -> StepRecord:
    if type(line) is not list or tuple(type(item) for item in line) not in (_LINE, _SHORT_LINE):
        raise corrupt(
            "E-15",
            "ledger: a line is five integers, a text, and then a tag and three integers.",
            where="ledger",
        )
    tag = line[6] if len(line) > 6 else Tag.NORMAL
    if tag not in [known.value for known in Tag]:
        raise corrupt("E-15", f"ledger: {tag!r} is no tag of a line.", where="ledger")
    numbers = dict(zip(("wanted", "written", "left_out"), line[7:], strict=False))
    step, expected, fired, recorded, filtered, cut = line[:6]
    return StepRecord(step, expected, fired, recorded, filtered, cut, Tag(tag), **numbers)
