"""`megatron` runs `DotProductAttention` from the trace alone; no model and no process group is asked."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from megatron.core import parallel_state, tensor_parallel

import tracekit
from tests.engines_megatron.conftest import documents, padded, plain
from tracekit.errors import Unsupported
from tracekit.model import Bits, DType, KVFamily, Ranges, Selection
from tracekit.providers.base import Launch, Provider
from tracekit.providers.megatron import Megatron
from tracekit.testing import ProviderSuite
from tracekit.testing.build import dense_call


class TestMegatron(ProviderSuite):
    def provider(self) -> Provider:
        return Megatron()


OPTIONS = {
    "bf16": {"softmax_type": "learnable"},
    "fp32": {"dtype": torch.float32, "softmax_type": "learnable"},
    "fp16": {"dtype": torch.float16},
    "one head group": {"num_query_groups": 4},
    "layer scaling": {"apply_query_key_layer_scaling": True},
    "softmax in bf16": {"attention_softmax_in_fp32": False},
    "off by one": {"softmax_type": "off-by-one"},
}
BATCHES = {"plain": plain(40, 40), "left": padded(33, 5, 17, left=True), "documents": documents(5, 70, 3)}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)
def test_the_recorded_launch_gives_the_recorded_bits(gpt, recorded, options, batch):
    got = recorded(gpt(**options), batch.train)
    for call in got.calls:
        bare = replace(call, out=None, lse=None, grads=None)
        answer = Megatron().run(Launch((bare,)))
        assert answer.tensors[0].out.same(call.out.bits)
        assert answer.executed == call.provenance.executed


@pytest.fixture
def call(gpt, recorded):
    return recorded(gpt(softmax_type="learnable"), padded(9, 4).forward).calls[0]


def test_the_answer_hangs_on_every_recorded_word(call):
    """A replay that did not use a word could not see it change."""

    def answer(changed):
        return Megatron().run(Launch((changed,))).tensors[0].out

    flipped = call.q.data.copy()
    flipped[3] ^= 1 << 14
    part = call.selection.families["dense"]
    last_two = Selection({KVFamily.DENSE: Ranges(np.maximum(part.hi - 2, 0), part.hi)})
    for changed in (
        replace(call, q=Bits(flipped, call.dtype)),
        replace(call, sink=Bits.from_float32([3.0] * 4, DType.FLOAT32)),
        replace(call, sink=None),
        replace(call, selection=last_two, launch=None),
    ):
        assert not answer(changed).same(call.out.bits)
    assert answer(call).same(call.out.bits)


def test_the_scale_of_the_plan_is_used_and_held_to_the_call(call):
    plan = replace(call.launch, scalars={**call.launch.scalars, "softmax_scale": 0.125})
    assert "another scale" in Megatron().refuses(replace(call, launch=plan))
    moved = replace(
        call,
        launch=plan,
        conventions=replace(call.conventions, scale_bits=int(np.float32(0.125).view(np.uint32))),
    )
    assert not Megatron().run(Launch((moved,))).tensors[0].out.same(call.out.bits)


HOSTILE = {
    "batch": (0, -1, 1 << 40, True, 2.0, "2"),
    "length": (0, 8, 10, 1 << 20),
    "mask_batch": (-1, 3, None),
    "softmax_scale": (float("nan"), float("inf"), -1.0, None, "x"),
    "softmax_coefficient": (0.0, -1.0, "x"),
    "input_dtype": ("int8", 3),
    "sink_dtype": ("pickle", 1),
    "grad": (1, None),
    "softmax_in_fp32": (None, "yes"),
}


@pytest.mark.parametrize(("name", "value"), [(n, v) for n, values in HOSTILE.items() for v in values])
def test_a_hostile_scalar_is_refused_in_words(call, name, value):
    plan = replace(call.launch, scalars={**call.launch.scalars, name: value})
    hostile = replace(call, launch=plan)
    assert "launch plan" in (Megatron().refuses(hostile) or "")
    with pytest.raises(Unsupported) as caught:
        Megatron().run(Launch((hostile,)))
    assert caught.value.rule == "P-REFUSED"


@pytest.mark.parametrize(
    "strides",
    [
        np.array([0, 0, 0, 0]),
        np.array([1 << 40, 64, 16, 1]),
        np.array([-128, 64, 16, 1]),
        np.array([128, 64, 16]),
        np.array([128, 64, 16, 1], np.int32),
    ],
    ids=["shared", "far", "back", "few", "kind"],
)
def test_hostile_strides_are_refused(call, strides):
    plan = replace(call.launch, arrays={**call.launch.arrays, "query_strides": strides})
    assert "tensors of another size" in Megatron().refuses(replace(call, launch=plan))


def test_a_mask_of_another_size_and_a_missing_one_are_refused(call):
    for arrays in ({"mask": np.zeros(3, np.uint8)}, {"mask": np.zeros(21, np.int64)}):
        plan = replace(call.launch, arrays={**call.launch.arrays, **arrays})
        assert "mask of another size" in Megatron().refuses(replace(call, launch=plan))
    few = {name: array for name, array in call.launch.arrays.items() if name != "mask"}
    assert Megatron().refuses(replace(call, launch=replace(call.launch, arrays=few)))


def test_a_row_without_keys_is_refused():
    call = dense_call(lengths=(4,))
    part = call.selection.families["dense"]
    hi = part.hi.copy()
    hi[2] = 0
    empty = replace(call, selection=Selection({KVFamily.DENSE: Ranges(part.lo, hi)}))
    assert "reads every key" in Megatron().refuses(empty)


def test_megatrons_own_state_is_left_alone(call):
    before = parallel_state.get_global_memory_buffer(), tensor_parallel.get_cuda_rng_tracker
    Megatron().run(Launch((call,)))
    assert (parallel_state.get_global_memory_buffer(), tensor_parallel.get_cuda_rng_tracker) == before


def test_the_golden_is_made_again_by_the_engine():
    """Where another build runs it is not run, with the differences; here it is held."""
    path = Path(__file__).parents[2] / "traces" / "gpt-train.megatron.h5"
    with tracekit.open(path) as trace:
        recorded_by = trace.call(0).provenance.executed
    report = tracekit.replay(path, provider="megatron", claims="recorded")
    again = report.find("recorded", "megatron")
    if recorded_by.differences(Megatron().identity()):
        assert again.status is tracekit.Status.NOT_RUN
    else:
        assert again.status is tracekit.Status.HELD
        assert again.control == "twin-recorded refuted"
