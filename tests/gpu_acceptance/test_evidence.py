"""Evidence of a device: what is refused, by rule; what is kept; and what kernels are called because of it."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tools.gpu_acceptance import evidence as ev
from tools.gpu_acceptance.checks import STAGES, Check, Refused
from tools.gpu_acceptance.tree import ROOT, file_digest, sources_here, sources_of
from tracekit.providers import registry
from tracekit.providers.tka1 import selftest


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
    checks = [Check(stage, stage, "not run", "why", provider="tka1-cuda") for stage in STAGES]
    checks[:1] = [
        Check("self-test", name, "held", "equal", "tka1-cuda", len(list(launches())), {"digest": digest})
        for name, digest, launches in (
            ("bf16", selftest.EXPECTED, selftest.launches),
            ("binary16 and binary32", selftest.EXPECTED_WIDE, selftest.wide_launches),
        )
    ]
    return ev.Evidence(
        commit=commit_of(tree),
        sources=sources_here(tree),
        device={"name": "a device", "arch": "sm_90", "driver": "13000", "compiler": "nvrtc 13.0"},
        stand_in="",
        software={
            **dict.fromkeys(("python", "torch", "numpy", "h5py", "cuda"), "3.12"),
            "hip": "None",
            "system": "Linux",
        },
        goldens={"g.h5": file_digest(tree / "traces" / "g.h5")},
        checks=tuple(checks),
        new_goldens={},
        seconds=1.5,
        when="2026-01-31T12:00:00Z",
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
    """With the seal of what it has become."""
    changed = {name: value for name, value in {**record, **changes}.items() if name != "seal"}
    return json.dumps({**changed, "seal": ev.seal(changed)})


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
        ("EV-SEAL", lambda r: json.dumps({**r, "seconds": 2.5})),
        ("EV-SEAL", lambda r: json.dumps({k: v for k, v in r.items() if k != "seal"})),
        ("EV-FIELD", lambda r: spoilt({k: v for k, v in r.items() if k != "goldens"})),
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
        ("EV-CHECK", lambda r: with_check(r, data={"digest": "0" * 64})),
        ("EV-CHECK", lambda r: with_check(r, provider="aiter")),
        ("EV-CHECK", lambda r: with_check(r, provider="tka1-hip")),
        ("EV-CHECK", lambda r: with_check(r, reason="")),
        ("EV-FIELD", lambda r: with_check(r, compared=True)),
        ("EV-STAGE", lambda r: spoilt(r, checks=r["checks"][:3])),
    ],
)
def test_malformed_evidence_is_refused(sound: ev.Evidence, rule: str, spoil):
    with pytest.raises(Refused) as caught:
        ev.parse_evidence(spoil(json.loads(sound.to_json())))
    assert caught.value.rule == rule


@pytest.mark.parametrize(
    ("rule", "changes"),
    [
        ("EV-STAND-IN", {"stand_in": "the provider tka1 on the CPU"}),
        ("EV-DEVICE", {"device": {"name": "a device", "arch": "sm_90"}}),
        (
            "EV-DEVICE",
            {"device": {"name": "a device", "arch": "gfx942", "driver": "1", "compiler": "hiprtc 7.0"}},
        ),
        ("EV-GOLDEN", {"goldens": {}}),
        ("EV-GOLDEN", {"goldens": {"g.h5": "0" * 64}}),
        ("EV-GOLDEN", {"goldens": {"../traces/g.h5": "0" * 64}}),
        ("EV-TREE", {"sources": "0" * 64}),
        ("EV-TREE", {"commit": "0" * 40}),
    ],
)
def test_evidence_of_something_else_is_not_admitted(sound: ev.Evidence, tree: Path, rule: str, changes):
    with pytest.raises(Refused) as caught:
        ev.admit(replace(sound, **changes), tree)
    assert caught.value.rule == rule


def test_a_self_test_that_did_not_hold_is_not_admitted(sound: ev.Evidence, tree: Path):
    """Neither half of it may be missing."""
    for number in (0, 1):
        for status in ("refuted", "not run"):
            checks = list(sound.checks)
            checks[number] = replace(checks[number], status=status)
            with pytest.raises(Refused) as caught:
                ev.admit(replace(sound, checks=tuple(checks)), tree)
            assert caught.value.rule == "EV-SELF-TEST"


def test_evidence_is_never_written_over_and_no_link_is_followed(sound: ev.Evidence, tree: Path):
    document = tree / "e.json"
    document.write_text(sound.to_json())
    kept = ev.keep(document, tree)
    assert ev.keep(document, tree) == kept  # the same again is no other evidence
    before = kept.read_text()
    document.write_text(replace(sound, seconds=2.5).to_json())
    for spoil in (lambda: None, lambda: (kept.unlink(), kept.symlink_to(tree / "elsewhere"))):
        spoil()
        with pytest.raises(Refused) as caught:
            ev.keep(document, tree)
        assert caught.value.rule == "EV-KEPT"
        assert not (tree / "elsewhere").exists()
    kept.unlink()
    kept.write_text(before)


def test_a_tree_is_no_commit(sound: ev.Evidence, tree: Path):
    """git names both by 40 digits."""
    command = ["git", "-C", str(tree), "rev-parse", "HEAD^{tree}"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    with pytest.raises(Refused) as caught:
        ev.admit(replace(sound, commit=done.stdout.strip()), tree)
    assert caught.value.rule == "EV-TREE"


def test_a_document_is_written_whole_or_not_at_all(tmp_path: Path):
    """A file that may have 10 bytes, as on a disk that is full: what was there stays, and nothing else."""
    target = tmp_path / "e.json"
    target.write_text("before")
    script = (
        "import resource, signal, sys; from pathlib import Path; from tools.gpu_acceptance import evidence\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN); resource.setrlimit(resource.RLIMIT_FSIZE, (10, 10))\n"
        "try: evidence.write(Path(sys.argv[1]), 'x' * 99)\n"
        "except OSError as error: sys.exit(error.strerror)"
    )
    command = [sys.executable, "-c", script, str(target)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.strip()) == (1, "File too large")
    assert [path.name for path in tmp_path.iterdir()] == ["e.json"]
    assert target.read_text() == "before"


def test_a_tree_that_is_not_its_commit_shows(sound: ev.Evidence, tree: Path):
    assert sources_of(sound.commit, tree) == sound.sources
    (tree / "kernels" / "k.h").write_text("other\n")
    assert sources_here(tree) != sound.sources


def test_the_command_says_which_rule_is_broken(sound: ev.Evidence, tree: Path, capsys):
    document = tree / "e.json"
    checks = tuple(replace(check, provider="tka1") for check in sound.checks)
    document.write_text(replace(sound, stand_in="a CPU", checks=checks).to_json())
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
