"""What a provider gives, rebuilt from plain types in the child, so that the parent can read it.

A provider is foreign code. An object of one of its own classes means nothing in the process that judges.
"""

from collections.abc import Mapping
from typing import Any, TypeVar

from tracekit.errors import ProviderFailed, TracekitError, Unavailable, Unsupported, UsageError
from tracekit.model import DType, ExecutedIdentity, KVFamily
from tracekit.providers.base import Capabilities, Provider
from tracekit.providers.graphs.kind import GraphKind
from tracekit.providers.indexers import IndexerProvider
from tracekit.providers.placement import Layout, Padding
from tracekit.replayer.messages import Description

MOST_TEXT = 300
"""Characters that a provider may add to a report at once."""

_Kind = TypeVar("_Kind", DType, GraphKind, KVFamily, Layout, Padding, int, str)


def description(provider: Provider | IndexerProvider, *, indexer: bool = False) -> Description:
    """Return what a provider says of itself; one of an indexer has no capabilities.

    Raises:
        ProviderFailed: `P-ANSWER`, a part is of another type than the protocol says.
    """
    advertised = provider.advertised()
    if not isinstance(advertised, (set, frozenset, list, tuple)):
        raise wrong(f"{_shown(advertised)} as the claims that it promises")
    own: Any = provider
    return Description(
        _text(provider.id, "id"),
        None if indexer else _capabilities(own.capabilities()),
        frozenset(_text(claim, "name of a claim") for claim in advertised),
        identity(provider.identity()),
    )


def refusal(answer: object) -> str | None:
    """Return a refusal as text; an error as above."""
    if answer is None:
        return None
    return _cut(_text(answer, "refusal")) or "it refuses without a reason"


def identity(given: object) -> ExecutedIdentity:
    """Return an identity of text alone; errors as above."""
    if not isinstance(given, ExecutedIdentity):
        raise wrong(f"{_shown(given)} as the identity of what ran")
    if not isinstance(given.libraries, Mapping):
        raise wrong(f"{_shown(given.libraries)} as the libraries of what ran")
    texts = {name: _text(getattr(given, name), name) for name in ("kernel", "device", "arch", "isa")}
    libraries = {
        _text(name, "name of a library"): _text(version, "version of a library")
        for name, version in given.libraries.items()
    }
    return ExecutedIdentity(libraries=libraries, **texts)


def schedule(given: object) -> str | None:
    """Return the account of a schedule as text; errors as above."""
    return None if given is None else _cut(_text(given, "schedule"))


def failure(error: BaseException, *, opening: bool) -> TracekitError:
    """Return what a provider raised as an error of tracekit's own.

    Args:
        error: what it raised.
        opening: whether it was being made; only then may it be missing or misnamed. A kernel that was made
            and says so later has failed, or the claims that were judged would be lost.
    """
    if isinstance(error, Unsupported):
        return _again(Unavailable if opening else Unsupported, error)
    if opening and isinstance(error, (Unavailable, UsageError)):
        return _again(Unavailable if isinstance(error, Unavailable) else UsageError, error)
    if isinstance(error, (ProviderFailed, Unavailable, UsageError)):
        return _again(ProviderFailed, error)
    kind, text = type(error).__name__[:80], said(error)
    return ProviderFailed(
        f"the kernel raised {kind}{': ' if text else ''}{text}.", rule="P-RAISED", exception=kind, text=text
    )


def said(error: BaseException) -> str:
    """Return what an error says in one line of at most `MOST_TEXT` characters."""
    try:
        text = str(error)
    except Exception:  # it is the provider's own class
        return ""
    return _cut(" ".join(text.split()))


def wrong(what: str) -> ProviderFailed:
    """Return the error of a provider that gives something else than the protocol says."""
    return ProviderFailed(f"the kernel gave {what}; see the protocol in docs/providers.md.", rule="P-ANSWER")


def _again(kind: type[TracekitError], error: TracekitError) -> TracekitError:
    rule, fields = getattr(error, "rule", ""), getattr(error, "fields", {})
    plain = {
        str(name): value
        for name, value in (fields.items() if isinstance(fields, dict) else ())
        if name not in ("message", "rule") and type(value) in (str, int, float, bool)
    }
    plain = {name: _cut(value) if isinstance(value, str) else value for name, value in plain.items()}
    text = said(error) or f"the kernel raised {type(error).__name__[:80]}."
    return kind(text, rule=_cut(rule) if type(rule) is str and rule else "P-RAISED", **plain)


_FLAGS = ("two_families", "lists", "sink", "lse", "launch_plan", "fills", "splits", "grad", "reads_pages")


def _capabilities(given: object) -> Capabilities:
    if not isinstance(given, Capabilities):
        raise wrong(f"{_shown(given)} as its capabilities")
    flags = {}
    for name in _FLAGS:
        flags[name] = getattr(given, name)
        if type(flags[name]) is not bool:
            raise wrong(f"{_shown(flags[name])} as its capability {name}")
    if type(given.max_head_dim) is not int:
        raise wrong(f"{_shown(given.max_head_dim)} as its capability max_head_dim")
    return Capabilities(
        dtypes=frozenset(_members(given.dtypes, DType, "dtypes")),
        families=frozenset(_members(given.families, KVFamily, "families")),
        max_head_dim=given.max_head_dim,
        page_sizes=tuple(_members(given.page_sizes, int, "page_sizes")),
        layouts=tuple(_members(given.layouts, Layout, "layouts")),
        padding=frozenset(_members(given.padding, Padding, "padding")),
        schedules=tuple(_members(given.schedules, str, "schedules")),
        graphs=frozenset(_members(given.graphs, GraphKind, "graphs")),
        score_dtype=_dtypes(given.score_dtype, "score_dtype"),
        probability_dtype=_dtypes(given.probability_dtype, "probability_dtype"),
        **flags,
    )


def _members(given: object, kind: type[_Kind], name: str) -> list[_Kind]:
    if not isinstance(given, (set, frozenset, list, tuple)):
        raise wrong(f"{_shown(given)} as its capability {name}")
    for member in given:
        if type(member) is not kind:
            raise wrong(f"{_shown(member)} in its capability {name}")
    return list(given)


def _dtypes(given: object, name: str) -> dict[DType, DType]:
    if not isinstance(given, Mapping):
        raise wrong(f"{_shown(given)} as its capability {name}")
    keys = _members(list(given.keys()), DType, name)
    return dict(zip(keys, _members(list(given.values()), DType, name), strict=True))


def _text(given: Any, what: str) -> str:
    if not isinstance(given, str):
        raise wrong(f"{_shown(given)} as its {what}")
    return str.__str__(given)


def _shown(given: object) -> str:
    return f"an object of type {type(given).__name__[:80]}"


def _cut(text: str) -> str:
    return text if len(text) <= MOST_TEXT else text[: MOST_TEXT - 1] + "…"
