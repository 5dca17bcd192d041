"""The stages about bits: self-test, device against CPU, claims, graphs, fresh processes, new goldens."""

import hashlib
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import cycle, islice
from pathlib import Path

import numpy as np

import tracekit
from tools.gpu_acceptance.checks import GPU_KERNELS
from tools.gpu_acceptance.run import Run
from tools.gpu_acceptance.tree import ROOT
from tracekit.errors import Unavailable
from tracekit.model import AttentionCall, DType, Recording
from tracekit.providers.base import Execution, Launch, Provider
from tracekit.providers.graphs.base import Capturable
from tracekit.providers.graphs.kind import GraphKind
from tracekit.providers.graphs.sequence import BACKENDS
from tracekit.providers.placement import Fill
from tracekit.providers.registry import create
from tracekit.providers.tka1 import Inputs, Outputs, Partials, native, selftest
from tracekit.store import write_trace
from tracekit.testing import dense_call, record, sparse_call
from tracekit.testing.build import complete

PROCESSES = 3
_TOGETHER = 4
"""Traces that one replay gets: fewer starts of a kernel's process, and the end of the time is still seen."""

REPLAYS = 200
NEW_GOLDENS = 2_000_000
"""Bytes of all new goldens of a run."""


def self_test(run: Run) -> None:
    """Hash the wild launches on the device."""
    both = _forms(run)
    for name, launches, expected in (
        ("bf16", selftest.launches, selftest.EXPECTED),
        ("binary16 and binary32", selftest.wide_launches, selftest.EXPECTED_WIDE),
    ):
        got = selftest.digest(*both, launches)
        status = "held" if got == expected else "refuted"
        reason = f"{got[:16]}, the definition gives {expected[:16]}"
        count = len(list(launches()))
        run.add("self-test", name, status, reason, provider=run.subject, compared=count, data={"digest": got})


def _forms(run: Run) -> tuple[selftest.Run, selftest.RunPartials]:
    if run.stand_in:
        library = native.load(native.available()[0])
        return library.run, library.partials
    from tracekit.providers.tka1_gpu import Device

    device = Device("hip" if run.subject == "tka1-hip" else "cuda")

    def answers(inputs: Inputs, _: int) -> Outputs:
        return device.run(inputs)[0]

    def partials(inputs: Inputs, _: int) -> Partials:
        return device.run(inputs)[1]

    return answers, partials


def device(run: Run) -> None:
    """Compare the device with the CPU, in bits, on every call of every golden that it takes."""
    subject, reference = create(run.subject), create("tka1")
    for path in run.traces:
        with run.failures("device", path.name, run.subject), tracekit.open(path) as trace:
            elements, differing, refused = 0, 0, 0
            for call in trace:
                fresh = replace(call, launch=None)
                if subject.refuses(fresh):
                    refused += 1
                    continue
                (ours,), (theirs,) = (one.run(Launch((fresh,))).tensors for one in (subject, reference))
                assert ours.lse is not None
                assert theirs.lse is not None
                for a, b in ((ours.out.data, theirs.out.data), (ours.lse.data, theirs.lse.data)):
                    elements += a.size
                    differing += int(np.count_nonzero(a != b))
            status = "refuted" if differing else "held" if elements else "not applicable"
            reason = f"{differing:,} of {elements:,} values differ from the CPU; {refused} calls refused"
            data = {"elements": elements, "differing": differing, "refused": refused}
            run.add("device", path.name, status, reason, provider=run.subject, compared=elements, data=data)


def claims(run: Run) -> None:
    """Replay every golden on TKA-1 on the device, and on each GPU provider that is installed."""
    for provider in (run.subject, *GPU_KERNELS):
        if not _there(run, "claims", provider):
            continue
        for start in range(0, len(run.traces), _TOGETHER):
            some = run.traces[start : start + _TOGETHER]
            names = ", ".join(path.name for path in some)
            if run.left < 30:
                run.add("claims", names, "not run", "no time was left", provider=provider)
                continue
            with run.failures("claims", names, provider):
                _replay(run, provider, some, probe=provider != run.subject)


def _there(run: Run, stage: str, provider: str) -> bool:
    """Whether a kernel can be made here; if not, its check says why, whatever its library did on import."""
    made = []
    with run.failures(stage, "all", provider):
        try:
            made.append(create(provider))
        except Unavailable as error:
            run.add(stage, "all", "not run", str(error), provider=provider)
    return bool(made)


def _replay(run: Run, provider: str, paths: Sequence[Path], *, probe: bool) -> None:
    """Judge what the kernel promises; with `probe` also observe the rest."""
    report = tracekit.replay(paths, provider=provider, probe=probe, timeout=min(120.0, run.left))
    for error in report.errors:
        run.add("claims", Path(error["trace"]).name, "inconclusive", str(error["message"]), provider=provider)
    for verdict in report.verdicts:
        data = {
            "claim": verdict.claim,
            "calls": verdict.calls,
            "variants": verdict.variants,
            "differences": verdict.differences.elements,
            "max_ulps": verdict.differences.max_ulps,
            "control": verdict.control,
            "first": None if verdict.first is None else verdict.first.to_dict(),
        }
        name, elements = f"{verdict.claim} on {Path(verdict.trace).name}", verdict.compared.elements
        run.add(
            "claims",
            name,
            verdict.status.value,
            verdict.reason,
            provider=provider,
            compared=elements,
            data=data,
        )


def graphs(run: Run) -> None:
    """Capture once and replay 200 times with changing inputs; then the same bits in fresh processes."""
    provider = create(run.subject)
    kind = GraphKind.HOST if run.stand_in else GraphKind.DEVICE
    if kind not in provider.capabilities().graphs or not isinstance(provider, Capturable):
        run.add(
            "graphs", "soak", "not run", f"{run.subject} is not captured on the {kind}", provider=run.subject
        )
    else:
        with run.failures("graphs", "soak", run.subject):
            _soak(run, provider, kind)
    trace = run.traces[0]
    said = {fresh(run, trace).split()[-1] for _ in range(PROCESSES)}
    status = "held" if len(said) == 1 else "refuted"
    reason = f"{len(said)} different answers in {PROCESSES} fresh processes"
    data = {"launches": PROCESSES, "differing": len(said) - 1}
    run.add("graphs", "fresh processes", status, reason, provider=run.subject, compared=PROCESSES, data=data)


def _soak(run: Run, provider: Provider, kind: GraphKind) -> None:
    calls = [
        dense_call(lengths=lengths, new=(9, 4), heads=8, head_dim=64, sink=True, seed=seed)
        for seed, lengths in enumerate(((40, 8), (1300, 700), (9, 300)))
    ]
    eager = [provider.run(Launch((call,))).tensors[0] for call in calls]
    backend = BACKENDS[kind]()
    pool = backend.pool()
    assert isinstance(provider, Capturable)
    static = provider.static(calls, Execution(graph=kind), pool)
    static.load(calls[0])
    backend.warm_up(static.enqueue)
    backend.wait()
    graph = backend.capture(static.enqueue, pool)
    wrong = 0
    turns = islice(zip(cycle(range(len(calls))), cycle(Fill), strict=False), REPLAYS)
    for turn, (number, fill) in enumerate(turns):
        static.load(calls[number])
        static.poison(fill)
        if turn % 10 == 0:
            backend.unrelated(pool, fill)
        graph.replay()
        backend.wait()
        got, want = static.read(), eager[number]
        same = (
            got.out.same(want.out) and got.lse is not None and want.lse is not None and got.lse.same(want.lse)
        )
        wrong += not same or static.changed() is not None
    status = "refuted" if wrong else "held"
    reason = f"{wrong} of {REPLAYS} replays differ from eager launches"
    data = {"launches": REPLAYS, "differing": wrong}
    name = f"soak ({kind})"
    run.add("graphs", name, status, reason, provider=run.subject, compared=REPLAYS, data=data)


def fresh(run: Run, trace: Path, *prefix: str) -> str:
    """Return what a fresh process prints about a trace, its digest last; RuntimeError where it fails."""
    command = [*prefix, sys.executable, "-m", "tools.gpu_acceptance.stages", run.subject, str(trace)]
    done = subprocess.run(
        command,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=max(10.0, min(180.0, run.left)),
    )
    if done.returncode:
        raise RuntimeError((done.stdout + done.stderr).strip()[-4000:])
    return done.stdout.strip()


def answers_digest(provider: Provider, path: Path) -> str:
    """Return the SHA-256 of the answers to the calls of a trace."""
    sha = hashlib.sha256()
    with tracekit.open(path) as trace:
        for call in trace:
            (tensors,) = provider.run(Launch((replace(call, launch=None),))).tensors
            sha.update(tensors.out.data.tobytes() + (tensors.lse.data.tobytes() if tensors.lse else b""))
    return sha.hexdigest()


def new_goldens(run: Run) -> None:
    """Record what each kernel that runs here answers to fixed calls, for machines without a device."""
    room = NEW_GOLDENS
    for name in (run.subject, *GPU_KERNELS):
        if not _there(run, "goldens", name):
            continue
        with run.failures("goldens", name, name):
            provider = create(name)
            calls = [
                record(call, provider, "tools.gpu_acceptance")
                for call in fixed_calls()
                if provider.refuses(call) is None
            ]
            path = run.folder / f"device.{name}.h5"
            summary = write_trace(path, Recording(ledger=complete(calls)), calls)
            room -= path.stat().st_size
            if room < 0 or tracekit.verify(path):
                path.unlink()
                run.add("goldens", name, "not run", f"more than {NEW_GOLDENS:,} bytes in all", provider=name)
                continue
            run.made.append(path)
            reason = (
                f"{len(calls)} calls, {path.stat().st_size:,} bytes, content {summary.content_digest[:16]}"
            )
            run.add("goldens", path.name, "measured", reason, provider=name)


def fixed_calls() -> list[AttentionCall]:
    """Calls that every kernel gets: prefill and decode, a window, sinks, three dtypes, a sparse one."""
    shapes = [
        dense_call(lengths=(30, 90), new=(30, 6), heads=4, kv_heads=2, head_dim=64, seed=1, dtype=dtype)
        for dtype in (DType.BFLOAT16, DType.FLOAT16, DType.FLOAT32)
    ]
    shapes.append(dense_call(lengths=(150, 9, 140), new=(1, 1, 1), head_dim=64, seed=2))
    shapes.append(dense_call(lengths=(60,), new=(20,), head_dim=64, window=32, sink=True, seed=3))
    shapes.append(sparse_call(lengths=(40,), new=(1,), heads=64, head_dim=512, seed=4))
    return [replace(call, step=step) for step, call in enumerate(shapes)]


if __name__ == "__main__":
    print(answers_digest(create(sys.argv[1]), Path(sys.argv[2])))
