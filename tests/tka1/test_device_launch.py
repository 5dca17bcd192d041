"""The host side of a launch on a GPU, without one: argument block, grids, memory, the driver's calls.

Kernels run here as host loops and as interpreted PTX in the very memory that the host side laid out. A driver
that only notes what it is given says nothing about bits, and is used for its calls alone.
"""

import ctypes
import re
import subprocess
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tka1.cases import CASES, case, causal, difference, gqa, lists
from tests.tka1.test_forms_agree import definition
from tools.portability import device
from tracekit.errors import ProviderFailed, Unavailable, Unsupported
from tracekit.model import DType
from tracekit.providers.base import Execution, Launch, Provider
from tracekit.providers.graphs.host import HostGraphs
from tracekit.providers.graphs.kind import GraphKind
from tracekit.providers.graphs.sequence import put_to_the_test
from tracekit.providers.placement import Fill
from tracekit.providers.portable import Tka1
from tracekit.providers.registry import create
from tracekit.providers.tka1 import FamilyInput, Inputs, Ranges, driver, numpy_form, selftest
from tracekit.providers.tka1 import runtime_compiler as rc
from tracekit.providers.tka1.abi import RUN_LEVEL, THREADS, GpuArgs, blocks
from tracekit.providers.tka1.inputs import DTYPES

torch = pytest.importorskip("torch")
from tracekit.providers import tka1_gpu  # noqa: E402
from tracekit.providers.tka1_device import DeviceLaunch  # noqa: E402
from tracekit.providers.tka1_gpu import Device, Tka1Cuda  # noqa: E402
from tracekit.testing import ProviderSuite, dense_call  # noqa: E402

needs_nvcc = pytest.mark.skipif(device.nvcc() is None, reason="no nvcc")
ENTRIES = ("tk_run_128", "tk_run_512", "tk_merge")


@pytest.fixture(scope="module")
def body(tmp_path_factory: pytest.TempPathFactory) -> device.HostBody:
    return device.host_body(tmp_path_factory.mktemp("body"))


@pytest.fixture(scope="module")
def ptx_texts(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return device.compile_ptx(tmp_path_factory.mktemp("ptx")).texts


# ---- the argument block


def fields(structure: type[ctypes.Structure], at: int = 0) -> set[tuple[int, int]]:
    """(offset, size) of every number and pointer of a structure."""
    found = set()
    for name, kind, *_ in structure._fields_:
        start, place = at + getattr(structure, name).offset, kind
        count = 1
        if issubclass(kind, ctypes.Array):
            place, count = kind._type_, kind._length_
        for i in range(count):
            where = start + i * ctypes.sizeof(place)
            if issubclass(place, ctypes.Structure):
                found |= fields(place, where)
            else:
                found.add((where, ctypes.sizeof(place)))
    return found


def disagreements(text: str, entry: str, structure: type[ctypes.Structure]) -> list[str]:
    """What the compiled kernel says of its one parameter that is not so of a structure."""
    said = re.search(rf"\.entry {entry}\(\s*\.param \.align (\d+) \.b8 (\w+)\[(\d+)\]\s*\)", text)
    assert said is not None
    wrong = []
    if (int(said[1]), int(said[3])) != (ctypes.alignment(structure), ctypes.sizeof(structure)):
        wrong.append(f"align {said[1]}, {said[3]} bytes")
    known = fields(structure)
    for kind, offset in re.findall(rf"ld\.param\.(\w+)\s+[^,]+, \[{said[2]}(?:\+(\d+))?\]", text):
        if (int(offset or 0), int(re.sub(r"\D", "", kind)) // 8) not in known:
            wrong.append(f"{kind} at {offset or 0}")
    return wrong


@needs_nvcc
@pytest.mark.parametrize("entry", ENTRIES)
def test_the_argument_block_is_that_of_the_compiled_kernels(ptx_texts: list[str], entry: str):
    for text in ptx_texts:
        assert disagreements(text, entry, GpuArgs) == []


@needs_nvcc
def test_a_field_that_moved_shows(ptx_texts: list[str]):
    """The control: the same fields with one of them elsewhere, or one too few."""
    names = [name for name, *_ in GpuArgs._fields_]
    kinds = dict(GpuArgs._fields_)
    moved = ["a", "first", "count", *(name for name in names if name not in ("a", "first", "count"))]
    for order in (moved, names[:-1]):
        wrong = type("Wrong", (ctypes.Structure,), {"_fields_": [(n, kinds[n]) for n in order]})
        assert disagreements(ptx_texts[0], "tk_run_128", wrong) != []


@needs_nvcc
def test_shared_memory_is_static_and_below_48_kib(ptx_texts: list[str]):
    for text in ptx_texts:
        sizes = [int(size) for size in re.findall(r"\.shared \.align \d+ \.b8 \w+\[(\d+)\]", text)]
        assert sizes
        assert max(sizes) <= 48 << 10
        assert ".extern .shared" not in text


# ---- the grid


def units(inputs: Inputs) -> list[tuple[int, int, int]]:
    """(row, head, run) that the blocks of the first kernel do, as kernels/tk_gpu.cu reads its place."""
    cut = blocks(inputs)
    group = inputs.q.shape[1] // inputs.kv_heads
    parts = cut.run_grid[1] // inputs.kv_heads
    done = []
    for y in range(cut.run_grid[1]):
        kv_head = y * -(-(2**32) // parts) >> 32
        first = (y - kv_head * parts) * cut.heads
        for head in range(first, min(first + cut.heads, group)):
            done += [
                (t, kv_head * group + head, run)
                for t in range(cut.run_grid[0])
                for run in range(cut.run_grid[2])
            ]
    return done


@settings(deadline=None, max_examples=60)
@given(
    st.integers(1, 3), st.integers(1, 5), st.integers(1, 21), st.sampled_from([8, 128, 129, 512]), st.data()
)
def test_every_row_head_and_run_has_one_block(rows: int, kv_heads: int, group: int, width: int, data):
    length = data.draw(st.integers(1, 5000))
    lo = np.array([data.draw(st.integers(0, length - 1)) for _ in range(rows)], np.int64)
    hi = np.array([data.draw(st.integers(0, length)) for _ in range(rows)], np.int64)
    zero = np.zeros((length, kv_heads, 1), np.uint16)
    family = FamilyInput((zero,), (np.zeros((length, kv_heads, width), np.uint16),), (0,), Ranges(lo, hi))
    q = np.zeros((rows, kv_heads * group, 1), np.uint16)
    inputs = Inputs(q, np.zeros(rows, np.int32), (family,), None, 0)
    cut, done = blocks(inputs), units(inputs)
    assert len(set(done)) == len(done) == rows * kv_heads * group * cut.runs
    assert cut.merge_grid == (rows, kv_heads * group, 1)
    size = 128 << RUN_LEVEL
    for low, high in zip(lo, hi, strict=True):
        if low < high:  # every key lies in a run of the grid
            assert cut.first[0] * size <= low
            assert high <= (cut.first[0] + cut.runs) * size


def test_a_grid_that_no_device_takes_is_refused():
    inputs = gqa(np.random.default_rng(0), rows=1, heads=2, kv_heads=1, dims=(1, 1), length=4)
    keys = np.zeros((1, 1, 1), np.uint16)
    family = FamilyInput(
        (keys,) * 2,
        (keys,) * 2,
        (0, (1 << 33) - 1),
        Ranges(np.array([0, (1 << 33) - 1]), np.array([1, 1 << 33])),
    )
    q, request = np.zeros((2, 2, 1), np.uint16), np.array([0, 1], np.int32)
    with pytest.raises(Unsupported) as caught:
        blocks(replace(inputs, q=q, request=request, families=(family,), sink=None))
    assert caught.value.rule == "K-GRID"


# ---- a launch in memory laid out for a device


def compute(launch: DeviceLaunch, inputs: Inputs):
    launch.load(inputs)
    launch.enqueue()
    assert launch.changed() is None
    return launch.read()


@pytest.mark.parametrize(
    ("name", "fill"),
    [(name, None) for name in CASES if name != "no rows"]
    + [(name, fill) for name in ("causal", "two families", "wild", "binary32") for fill in Fill],
)
def test_the_body_in_the_memory_of_a_launch_gives_the_bytes_of_the_numpy_form(
    body: device.HostBody, name: str, fill: Fill | None
):
    inputs, out, part = definition(name)
    launch = DeviceLaunch(device.HostLauncher(body), [inputs], "cpu", partials=True, fill=fill)
    got = compute(launch, inputs)
    assert difference(got[0], out) == ""
    assert difference(got[1], part) == ""
    if fill:
        launch.check()


@needs_nvcc
@pytest.mark.parametrize("name", ["causal", "two families", "binary32, wild", "no keys at all"])
def test_interpreted_ptx_over_the_grids_of_a_launch(ptx_texts: list[str], name: str):
    """Grids, argument block and memory are the host side's, the kernels nvcc's."""
    inputs = case(name).take(range(2))
    launcher = device.PtxLauncher(ptx_texts[DTYPES.index(inputs.dtype)])
    launch = DeviceLaunch(launcher, [inputs], "cpu", partials=True)
    launcher.arena = launch.arena.numpy()
    got = compute(launch, inputs)
    assert difference(got[0], numpy_form.run(inputs)) == ""
    assert difference(got[1], numpy_form.partials(inputs)) == ""


def test_the_self_test_passes_in_the_memory_of_a_launch(body: device.HostBody):
    def both(inputs: Inputs):
        return compute(DeviceLaunch(device.HostLauncher(body), [inputs], "cpu", partials=True), inputs)

    selftest.check(*device.halves(both), "the body on the host")


def three_lengths() -> list[Inputs]:
    """Calls of one shape whose rows read short, long and far KV, of one and of two requests."""
    rng = np.random.default_rng(5)
    some = [
        gqa(rng, rows=4, heads=4, kv_heads=2, dims=(32, 24), length=length, selection=causal(4, length))
        for length in (130, 2300, 70)
    ]
    family = some[2].families[0]
    two = FamilyInput(family.keys * 2, family.values * 2, (0, 0), family.selection)
    return [*some[:2], replace(some[2], families=(two,), request=np.array([0, 1, 0, 1], np.int32))]


def test_other_inputs_are_written_into_the_same_places(body: device.HostBody):
    calls = three_lengths()
    launch = DeviceLaunch(device.HostLauncher(body), calls, "cpu", partials=True)
    launch.load(calls[0])
    block = bytes(launch.block)
    for number in (1, 2, 0, 1):
        got = compute(launch, calls[number])
        assert bytes(launch.block) == block  # what a graph has frozen
        assert difference(got[0], numpy_form.run(calls[number])) == ""
        launch.poison(Fill.A5)


def test_inputs_that_were_not_written_show(body: device.HostBody):
    """The control: a launch whose inputs are still those of another call gives the other's answer."""
    calls = three_lengths()
    launch = DeviceLaunch(device.HostLauncher(body), calls, "cpu")
    stale = compute(launch, calls[0])
    assert difference(stale[0], numpy_form.run(calls[1])) != ""


def test_calls_that_cannot_share_a_launch_are_refused(body: device.HostBody):
    one = three_lengths()[0]
    wider = gqa(np.random.default_rng(0), rows=4, heads=4, kv_heads=2, dims=(32, 25), length=130)
    by_lists = replace(one, families=(replace(one.families[0], selection=lists([np.arange(3)] * 4)),))
    for other in (wider, by_lists, replace(one, scale_bits=0x3F800000), one.take([0, 1])):
        with pytest.raises(Unsupported) as caught:
            DeviceLaunch(device.HostLauncher(body), [one, other], "cpu")
        assert caught.value.rule == "P-GRAPH"
    launch = DeviceLaunch(device.HostLauncher(body), [one], "cpu")
    with pytest.raises(Unsupported) as caught:
        launch.load(three_lengths()[1])
    assert caught.value.rule == "P-GRAPH"


class Careless(device.HostLauncher):
    """Runs the body, and writes one byte more at `where(block)`."""

    where: Callable[[ctypes.Structure], int]

    def launch(self, kernel, grid, threads, block, stream):
        super().launch(kernel, grid, threads, block, stream)
        if kernel == "tk_merge":
            ctypes.memset(type(self).where(block), 0x5A, 1)


@pytest.mark.parametrize(
    ("where", "words"),
    [
        (lambda b: b.a.q, "an input"),
        (lambda b: b.a.q - 1, "an input"),
        (lambda b: b.a.lse - 1, "beside an output"),
        (lambda b: b.l - 4000, "beside an output"),
    ],
)
def test_a_write_beside_a_buffer_shows(
    body: device.HostBody, where: Callable[[ctypes.Structure], int], words: str
):
    inputs = case("causal")
    writer = type("Writer", (Careless,), {"where": staticmethod(where)})
    launch = DeviceLaunch(writer(body), [inputs], "cpu", fill=Fill.NANS)
    launch.load(inputs)
    launch.enqueue()
    with pytest.raises(ProviderFailed, match=words) as caught:
        launch.check()
    assert caught.value.rule == "P-CANARY"


def test_a_launch_goes_to_the_device_of_its_memory(monkeypatch: pytest.MonkeyPatch):
    """Whichever is current in the thread: the driver would launch on that one, with addresses of another."""
    current, launched = ["cuda:0"], []

    @contextmanager
    def on(where):
        before, current[0] = current[0], str(where)
        yield
        current[0] = before

    class Noting:
        def launch(self, kernel, grid, threads, block, stream):
            launched.append((kernel, current[0], stream))

    streams = {"cuda:0": 7, "cuda:1": 9}
    monkeypatch.setattr(torch.cuda, "device", on)
    monkeypatch.setattr(
        torch.cuda, "current_stream", lambda where: SimpleNamespace(cuda_stream=streams[str(where)])
    )
    inputs = case("causal")
    launch = DeviceLaunch(Noting(), [inputs], "cpu")
    launch.load(inputs)
    launch.arena = SimpleNamespace(device=torch.device("cuda:1"))
    launch.enqueue()
    assert launched == [("tk_run_128", "cuda:1", 9), ("tk_merge", "cuda:1", 9)]
    assert current == ["cuda:0"]


# ---- the provider, with the body on the host in the place of loaded code


class Emulated(Tka1Cuda):
    """`tka1-cuda` whose device is the host."""

    def __init__(self, body: device.HostBody) -> None:
        self.on = object.__new__(Device)
        self.on.code = lambda dtype: device.HostLauncher(body)

    def device(self) -> Device:
        return self.on


@pytest.fixture(scope="module")
def emulated(body: device.HostBody):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Device, "torch_name", "cpu")
        yield Emulated(body)


class TestEmulated(ProviderSuite):
    @pytest.fixture(autouse=True)
    def _made(self, emulated: Emulated) -> None:
        self.made = emulated

    def provider(self) -> Provider:
        return self.made


def test_a_launch_that_stays_is_put_to_the_test_as_a_graph(emulated: Emulated):
    """The sequence of `graph` on the stand-in: capture, other lengths, poison, restored inputs."""
    calls = [dense_call(lengths=(9, 4), seed=1), dense_call(lengths=(700, 600), new=(9, 4), seed=2)]
    calls += [dense_call(lengths=(13,), seed=3), calls[0]]
    launch = Launch(tuple(calls), Execution(graph=GraphKind.HOST))
    answer = put_to_the_test(emulated, launch, HostGraphs())
    for call, got in zip(calls, answer.tensors, strict=True):
        (want,) = Tka1().run(Launch((call,))).tensors
        assert got.out.same(want.out)
        assert got.lse.same(want.lse)


def test_what_it_promises_is_what_a_device_can_be_asked():
    provider = object.__new__(Tka1Cuda)
    assert provider.capabilities().graphs == {GraphKind.DEVICE}
    assert "graph" in provider.advertised()
    assert not provider.advertised() & {"threads", "host-graph", "schedule"}
    assert provider.identity() == Tka1().identity()


def test_a_device_with_wrong_bits_never_answers(monkeypatch: pytest.MonkeyPatch, body: device.HostBody):
    """One bit off in one partial: the self-test refuses it, and every claim is then inconclusive."""
    wrong = Emulated(body).on
    wrong.name, wrong.arch = "a device", "sm_90"
    wrong.compiler = rc.Compiler("nvrtc", "13.0", None)
    right = wrong.run
    monkeypatch.setattr(Device, "torch_name", "cpu")

    def flipped(launch: Inputs, fill: Fill | None = None):
        out, part = right(launch, fill)
        part.acc.flat[0] ^= 1
        return out, part

    wrong.run = flipped
    monkeypatch.setattr(tka1_gpu, "Device", lambda vendor: wrong)
    tka1_gpu.verified.cache_clear()
    with pytest.raises(ProviderFailed, match=r"a device \(sm_90, nvrtc 13\.0\) does not give") as caught:
        tka1_gpu.verified("cuda")
    assert caught.value.rule == "K-SELFTEST"
    wrong.run = right
    assert tka1_gpu.verified("cuda") is wrong
    tka1_gpu.verified.cache_clear()


# ---- the driver's calls

FAKE = """
#include <string.h>
static unsigned char seen[4096]; static unsigned grid[7]; static void* to;
int {load}(void** module, const void* code) {{
  if (*(const char*)code == '!') return 209; *module = (void*)7; return 0; }}
int {function}(void** f, void* module, const char* name) {{
  *f = (void*)(size_t)(module == (void*)7 ? strlen(name) : 0); return 0; }}
int {launch}(void* f, unsigned a, unsigned b, unsigned c, unsigned x, unsigned y, unsigned z, unsigned shared,
             void* stream, void** parameters, void** extra) {{
  unsigned g[7] = {{a, b, c, x, y, z, shared}}; memcpy(grid, g, sizeof g); to = stream;
  memcpy(seen, parameters[0], {size}); return extra != 0 || f != (void*)8; }}
int {version}(int* v) {{ *v = 13000; return 0; }}
{error}
const void* said_seen(void) {{ return seen; }} const void* said_grid(void) {{ return grid; }}
void* said_stream(void) {{ return to; }}
"""
ERRORS = {
    "cuda": 'int cuGetErrorName(int e, const char** t) { *t = e == 209 ? "NO_BINARY" : 0; return 0; }',
    "hip": 'const char* hipGetErrorName(int e) { return e == 209 ? "NO_BINARY" : 0; }',
}


@pytest.mark.parametrize("vendor", ["cuda", "hip"])
def test_the_driver_gets_grid_block_and_stream(vendor: driver.Vendor, tmp_path: Path):
    """A driver that only notes its calls: no evidence of bits, and none is taken from it."""
    calls = driver._CALLS[vendor]
    names = {n: getattr(calls, n) for n in ("load", "function", "launch", "version")}
    source, library = tmp_path / "fake.c", tmp_path / "libfake.so"
    source.write_text(FAKE.format(**names, size=ctypes.sizeof(GpuArgs), error=ERRORS[vendor]))
    subprocess.run(["cc", "-shared", "-fPIC", str(source), "-o", str(library)], check=True)
    opened = driver.open_driver(vendor, [str(tmp_path / "missing.so"), str(library)])
    assert opened.version == "13000"

    block = GpuArgs(runs=5, parts_inverse=1 << 40)
    opened.load(b"code").launch("tk_merge", (3, 2, 1), THREADS, block, 1 << 40)
    for name in ("said_seen", "said_grid", "said_stream"):
        getattr(opened.handle, name).restype = ctypes.c_void_p
    assert ctypes.string_at(opened.handle.said_seen(), ctypes.sizeof(block)) == bytes(block)
    assert np.frombuffer(ctypes.string_at(opened.handle.said_grid(), 28), np.uint32).tolist() == [
        *(3, 2, 1),
        *(THREADS, 1, 1),
        0,
    ]
    assert opened.handle.said_stream() == 1 << 40
    with pytest.raises(ProviderFailed, match="NO_BINARY") as caught:
        opened.load(b"!")
    assert caught.value.rule == "K-DRIVER"


@pytest.mark.parametrize("vendor", ["cuda", "hip"])
def test_a_missing_driver_is_one_sentence(vendor: driver.Vendor):
    with pytest.raises(Unavailable, match=f"no driver of {vendor.upper()}") as caught:
        driver.open_driver(vendor, ["libnowhere.so.1"])
    assert caught.value.rule == "K-NO-DRIVER"


def test_the_driver_of_torchs_rocm_wheel_is_found_first(tmp_path: Path):
    library = tmp_path / "torch" / "lib" / "libamdhip64.so"
    library.parent.mkdir(parents=True)
    library.touch()
    assert driver.candidates("hip", [str(tmp_path)])[0] == str(library)
    assert driver.candidates("cuda", [str(tmp_path)]) == ["libcuda.so.1"]


@pytest.mark.parametrize("name", ["tka1-cuda", "tka1-hip"])
def test_without_a_device_the_provider_is_unavailable(no_device: None, name: str):
    with pytest.raises(Unavailable, match="sees no") as caught:
        create(name)
    assert caught.value.rule == "P-DEVICE"
    assert DType.BFLOAT16 in DTYPES
