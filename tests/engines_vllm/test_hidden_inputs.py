"""What vLLM's CPU operators make of what a launch should not depend on (docs/findings.md); no engine runs."""

from pathlib import Path

import numpy as np
import pytest
import torch

import tracekit
from tracekit.errors import Unsupported
from tracekit.providers.base import Execution, Launch
from tracekit.providers.graphs.kind import GraphKind
from tracekit.providers.perform import perform
from tracekit.providers.placement import Fill
from tracekit.providers.vllm_cpu import VllmCpu, VllmCpuNoSplit
from tracekit.providers.vllm_cpu_ops import operators
from tracekit.providers.vllm_cpu_static import moved
from tracekit.relations import relation
from tracekit.relations.base import on_kernel, subject_of
from tracekit.testing import dense_call
from tracekit.verdict import Status

TRACES = Path(__file__).parents[2] / "traces"
QWEN3, DSV4 = TRACES / "vllm-qwen3.cpu.h5", TRACES / "deepseek-v4.vllm-cpu.h5"
CALLS = (
    dense_call(lengths=(20, 11), head_dim=64, seed=1),
    dense_call(lengths=(180, 70, 90), new=(1, 1, 1), head_dim=64, sink=True, seed=2),
)
needs_amx = pytest.mark.skipif(
    not torch.cpu._is_amx_tile_supported(), reason="the numbers are those of the path for AMX"
)


@pytest.mark.parametrize("provider", [VllmCpu(), VllmCpuNoSplit()], ids=lambda one: one.id)
@pytest.mark.parametrize("call", CALLS, ids=["prefill", "decode"])
def test_replays_give_rows_their_eager_bits_and_leave_empty_slots(provider, call):
    bound = on_kernel(relation("host-graph"), provider.capabilities())
    subject = subject_of(bound, call)
    assert subject.num_rows == call.num_rows + 3
    (eager,) = perform(provider, Launch((subject,))).tensors
    place = {row: at for at, row in enumerate(subject.rows.ids)}
    own = set(call.rows.requests)
    slots = 0
    for variant in bound.variants(subject, 0):
        answers = perform(provider, variant.launch).tensors
        for replayed, got in zip(variant.launch.calls, answers, strict=True):
            for t, row in enumerate(replayed.rows.ids):
                if row.request in own:
                    assert got.out.data[t].tobytes() == eager.out.data[place[row]].tobytes()
                elif row in place:
                    slots += 1
                    assert set(got.out.data[t].ravel().tolist()) <= {0x7FC1, 0xA5A5}  # the poison
                    assert not eager.out.data[place[row]].any()  # what the provider had put there
    assert slots == 9


@pytest.mark.parametrize("provider", ["vllm-cpu", "vllm-cpu-nosplit"])
def test_host_graph_is_refuted_by_an_empty_slot_alone(provider):
    report = tracekit.replay(QWEN3, provider=provider, claims="host-graph", calls=[0])
    (verdict,) = report.verdicts
    assert verdict.status is Status.REFUTED
    assert verdict.variant == "captured as it stands with empty slots"
    assert verdict.differences.rows == 9
    assert verdict.first.request.endswith("-700000000")


@pytest.mark.skipif(not torch.cpu._is_avx512_bf16_supported(), reason="this processor has no avx512_bf16")
def test_the_kernel_of_deepseek_v4_writes_empty_slots():
    report = tracekit.replay(DSV4, provider="vllm-dsv4-cpu", claims=["host-graph", "padding"], calls=[0, 12])
    assert {verdict.status for verdict in report.verdicts} == {Status.HELD}
    assert report.find("host-graph").control == "twin-host-graph refuted"


@needs_amx
def test_keys_behind_the_end_of_a_page_are_multiplied():
    """`slack`: zero times NaN. Bytes 0xA5 are numbers and change nothing."""
    report = tracekit.replay(QWEN3, provider="vllm-cpu", claims="slack", calls=[0])
    (verdict,) = report.verdicts
    assert verdict.status is Status.REFUTED
    assert verdict.variant == "NaN payloads in tails and the null page"
    assert "nan" in {kind for kind, count in verdict.differences.ulps if count}
    call = CALLS[0]
    provider = VllmCpu()
    bound = on_kernel(relation("slack"), provider.capabilities())
    (eager,) = perform(provider, Launch((call,))).tensors
    for variant in bound.variants(call, 0):
        (got,) = perform(provider, variant.launch).tensors
        if str(Fill.A5) in variant.name:
            assert got.out.same(eager.out)
        assert got.out.same(eager.out) or np.isnan(got.out.to_float32()).any()


@needs_amx
def test_a_rounding_mode_that_was_left_on_changes_a_row():
    """`after`: earlier launches change nothing, rounding toward zero does."""
    report = tracekit.replay(QWEN3, provider="vllm-cpu", claims="after", calls=[0])
    (verdict,) = report.verdicts
    assert verdict.status is Status.REFUTED
    assert verdict.variant == "rounding toward zero left on"
    assert verdict.differences.rows == 1
    assert verdict.differences.max_ulps == 8


def test_no_operator_takes_schedules():
    report = tracekit.replay(QWEN3, provider="vllm-cpu", claims="schedule", calls=[0])
    assert report.verdicts[0].status is Status.NOT_APPLICABLE


def test_a_plan_holds_addresses_of_itself():
    """So it cannot be copied as bytes: the copy would read the memory of the original."""
    lengths, starts = (torch.tensor(x, dtype=torch.int32) for x in ([20, 11], [0, 20, 31]))
    plan = operators().get_scheduler_metadata(
        2, 4, 2, 64, lengths, torch.bfloat16, starts, True, -1, "amx", False, None, "auto"
    )

    def inside(words, address):
        return int(((words >= address) & (words <= address + plan.numel())).sum())

    room = torch.zeros_like(plan)
    words = plan.view(torch.int64)
    assert inside(words, plan.data_ptr()) == 2
    relocated = moved(plan, room.data_ptr()).view(torch.int64)
    assert inside(relocated, plan.data_ptr()) == 0
    assert inside(relocated, room.data_ptr()) == 2
    assert int((relocated != words).sum()) == 2


def test_calls_that_differ_by_value_share_no_launch():
    execution = Execution(graph=GraphKind.HOST)
    with pytest.raises(Unsupported, match="these calls differ"):
        perform(VllmCpu(), Launch(CALLS, execution))
