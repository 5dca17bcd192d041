"""Every leaf of a run's evidence is changed, one at a time: what the run could not have written is refused.

The document is that of a run with a stand-in. Relabelled as a device's, and made sound, it is
admitted; so what refuses an edit is the rule about that leaf, and nothing else.
"""

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.edits import edited
from tools.gpu_acceptance import evidence as ev
from tools.gpu_acceptance.checks import Refused
from tools.gpu_acceptance.tree import sources_here

torch = pytest.importorskip("torch")

Path_ = tuple[str | int, ...]
FREE = frozenset(
    {
        ("device", "name"),
        ("device", "driver"),
        ("seconds",),
        ("when",),
        ("checks",),  # one that is not there: the seal sees it, and so does who counts
        *(("software", name) for name in ("python", "torch", "numpy", "h5py", "cuda", "system")),
        *(("checks", name) for name in ("name", "reason", "compared")),
        *(("checks", "data", name) for name in ("calls", "variants", "differences", "max_ulps", "refused")),
        *(
            ("checks", "data", f"{name} seconds")
            for name in ("fp32 matmul", "copy", "torch bf16", "torch fp32")
        ),
        *(("checks", "data", f"share of {name}") for name in ("fp32 matmul", "copy bandwidth")),
        ("checks", "data", "control"),
    }
)
"""What another run may say: names and versions, times, and counts that stand once in the document."""


@pytest.fixture(scope="module")
def told(stood_in_once: Any) -> dict[str, Any]:
    """The evidence of the stand-in as if it were of a device, of this tree."""
    text = stood_in_once[2].read_text().replace('"provider": "tka1"', '"provider": "tka1-cuda"')
    record = json.loads(text.replace("device.tka1.h5", "device.tka1-cuda.h5"))
    record |= {
        "stand_in": "",
        "device": {"name": "a device", "arch": "sm_90", "driver": "13000", "compiler": "nvrtc 13.0"},
    }
    record["software"]["cuda"] = "13.0"
    del record["seal"]
    return record


@pytest.fixture
def admitted(monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[str, Any]], None]:
    """Reads a record that was sealed anew, and admits it: as if its sources were those of its commit."""

    def admit(record: dict[str, Any]) -> None:
        ev.admit(ev.parse_evidence(json.dumps({**record, "seal": ev.seal(record)})))

    here = sources_here()
    monkeypatch.setattr(ev, "sources_of", lambda commit, root: here)
    return admit


def places(value: Any, path: Path_ = ()) -> Iterator[tuple[Path_, Any]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield (*path, key), item
        yield from places(item, (*path, key))


def others(value: Any) -> Iterator[Any]:
    """Yield values that are not this one: of its type, and of another."""
    yield from (None if value is not None else 0, True, [[]])
    if isinstance(value, int):
        yield from (value + 1, -value - 1, 2**70, str(value), float("nan"))
    elif isinstance(value, float):
        yield from (value * 2, -value, 0.0, float("nan"), float("inf"), 1e300)
    elif isinstance(value, str):
        yield from (f"{value}x", "", f"{value}\n", "../" + value, "\ud800", value[:-1], "x" * 3000)
        yield from (
            {"held": "refuted", "measured": "held", "not run": "held", "bounded": "held"}.get(value, "held"),
        )
        yield from ("tka1", "tka1-hip", "aiter") if value.startswith("tka1") else ()
    elif isinstance(value, dict):
        yield from ({}, {**value, "added": 1}, {**value, "added": "text"})
    elif isinstance(value, list):
        yield from ([], value[1:], value[:-1], [*value, value[0]])


def free(path: Path_) -> bool:
    return tuple(key for key in path if isinstance(key, str)) in FREE


def test_the_relabelled_document_is_admitted(told: dict[str, Any], admitted: Callable[..., None]):
    """So what is refused below is refused for its edit."""
    admitted(told)


def test_a_document_that_is_not_sealed_anew_is_refused_for_any_edit(told: dict[str, Any]):
    sealed = {**told, "seal": ev.seal(told)}
    assert ev.parse_evidence(json.dumps(sealed)).subject == "tka1-cuda"
    for path, value in places(told):
        other = f"{value}x" if isinstance(value, str) else value + 1 if isinstance(value, int) else None
        if other == value:
            continue
        with pytest.raises(Refused) as caught:
            ev.parse_evidence(json.dumps(edited(sealed, path, other)))
        assert caught.value.rule in ("EV-SEAL", "EV-SCHEMA")


def test_no_leaf_may_be_what_a_run_cannot_write(told: dict[str, Any], admitted: Callable[..., None]):
    passed = []
    for path, value in places(told):
        edits = [(repr(other)[:40], edited(told, path, other)) for other in others(value)]
        for what, damaged in [*edits, ("gone", edited(told, path, None, gone=True))]:
            if damaged == told:
                continue
            try:
                admitted(damaged)
            except Refused:
                continue
            if not free(path):
                passed.append((path, what))
    assert passed == []


@pytest.mark.parametrize(
    ("rule", "edit"),
    [
        ("EV-TIME", lambda told: {**told, "when": "2999-01-01T00:00:00Z"}),
        ("EV-TIME", lambda told: {**told, "when": "yesterday"}),
        ("EV-TIME", lambda told: {**told, "seconds": 1e9}),
        ("EV-DEVICE", lambda told: {**told, "device": {**told["device"], "arch": "x86_64"}}),
        ("EV-DEVICE", lambda told: {**told, "device": {**told["device"], "compiler": "v4"}}),
        ("EV-DEVICE", lambda told: {**told, "software": {**told["software"], "cuda": "None"}}),
        ("EV-CHECK", lambda told: {**told, "stand_in": "the provider tka1 on the CPU"}),
        ("EV-CHECK", lambda told: {**told, "new_goldens": {"../../device.h5": "0" * 64}}),
        ("EV-CHECK", lambda told: {**told, "checks": [*told["checks"], told["checks"][0]]}),
        ("EV-GOLDEN", lambda told: {**told, "goldens": dict.fromkeys(told["goldens"], "0" * 64)}),
    ],
)
def test_what_is_refused_is_refused_by_its_rule(
    told: dict[str, Any], admitted: Callable[..., None], rule: str, edit: Callable[[Any], Any]
):
    with pytest.raises(Refused) as caught:
        admitted(edit(told))
    assert caught.value.rule == rule


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,
        '{"schema": NaN}',
        '{"schema": 1' + "0" * 5000 + "}",
        '{"schema": "tracekit-gpu-evidence/1", "schema": "tracekit-gpu-evidence/1"}',
    ],
)
def test_what_is_hardly_json_is_refused(text: str):
    with pytest.raises(Refused) as caught:
        ev.parse_evidence(text)
    assert caught.value.rule == "EV-JSON"
