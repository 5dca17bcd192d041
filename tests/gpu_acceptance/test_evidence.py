"""Evidence of a device: what is refused, by rule; what is kept; and what kernels are called because of it."""

import json
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from tools.gpu_acceptance import evidence as ev
from tracekit.providers import registry

ROOT = ev.ROOT


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A repository with the folders that evidence speaks of, and a golden."""
    for name in ("tracekit/a.py", "kernels/k.h", "tools/gpu_acceptance/t.py", "traces/g.h5"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{name}\n")
    for command in (
        ["init", "-q"],
        ["add", "-A"],
        ["-c", "user.name=n", "-c", "user.email=e@example.org", "commit", "-qm", "c"],
    ):
        subprocess.run(["git", "-C", str(tmp_path), *command], check=True, capture_output=True)
    return tmp_path


def commit_of(tree: Path) -> str:
    done = subprocess.run(["git", "-C", str(tree), "rev-parse", "HEAD"], check=True, capture_output=True)
    return done.stdout.decode().strip()


@pytest.fixture
def sound(tree: Path) -> ev.Evidence:
    checks = [ev.Check(stage, stage, "not run", "why", provider="tka1-cuda") for stage in ev.STAGES]
    checks[0] = ev.Check("self-test", "bf16", "held", "equal", provider="tka1-cuda", compared=2)
    return ev.Evidence(
        commit=commit_of(tree),
        sources=ev.sources_here(tree),
        device={"name": "a device", "arch": "sm_90", "driver": "13000", "compiler": "nvrtc 13.0"},
        stand_in="",
        software={"python": "3.12"},
        goldens={"g.h5": ev.file_digest(tree / "traces" / "g.h5")},
        checks=tuple(checks),
        new_goldens={},
        seconds=1.5,
    )


def test_sound_evidence_comes_back_and_is_kept(sound: ev.Evidence, tree: Path):
    assert ev.parse_evidence(sound.to_json()) == sound
    assert sound.providers == {"tka1-cuda"}
    document = tree / "e.json"
    document.write_text(sound.to_json())
    kept = ev.keep(document, tree)
    assert kept.parent == tree / "traces" / "evidence"
    assert kept.name == f"sm_90-{sound.commit[:12]}.json"
    assert kept.read_text() == document.read_text()


def spoilt(record: dict, **changes) -> str:
    return json.dumps({**record, **changes})


def with_check(record: dict, **changes) -> str:
    first, *rest = record["checks"]
    return spoilt(record, checks=[{**first, **changes}, *rest])


@pytest.mark.parametrize(
    ("rule", "spoil"),
    [
        ("EV-JSON", lambda r: json.dumps(r)[:-2]),
        ("EV-JSON", lambda r: "[]"),
        ("EV-JSON", lambda r: json.dumps(r) + " " * ev.LARGEST),
        ("EV-SCHEMA", lambda r: spoilt(r, schema="tracekit-gpu-evidence/0")),
        ("EV-FIELD", lambda r: json.dumps({k: v for k, v in r.items() if k != "goldens"})),
        ("EV-FIELD", lambda r: spoilt(r, verdict="all fine")),
        ("EV-FIELD", lambda r: spoilt(r, seconds="10")),
        ("EV-FIELD", lambda r: spoilt(r, device={"name": 1})),
        ("EV-COMMIT", lambda r: spoilt(r, commit="main")),
        ("EV-COMMIT", lambda r: spoilt(r, commit=r["commit"] + "0")),
        ("EV-DIGEST", lambda r: spoilt(r, sources="0")),
        ("EV-DIGEST", lambda r: spoilt(r, goldens={"g.h5": "x" * 64})),
        ("EV-CHECK", lambda r: spoilt(r, checks=["held"])),
        ("EV-CHECK", lambda r: with_check(r, status="fine")),
        ("EV-CHECK", lambda r: with_check(r, stage="mood")),
        ("EV-CHECK", lambda r: with_check(r, compared=0)),
        ("EV-CHECK", lambda r: with_check(r, reason="")),
        ("EV-FIELD", lambda r: with_check(r, compared=True)),
        ("EV-STAGE", lambda r: spoilt(r, checks=r["checks"][:3])),
    ],
)
def test_malformed_evidence_is_refused(sound: ev.Evidence, rule: str, spoil):
    with pytest.raises(ev.Refused) as caught:
        ev.parse_evidence(spoil(json.loads(sound.to_json())))
    assert caught.value.rule == rule


@pytest.mark.parametrize(
    ("rule", "changes"),
    [
        ("EV-STAND-IN", {"stand_in": "the provider tka1 on the CPU"}),
        ("EV-DEVICE", {"device": {"name": "a device", "arch": "sm_90"}}),
        ("EV-GOLDEN", {"goldens": {}}),
        ("EV-GOLDEN", {"goldens": {"g.h5": "0" * 64}}),
        ("EV-GOLDEN", {"goldens": {"../traces/g.h5": "0" * 64}}),
        ("EV-TREE", {"sources": "0" * 64}),
        ("EV-TREE", {"commit": "0" * 40}),
    ],
)
def test_evidence_of_something_else_is_not_admitted(sound: ev.Evidence, tree: Path, rule: str, changes):
    with pytest.raises(ev.Refused) as caught:
        ev.admit(replace(sound, **changes), tree)
    assert caught.value.rule == rule


def test_a_self_test_that_did_not_hold_is_not_admitted(sound: ev.Evidence, tree: Path):
    for status in ("refuted", "not run"):
        first = replace(sound.checks[0], status=status)
        with pytest.raises(ev.Refused) as caught:
            ev.admit(replace(sound, checks=(first, *sound.checks[1:])), tree)
        assert caught.value.rule == "EV-SELF-TEST"


def test_a_tree_that_is_not_its_commit_shows(sound: ev.Evidence, tree: Path):
    assert ev.sources_of(sound.commit, tree) == sound.sources
    (tree / "kernels" / "k.h").write_text("other\n")
    assert ev.sources_here(tree) != sound.sources


def test_the_command_says_which_rule_is_broken(sound: ev.Evidence, tree: Path, capsys):
    document = tree / "e.json"
    document.write_text(replace(sound, stand_in="a CPU").to_json())
    assert ev.main(["keep", str(document)]) == 2
    assert "EV-STAND-IN" in capsys.readouterr().err
    assert not (tree / "traces" / "evidence").exists()


def kept() -> list[ev.Evidence]:
    return [ev.parse_evidence(path.read_text()) for path in sorted(ev.KEPT.glob("*.json"))]


def test_kept_evidence_is_about_a_device_and_the_goldens_of_this_tree():
    for one in kept():
        assert not one.stand_in
        ev.check_goldens(one)


def test_kernels_are_called_untested_until_kept_evidence_names_them():
    """`registry.UNTESTED` and traces/evidence say the same."""
    tested = frozenset().union(*(one.providers for one in kept()))
    assert not tested & registry.UNTESTED.keys()
