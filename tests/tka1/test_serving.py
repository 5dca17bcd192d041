"""Which form and build answers; the self-test at load; the caller's floating-point mode."""

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import tracekit
from tests.tka1.cases import case, difference
from tracekit import env
from tracekit.errors import ProviderFailed, Unavailable, Unsupported
from tracekit.providers import tka1
from tracekit.providers.tka1 import arithmetic as ar
from tracekit.providers.tka1 import native, numpy_form, selftest
from tracekit.providers.tka1.native import Library

COMPILER = shutil.which("c++")
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")


@pytest.fixture
def no_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An installation from a machine without a compiler."""
    monkeypatch.setattr(tracekit, "__path__", [str(tmp_path)])


def test_the_best_build_serves(best: Library):
    served = tka1.serving()
    assert (served.form, served.isa) == ("native", native.available()[0])
    assert served.library == str(best.path)


def test_any_build_can_be_asked_for(build: Library):
    inputs = case("causal")
    assert tka1.serving(isa=build.isa).isa == build.isa
    assert difference(tka1.attention(inputs, isa=build.isa), tka1.attention(inputs, form="numpy")) == ""


def test_the_environment_forces_a_build(best: Library, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TRACEKIT_ISA", "v1")
    env.settings.cache_clear()
    try:
        assert tka1.serving().isa == "v1"
    finally:
        monkeypatch.undo()
        env.settings.cache_clear()


@pytest.mark.usefixtures("no_library")
def test_without_a_library_the_numpy_form_serves():
    inputs = case("two families")
    assert tka1.serving() == tka1.Served("numpy", None, None)
    assert difference(tka1.attention(inputs), numpy_form.run(inputs)) == ""
    assert difference(tka1.partials(inputs), numpy_form.partials(inputs)) == ""
    for ask in ({"form": "native"}, {"isa": "v3"}):
        with pytest.raises(Unavailable) as error:
            tka1.attention(inputs, **ask)
        assert error.value.rule == "K-NO-LIBRARY"


def test_the_numpy_form_gives_the_stored_digest():
    assert selftest.digest(numpy_form.run, numpy_form.partials) == selftest.EXPECTED
    wide = selftest.digest(numpy_form.run, numpy_form.partials, selftest.wide_launches)
    assert wide == selftest.EXPECTED_WIDE


def test_the_launches_of_the_self_test_come_from_integers():
    """splitmix64 as its authors wrote it: nothing that a library may change decides the launches."""
    mask = 2**64 - 1
    for n, got in enumerate(selftest._mix(3, 100), 1):
        x = (n * 0x9E3779B97F4A7C15 + (3 << 32)) & mask
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & mask
        x = (x ^ x >> 27) * 0x94D049BB133111EB & mask
        assert int(got) == x ^ x >> 31


def test_outputs_alone_would_not_see_four_ulp(monkeypatch: pytest.MonkeyPatch):
    """Why the self-test hashes partials: O and LSE of all its launches stay the same."""
    launches = list(selftest.launches())
    want = [(numpy_form.run(i), numpy_form.partials(i)) for i in launches]
    c6, c5, c4, c3, c2 = ar.EXP
    monkeypatch.setattr(ar, "EXP", (c6, c5, c4, c3 + 4, c2))
    got = [(numpy_form.run(i), numpy_form.partials(i)) for i in launches]

    assert all(difference(a, b) == "" for (a, _), (b, _) in zip(got, want, strict=True))
    assert any(difference(a, b) != "" for (_, a), (_, b) in zip(got, want, strict=True))


def compiled(folder: Path, edit: tuple[str, str, str] | None) -> Path:
    """Build the packaged sources, after one replacement, without the instruction sets of the other builds."""
    source = folder / "src"
    shutil.copytree(Path(__file__).parents[2] / "kernels", source)
    if edit:
        path, old, new = source / edit[0], edit[1], edit[2]
        assert path.read_text().count(old) == 1
        path.write_text(path.read_text().replace(old, new))
    library = folder / "libtka1_v1.so"
    flags = ["-std=c++17", "-O0", "-ffp-contract=off", "-fPIC", "-shared", "-pthread"]
    subprocess.run([str(COMPILER), *flags, str(source / "tk_host.cpp"), "-o", str(library)], check=True)
    return library


@needs_compiler
def test_the_self_test_catches_an_exp_that_is_four_ulp_off(tmp_path: Path):
    """Planted in one coefficient; the unchanged sources pass, so it is the change that is caught."""
    sound = compiled(tmp_path / "sound", None)
    assert native.load_file(sound, "v1").isa == "v1"

    broken = compiled(tmp_path / "broken", ("tk_math.h", "TK_EXP_C3 0x3E2AAA49u", "TK_EXP_C3 0x3E2AAA4Du"))
    with pytest.raises(ProviderFailed) as error:
        native.load_file(broken, "v1")
    assert error.value.rule == "K-SELFTEST"
    assert str(broken) in str(error.value)
    assert "TRACEKIT_ISA" in str(error.value)


@needs_compiler
@pytest.mark.parametrize(
    "edit",
    [
        ("tk_args.h", "  uint32_t* lse; ", "  uint32_t* more; uint32_t* lse; "),
        ("tk_host.cpp", "int tka1_clear(", "int tka1_of_another_time("),
    ],
    ids=["other arguments", "an entry less"],
)
def test_a_library_of_other_sources_is_refused(tmp_path: Path, edit: tuple[str, str, str]):
    other = compiled(tmp_path, edit)
    with pytest.raises(ProviderFailed) as error:
        native.load_file(other, "v1")
    assert error.value.rule == "K-ABI"


@needs_compiler
def test_fast_math_is_refused_by_the_sources():
    source = Path(__file__).parents[2] / "kernels" / "tk_host.cpp"
    command = [str(COMPILER), "-std=c++17", "-ffast-math", "-fsyntax-only", str(source)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode != 0
    assert "TKA-1 promises bits" in result.stderr


def test_the_sources_are_installed_with_the_package(best: Library):
    """Run-time compilation reads them from there."""
    installed = best.path.parent / "src"
    kernels = Path(__file__).parents[2] / "kernels"
    names = sorted(p.name for p in kernels.glob("tk_*"))
    assert sorted(p.name for p in installed.iterdir()) == names
    assert all((installed / name).read_bytes() == (kernels / name).read_bytes() for name in names)


@pytest.fixture
def flushing() -> Iterator[None]:
    """The caller flushes subnormal numbers to zero, as a training job may."""
    torch = pytest.importorskip("torch")
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor has no such mode")
    yield
    torch.set_flush_denormal(False)


def flushes() -> bool:
    return bool((np.full(1, 2.0**-126, np.float32) * np.float32(0.5) == 0).all())


@pytest.mark.parametrize("threads", [1, 2])
def test_the_mode_of_the_caller_does_not_show_and_is_restored(
    build: Library, threads: int, request: pytest.FixtureRequest
):
    """S1. The case has subnormal sums, which the mode would flush."""
    inputs = case("underflowing")
    want = build.run(inputs, 1), build.partials(inputs, 1)
    request.getfixturevalue("flushing")
    assert flushes()

    got = build.run(inputs, threads), build.partials(inputs, threads)

    assert flushes()
    assert difference(got[0], want[0]) == ""
    assert difference(got[1], want[1]) == ""


@pytest.mark.usefixtures("flushing")
def test_the_numpy_form_refuses_to_flush():
    """S1: it computes in the mode of its caller and cannot change it."""
    with pytest.raises(Unsupported) as error:
        numpy_form.run(case("causal"))
    assert error.value.rule == "S1-FLUSH"
