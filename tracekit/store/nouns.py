"""Nouns that are stored as texts: conventions, provenance, identity, ledger."""

from dataclasses import asdict
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
    StepRecord,
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


def recording_to_json(recording: Recording) -> dict[str, Any]:
    """Return the recording without the token ids, which are arrays."""
    return {
        "aliases": [request.alias for request in recording.requests],
        "identity": asdict(recording.identity),
        "ledger": [
            [step.step, step.expected, step.fired, step.recorded, step.filtered, step.cut]
            for step in recording.ledger
        ],
        "notes": dict(recording.notes),
    }


def parse_recording(
    value: Any,
) -> tuple[list[str], Identity, tuple[StepRecord, ...], dict[str, str]]:
    """Parse what `recording_to_json` returns: aliases, identity, ledger, notes.

    Raises:
        TraceCorrupt: E-15, or E-21 when the noun of a ledger line refuses.
    """
    fields = parse_object(value, _RECORDING, "recording")
    identity = Identity(**parse_object(fields["identity"], _IDENTITY, "identity"))
    notes = parse_strings(fields["notes"], "notes")
    if any(type(alias) is not str for alias in fields["aliases"]):
        raise corrupt("E-15", "recording: an alias is text.", where="recording")
    ledger = []
    for line in fields["ledger"]:
        if type(line) is not list or [type(item) for item in line] != [int, int, int, int, int, str]:
            raise corrupt("E-15", "ledger: a line is five integers and a text.", where="ledger")
        try:
            ledger.append(StepRecord(*line))
        except InvalidCall as error:
            raise corrupt("E-21", f"recording: {error}", noun_rule=error.rule) from None
    return fields["aliases"], identity, tuple(ledger), notes
