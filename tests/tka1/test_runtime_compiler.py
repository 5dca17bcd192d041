"""Run-time compilation: what NVRTC makes, interpreted; the cache; refusals by name."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import tracekit
from tools.portability import device
from tracekit import env
from tracekit.errors import ProviderFailed, Unavailable
from tracekit.providers.tka1 import runtime_compiler as rc
from tracekit.providers.tka1 import selftest
from tracekit.providers.tka1.inputs import DTYPES


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    monkeypatch.setenv("TRACEKIT_CACHE", str(tmp_path))
    env.settings.cache_clear()
    yield tmp_path / "kernels"
    monkeypatch.undo()
    env.settings.cache_clear()


@pytest.fixture
def nvrtc() -> rc.Compiler:
    if rc.find_library("nvrtc") is None:
        pytest.skip("no NVRTC library")
    return rc.open_compiler("nvrtc")


def test_what_nvrtc_makes_gives_the_bits_of_the_definition(nvrtc: rc.Compiler, cache: Path):
    """Its PTX, interpreted; no GPU runs here."""
    body = device.PtxBody([nvrtc.code("compute_80", n, ptx=True).decode() for n in range(len(DTYPES))])
    run, partials = device.halves(body.run)
    assert selftest.digest(run, partials) == selftest.EXPECTED
    assert selftest.digest(run, partials, selftest.wide_launches) == selftest.EXPECTED_WIDE
    assert len(list(cache.iterdir())) == len(DTYPES)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
def test_a_cubin_is_made_once(nvrtc: rc.Compiler, cache: Path, arch: str):
    code = nvrtc.code(arch, 0)
    assert code[:4] == b"\x7fELF"
    (kept,) = cache.iterdir()
    kept.write_bytes(b"from the cache")
    assert nvrtc.code(arch, 0) == b"from the cache"
    assert nvrtc.code(arch, 1)[:4] == b"\x7fELF"  # another dtype is other code
    assert len(list(cache.iterdir())) == 2


def test_a_cache_that_cannot_be_written_costs_a_compilation_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, cache: Path
):
    monkeypatch.setattr(rc.Compiler, "_compile", lambda self, texts, options, getter: b"code")
    cache.write_text("a file where the folder should be")
    assert rc.Compiler("nvrtc", "13.0", None).code("sm_90", 0) == b"code"


def test_code_that_does_not_fit_on_the_disk_leaves_nothing(tmp_path: Path):
    script = (
        "import resource, signal, sys; from pathlib import Path\n"
        "from tracekit.providers.tka1.runtime_compiler import _write\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN); resource.setrlimit(resource.RLIMIT_FSIZE, (10, 10))\n"
        "try: _write(Path(sys.argv[1]), b'x' * 99)\n"
        "except OSError as error: sys.exit(error.strerror)"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "a.bin")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.strip()) == (1, "File too large")
    assert list(tmp_path.iterdir()) == []


def test_the_words_of_the_compiler_are_shown(nvrtc: rc.Compiler, cache: Path):
    with pytest.raises(ProviderFailed, match="sm_1") as error:
        nvrtc.code("sm_1", 0)
    assert error.value.rule == "K-COMPILE"
    assert not cache.exists()


def test_a_missing_compiler_is_refused_by_name(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(rc, "find_library", lambda kind: None)
    with pytest.raises(Unavailable, match="GPU wheels") as error:
        rc.open_compiler("hiprtc")
    assert error.value.rule == "K-NO-COMPILER"


def test_a_library_of_a_wheel_is_found(tmp_path: Path):
    library = tmp_path / "nvidia" / "cu13" / "lib" / "libnvrtc.so.13"
    library.parent.mkdir(parents=True)
    library.touch()
    library.with_name("libnvrtc.alt.so.13").touch()
    assert rc.find_library("nvrtc", [str(tmp_path)]) == library


def test_an_installation_without_sources_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(tracekit, "__path__", [str(tmp_path)])
    with pytest.raises(Unavailable) as error:
        rc.sources()
    assert error.value.rule == "K-NO-SOURCE"
