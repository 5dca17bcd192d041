"""Every form of TKA-1 that this machine can run, and the hash of the wild launches that each gives."""

import platform
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tools.portability import device, processes
from tracekit.providers.tka1 import Inputs, Outputs, Partials, native, numpy_form, selftest

Both = Callable[[Inputs], tuple[Outputs, Partials]]


@dataclass(frozen=True)
class Found:
    """What a form gave.

    Args:
        form: its name.
        how: what ran, in one clause.
        digests: of the bf16 launches, and of those in binary16 and binary32; empty where it did not run.
        missing: why it did not run, as tests/not_run.txt says it.
    """

    form: str
    how: str
    digests: tuple[str, ...] = ()
    missing: str = ""

    @property
    def right(self) -> bool:
        """Whether it gave the bits of the definition."""
        return self.digests == (selftest.EXPECTED, selftest.EXPECTED_WIDE)


def all_forms() -> Iterator[Found]:
    """Run every form."""
    yield _found("numpy", "an independent reading, no library", numpy_form.run, numpy_form.partials)
    for isa, form, how in (
        ("v4", "AVX-512", "hand-tiled"),
        ("v3", "AVX2", "hand-tiled, fma in hardware"),
        ("v1", "SSE2, own fma", "hand-tiled, no fma in hardware: an exact one out of binary64"),
    ):
        if missing := native.absent(isa):
            yield Found(form, how, missing=missing)
            continue
        library = native.load(isa)
        yield _found(form, how, library.run, library.partials)
        if isa == native.available()[0]:
            yield _found("clear C++", "number by number", library.clear_run, library.clear_partials)
    with tempfile.TemporaryDirectory() as folder:
        yield from _compiled(Path(folder))


def _compiled(folder: Path) -> Iterator[Found]:
    form, how = "SSE2, C library's fma", "the same with fmaf, the instruction masked by GLIBC_TUNABLES"
    if platform.libc_ver()[0] == "glibc" and platform.machine() == "x86_64":
        command = processes.libm_fmaf(folder)
        yield _both(form, how, lambda i: processes.launch(command, i, processes.WITHOUT_FMA))
    else:
        yield Found(form, how, missing="no C++ compiler with glibc on x86-64")
    form, how = "NEON", "hand-tiled, aarch64 emulated by qemu"
    if processes.neon_tools():
        emulated = processes.neon(folder)
        yield _both(form, how, lambda i: processes.launch(emulated, i))
    else:
        yield Found(form, how, missing="no aarch64 compiler or no emulator")
    body = device.host_body(folder)
    for order, name in enumerate(("forward", "reversed", "shuffled")):
        how = f"the threads of a block {name} between barriers, on the host"
        yield _both(f"GPU body, {name}", how, partial(body.run, order=order))
    form, how = "GPU body, PTX", "what nvcc makes of it for sm_80, interpreted"
    if device.nvcc():
        yield _both(form, how, device.compile_ptx(folder).run)
    else:
        yield Found(form, how, missing="no nvcc")


def _both(form: str, how: str, both: Both) -> Found:
    return _found(form, how, *device.halves(both))


def _found(form: str, how: str, run: Any, partials: Any) -> Found:
    digests = tuple(
        selftest.digest(run, partials, launches) for launches in (selftest.launches, selftest.wide_launches)
    )
    return Found(form, how, digests)
