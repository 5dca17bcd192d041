"""TKA-1, the portable attention kernel: one definition (docs/tka1.md), several forms, the same bits."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from tracekit.env import settings
from tracekit.errors import Unsupported
from tracekit.providers.graphs.pool import HostPool
from tracekit.providers.placement import Fill
from tracekit.providers.tka1 import native, numpy_backward, numpy_form
from tracekit.providers.tka1.gradients import Backward, FamilyGradients, Gradients, sum_of_sinks
from tracekit.providers.tka1.inputs import DTYPES, LEAF, FamilyInput, Inputs, Lists, Outputs, Partials, Ranges
from tracekit.providers.tka1.numpy_backward import merge_sums
from tracekit.providers.tka1.runs import Run, fewest_runs, merge, merge_rows, within
from tracekit.providers.tka1.schedules import SCHEDULES, Schedule
from tracekit.providers.tka1.static import StaticLaunch

__all__ = [
    "DTYPES",
    "LEAF",
    "SCHEDULES",
    "SPEC",
    "Backward",
    "FamilyGradients",
    "FamilyInput",
    "Form",
    "Gradients",
    "Inputs",
    "Lists",
    "Outputs",
    "Partials",
    "Ranges",
    "Run",
    "Served",
    "attention",
    "backward",
    "fewest_runs",
    "merge",
    "merge_rows",
    "merge_sums",
    "partials",
    "scheduled",
    "serving",
    "static",
    "sum_of_sinks",
    "training",
    "within",
]

SPEC = "tka1"
"""Name of the definition. It changes when a bit of any answer changes; forms and builds do not change it."""

Form = Literal["auto", "native", "numpy"]


@dataclass(frozen=True)
class Served:
    """Which form answers, for provenance and `doctor`.

    Args:
        form: `native` or `numpy`.
        isa: the build of the native form, else None.
        library: its file, else None.
    """

    form: str
    isa: str | None
    library: str | None


def serving(form: Form = "auto", isa: str | None = None) -> Served:
    """Say which form and build would answer; arguments and errors as `attention`."""
    return _pick(form, isa)[0]


def attention(
    inputs: Inputs,
    *,
    form: Form = "auto",
    threads: int | None = None,
    isa: str | None = None,
    fill: Fill | None = None,
) -> Outputs:
    """Compute O `[T, H, Dv]` and both LSE `[T, H]` of a launch (docs/tka1.md, S1 to S13).

    Args:
        inputs: the launch.
        form: `native`, `numpy`, or `auto`: native where a library exists. All give the same bits.
        threads: None takes `TRACEKIT_THREADS`; the number changes no bit.
        isa: `v1`, `v3` or `v4`; None takes `TRACEKIT_ISA`, else the best for this processor.
        fill: what stands in outputs and around buffers; the numpy form has none of its own.

    Raises:
        Unavailable: `K-NO-LIBRARY` where a native build is asked for that is not there.
        ProviderFailed: `K-SELFTEST` where a library does not give the bits of the definition, `P-CANARY`
            where it writes beside a buffer.
    """
    served = _pick(form, isa)[0]
    if fill is not None and served.isa is not None:
        library = native.load(served.isa)
        return library.guarded(inputs, settings().threads if threads is None else threads, fill)
    return _pick(form, isa)[1](inputs, settings().threads if threads is None else threads)


def scheduled(
    inputs: Inputs, schedule: str | None = None, *, threads: int | None = None
) -> tuple[Outputs, str | None]:
    """Compute a launch by the best build, and say how its work was cut and ordered.

    Args:
        inputs: the launch.
        schedule: one of `SCHEDULES`, or None for the usual one. None of them changes a bit.
        threads: as `attention`.

    Returns:
        The answer and the account of the kernel; None where it did not follow the schedule.

    Raises:
        Unsupported: `P-SCHEDULE`, there is no such schedule.
        Unavailable: `K-NO-LIBRARY`, no build runs here.
    """
    if schedule is not None and schedule not in SCHEDULES:
        raise Unsupported(
            f"there is no schedule {schedule!r}; there are {', '.join(SCHEDULES)}.", rule="P-SCHEDULE"
        )
    asked = Schedule() if schedule is None else SCHEDULES[schedule]
    return _library().run_as(inputs, settings().threads if threads is None else threads, asked)


def partials(
    inputs: Inputs,
    *,
    run: Run | None = None,
    form: Form = "auto",
    threads: int | None = None,
    isa: str | None = None,
) -> Partials:
    """Compute the rows before S10 (sink and division), whole or of one aligned run of leaves (S14).

    Args:
        inputs: the launch.
        run: only these leaves; `merge` puts the partials of several runs together.
        form: as `attention`, like the others; errors as there.
        threads: as `attention`.
        isa: as `attention`.
    """
    some = inputs if run is None else within(inputs, run)
    return _pick(form, isa)[2](some, settings().threads if threads is None else threads)


def training(
    inputs: Inputs, *, form: Form = "auto", threads: int | None = None, isa: str | None = None
) -> tuple[Outputs, Partials]:
    """Compute a launch as `attention`, and keep its rows before S10 for `backward`.

    Args:
        inputs: the launch.
        form: as `attention`, like the others; errors as there.
        threads: as `attention`.
        isa: as `attention`.

    Returns:
        The outputs, bit for bit those of `attention`, and the partials of the whole rows.
    """
    count = settings().threads if threads is None else threads
    served = _pick(form, isa)[0]
    return (numpy_form if served.isa is None else native.load(served.isa)).training(inputs, count)


def backward(
    launch: Backward, *, form: Form = "auto", threads: int | None = None, isa: str | None = None
) -> Gradients:
    """Compute the gradients of a launch (docs/tka1.md, S16).

    Args:
        launch: the launch, its dO, and its rows before S10 where they were kept.
        form: as `attention`, like the others; errors as there.
        threads: as `attention`.
        isa: as `attention`.
    """
    count = settings().threads if threads is None else threads
    served = _pick(form, isa)[0]
    if served.isa is None:
        return numpy_backward.run(launch, count)
    return native.load(served.isa).backward(launch, count)


def static(launches: Sequence[Inputs], threads: int | None, pool: HostPool) -> StaticLaunch:
    """Return one launch of the best build over buffers with room for several launches (graphs/base.py).

    Raises:
        Unavailable: `K-NO-LIBRARY`, no build runs here.
        Unsupported: `P-GRAPH`, they differ in what is passed by value.
    """
    return StaticLaunch(_library(), launches, settings().threads if threads is None else threads, pool)


def _library() -> native.Library:
    return native.load(_pick("native", None)[0].isa or native.BASELINE)


_Forms = tuple[Served, Callable[[Inputs, int], Outputs], Callable[[Inputs, int], Partials]]


def _pick(form: Form, isa: str | None) -> _Forms:
    wanted = isa or settings().isa
    if form != "numpy":
        builds = native.available()
        if builds or wanted or form == "native":
            library = native.load(wanted or (builds[0] if builds else native.BASELINE))
            return Served("native", library.isa, str(library.path)), library.run, library.partials
    return Served("numpy", None, None), numpy_form.run, numpy_form.partials
