"""Real vLLM histories: how they are made, looked through, and spoiled."""

from dataclasses import replace
from itertools import pairwise

from safetensors.torch import load_file

from tests.engines_vllm.tiny_engine import Recorded
from tracekit.engines import tiny
from tracekit.gate.recorded import Legality, judge
from tracekit.gate.trace_launch import Launch
from tracekit.model.events import GateMode
from tracekit.model.history import Pass
from tracekit.recorder.api import record


def recorded_program(llm, program, *, reset=True, **options):
    """Record what a program does with an engine."""
    if reset:
        llm.reset_prefix_cache()
    result = Recorded()
    with record("unused.h5", engine="vllm", llm=llm, write=result.write, **options) as session:
        result.session = session
        program(llm)
    return result


def other_weights(llm, factor):
    """Load the tiny Qwen3's weights again, those of its projections times a factor."""
    (path,) = tiny.prepared("tiny-qwen3").glob("*.safetensors")
    weights = [
        (name, tensor * factor if name.endswith("proj.weight") else tensor)
        for name, tensor in load_file(path).items()
    ]
    llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(weights)})


def passes(history):
    return [entry for entry in history if isinstance(entry, Pass)]


def events(history, kind):
    return [entry for entry in history if isinstance(entry, kind)]


def legal(got):
    """The history, once every entry and every call of it is proved."""
    judgement = judge(got.recording, got.calls)
    assert judgement.status is Legality.LEGAL, judgement
    assert (judgement.calls, judgement.assumed) == (len(got.calls), 0)
    assert judgement.entries == len(got.recording.history)
    return got.recording.history


class Spoiled:
    """A history and its launches, in which something is to be changed."""

    def __init__(self, got):
        self.history = list(got.recording.history)
        self.launches = [Launch.of(call) for call in got.calls]

    def first(self, kind, after=0):
        """The place of the first entry of a kind."""
        return next(at for at, entry in enumerate(self.history) if at >= after and isinstance(entry, kind))

    def plain(self, requests=1):
        """The place of a pass of so many requests or more, that decode, before one of the same."""
        for at, (entry, behind) in enumerate(pairwise(self.history)):
            if isinstance(entry, Pass) and isinstance(behind, Pass) and len(entry.rows) >= requests:
                names = [[row.request for row in each.rows] for each in (entry, behind)]
                if names[0] == names[1] and {row.mode for row in entry.rows} == {GateMode.EAGER}:
                    return at
        raise LookupError("the history has no such pass")

    def pass_of(self, request, after=0):
        """The place of the first pass that a request is in."""
        return next(
            at
            for at, entry in enumerate(self.history)
            if at >= after and isinstance(entry, Pass) and request in {row.request for row in entry.rows}
        )

    def rows(self, at, request="", **fields):
        """Change the rows of a pass: those of one request, or all."""
        entry = self.history[at]
        rows = (r._replace(**fields) if request in ("", r.request) else r for r in entry.rows)
        self.history[at] = replace(entry, rows=tuple(rows))

    def held(self, step, request, change, layer=1):
        """Change what a request brings to the launch of a layer in one step."""
        (at,) = (n for n, launch in enumerate(self.launches) if (launch.step, launch.layer) == (step, layer))
        launch = self.launches[at]
        families = {family: change(held) for family, held in launch.held[request].items()}
        self.launches[at] = replace(launch, held={**launch.held, request: families})

    def drop(self, at):
        """Take a pass and its launches away."""
        step = self.history.pop(at).step
        self.launches = [launch for launch in self.launches if launch.step != step]

    def judged(self, got):
        """What is said of it now."""
        return judge(replace(got.recording, history=tuple(self.history)), self.launches)
