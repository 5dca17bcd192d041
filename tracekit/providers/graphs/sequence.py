"""The order in which a capture is put to the test (`replayed`), whatever the kernel and the backend."""

from collections.abc import Callable, Mapping
from itertools import cycle

from tracekit.errors import ProviderFailed, Unsupported
from tracekit.providers.base import Answer, Launch, Provider
from tracekit.providers.graphs.base import Capturable, GraphBackend
from tracekit.providers.graphs.kind import GraphKind
from tracekit.providers.placement import Fill


def device() -> GraphBackend:
    """Return the backend for CUDA and HIP; Unavailable where there is no device."""
    from tracekit.providers.graphs.device import DeviceGraphs

    return DeviceGraphs()


def host() -> GraphBackend:
    """Return the stand-in for the host."""
    from tracekit.providers.graphs.host import HostGraphs

    return HostGraphs()


BACKENDS: Mapping[GraphKind, Callable[[], GraphBackend]] = {GraphKind.DEVICE: device, GraphKind.HOST: host}


def replayed(provider: Provider, launch: Launch) -> Answer:
    """Capture a launch with the inputs of its first call, and replay it with those of each call in turn.

    Warm-up; capture; then for each call: its inputs into the buffers, other work that takes what memory is
    free, outputs and scratch poisoned (two patterns in turn), replay, inputs compared, answer read. A call
    that stands in the launch twice is a replay with restored inputs.

    Raises:
        Unsupported: `P-GRAPH`, the provider cannot be captured, or not with these calls.
        ProviderFailed: `P-GRAPH`, the capture failed or a replay changed an input.
    """
    kind = launch.execution.graph
    if kind is None or not isinstance(provider, Capturable):
        raise Unsupported(f"launches of {provider.id} cannot be captured.", rule="P-GRAPH")
    return put_to_the_test(provider, launch, BACKENDS[kind]())


def put_to_the_test(provider: Capturable, launch: Launch, backend: GraphBackend) -> Answer:
    """Do what `replayed` says on a backend; errors as there."""
    pool = backend.pool()
    static = provider.static(launch.calls, launch.execution, pool)
    static.load(launch.calls[0])
    backend.warm_up(static.enqueue)
    backend.wait()
    graph = backend.capture(static.enqueue, pool)
    answers = []
    for call, fill in zip(launch.calls, cycle(Fill), strict=False):
        static.load(call)
        backend.unrelated(pool, fill)
        static.poison(fill)
        with backend.scratch(fill):
            graph.replay()
            backend.wait()
        if name := static.changed():
            raise ProviderFailed(
                f"a replay changed {name}; a kernel may write into its outputs alone.", rule="P-GRAPH"
            )
        answers.append(static.read())
    return Answer(tuple(answers), static.executed())
