"""Real vLLM histories: how they are made, looked through, and spoiled."""

from dataclasses import replace

from safetensors.torch import load_file

from tests.engines_vllm.tiny_engine import Recorded
from tracekit.engines import tiny
from tracekit.gate.trace_launch import Launch
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


def launches_of(got):
    return [Launch.of(call) for call in got.calls]


# plants: each takes a history and its launches, and returns both


def insert(at, *planted):
    return lambda history, launches: ((*history[:at], *planted, *history[at:]), launches)


def change(at, **fields):
    return lambda history, launches: (
        (*history[:at], replace(history[at], **fields), *history[at + 1 :]),
        launches,
    )


def changed_rows(at, **fields):
    """Other fields of all rows of a pass."""

    def plant(history, launches):
        rows = tuple(row._replace(**fields) for row in history[at].rows)
        return change(at, rows=rows)(history, launches)

    return plant


def without(step):
    return lambda history, launches: (
        tuple(entry for entry in history if not (isinstance(entry, Pass) and entry.step == step)),
        [launch for launch in launches if launch.step != step],
    )
