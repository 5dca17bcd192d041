"""The live gate on calls of real generations, with pages and scales: what only memory can break."""

from dataclasses import replace

import numpy as np
import pytest

from tracekit.engines.driver import greedy
from tracekit.errors import GateRefused
from tracekit.gate import RequestGate, Slots
from tracekit.model import Mode, RequestKey
from tracekit.model.events import Capture, Fork, GraphUse, NewWeights, Pages, Rescale, Scales
from tracekit.providers.portable import Tka1

PAGE, BLOCK, STEPS = 16, 8, 5
MODELS = {"qwen3": "sdpa", "gpt-oss": "eager", "deepseek-v4": "eager"}


@pytest.fixture(scope="module", params=MODELS)
def calls(request, _models, recorded, prompt):
    model = _models[f"tiny-{request.param}"]
    model.set_attn_implementation(MODELS[request.param])
    prompts = [prompt(126, 0)] if request.param == "deepseek-v4" else [prompt(30, 0), prompt(21, 1)]
    return recorded(model, lambda m: greedy(m, prompts, STEPS)).calls


def slots(call, scale=0, start=None):
    """Each request on pages of its own, from 100 times its number on; all blocks under one scale."""
    found = {}
    for number, (key, families) in enumerate(sorted(call.kv.items())):
        for family, rows in families.items():
            first = 100 * number if start is None else start
            table = tuple(range(first, first + -(-rows.end // PAGE) + 1))
            generations = (scale,) * -(-rows.end // BLOCK)
            found[key, family] = Slots(Scales(BLOCK, generations), Pages(PAGE, table))
    return found


def through(gate, calls, **options):
    for call in calls:
        gate.run(call, Tka1(), slots=slots(call), **options)


def split(calls, step):
    """The calls before a step, and the first of it."""
    return [call for call in calls if call.step < step], next(call for call in calls if call.step == step)


def refused(gate, call, held=None, **options):
    before = gate.digest
    with pytest.raises(GateRefused) as error:
        gate.run(call, Tka1(), slots=slots(call) if held is None else held, **options)
    assert gate.digest == before
    assert error.value.fields.get("layer", call.layer) == call.layer
    return error.value.rule


def test_a_generation_passes(calls):
    gate = RequestGate()
    through(gate, calls)
    assert gate.ledger.epoch == len(calls)
    ends = {str(key): 0 for key in calls[0].rows.requests}
    for call in calls:
        for row in call.rows.ids:
            ends[str(row.request)] = max(ends[str(row.request)], row.position + 1)
    assert {name: state.settled().length for name, state in gate.ledger.requests.items()} == ends


def test_a_reused_slot(calls):
    """A request is given the pages of a live one: another one of the batch, or a copy that begins anew."""
    gate = RequestGate()
    through(gate, [call for call in calls if call.step == 0])
    key = calls[0].rows.requests[0]
    other = RequestKey(key.digest, key.ordinal + 1)
    alone = calls[0].take(np.flatnonzero(calls[0].rows.request == 0))
    rows = replace(alone.rows, requests=(other,))
    again = replace(alone, rows=rows, kv={other: alone.kv[key]})
    start = {family: slots(calls[0])[key, family].pages.table[0] for family in alone.kv[key]}
    held = slots(again, start=next(iter(start.values())))
    assert refused(gate, again, held) == "G-SLOT-REUSED"


def test_rows_that_moved(calls):
    gate = RequestGate()
    before, call = split(calls, 2)
    through(gate, before)
    assert refused(gate, call, slots(call, start=500)) == "G-SLOT-MOVED"


def test_a_page_that_is_missing(calls):
    gate = RequestGate()
    before, call = split(calls, 2)
    through(gate, before)
    held = {k: place._replace(pages=Pages(PAGE, place.pages.table[:1])) for k, place in slots(call).items()}
    assert refused(gate, call, held) == "G-SLOT-MISSING"


def test_scales_of_another_generation(calls):
    gate = RequestGate()
    before, call = split(calls, 2)
    through(gate, before)
    held = {
        k: place._replace(scales=Scales(BLOCK, (1, *place.scales.generations[1:])))
        for k, place in slots(call).items()
    }
    assert refused(gate, call, held) == "G-SCALE"


def test_new_rows_under_old_scales(calls):
    gate = RequestGate()
    before, call = split(calls, 2)
    through(gate, before)
    gate.tell(Rescale(1))
    assert refused(gate, call) == "G-SCALE-STALE"


def test_scales_that_are_not_told(calls):
    gate = RequestGate()
    before, call = split(calls, 2)
    through(gate, before)
    held = {k: place._replace(scales=None) for k, place in slots(call).items()}
    assert refused(gate, call, held) == "G-SCALE-MISSING"


def test_stale_weights(calls):
    gate = RequestGate()
    before, call = split(calls, 2)
    through(gate, before)
    gate.tell(NewWeights(1))
    assert refused(gate, call, model_version=0) == "G-MODEL-STALE"
    assert refused(gate, call) == "G-KV-MODEL"


def test_a_skipped_and_a_repeated_position(calls):
    gate = RequestGate()
    before, call = split(calls, 2)
    through(gate, before)
    assert refused(gate, split(calls, 3)[1]) == "G-POSITION-GAP"
    assert refused(gate, split(calls, 1)[1]) in ("G-POSITION-REWIND", "G-POSITION-REPEAT")
    gate.run(call, Tka1(), slots=slots(call))
    assert refused(gate, call) == "G-POSITION-REPEAT"


def test_a_page_that_a_fork_reads_too(calls):
    gate = RequestGate()
    before, call = split(calls, 2)
    through(gate, before)
    name = str(call.rows.requests[0])
    gate.tell(Fork("sample", name, gate.ledger.requests[name].settled().length))
    assert refused(gate, call) == "G-SLOT-SHARED"


def test_a_graph_on_other_buffers_and_under_other_weights(calls):
    gate = RequestGate()
    before, call = split(calls, 2)
    assert call.mode is Mode.DECODE
    through(gate, before)
    use = GraphUse("decode", (0x1000, 0x2000), 4)
    gate.tell(Capture(use))
    moved = replace_address(use)
    assert refused(gate, call, graph=moved) == "G-GRAPH-ADDRESS"
    assert refused(gate, call, graph=use._replace(rows=8)) == "G-GRAPH-SHAPE"
    assert refused(gate, call, graph=use._replace(name="prefill")) == "G-GRAPH-UNKNOWN"
    gate.run(call, Tka1(), slots=slots(call), graph=use)


def replace_address(use):
    return use._replace(addresses=(use.addresses[0], use.addresses[1] + 64))


def test_a_stale_cache_version(calls):
    gate = RequestGate()
    before, call = split(calls, 2)
    newer = [with_generation(one, 3) for one in before]
    through(gate, newer)
    assert refused(gate, call) == "G-CACHE-STALE"
    assert refused(gate, with_generation(call, 4)) == "G-CACHE-NEWER"


def with_generation(call, generation):
    return call.with_kv(
        {k: {f: replace(r, generation=generation) for f, r in kv.items()} for k, kv in call.kv.items()}
    )
