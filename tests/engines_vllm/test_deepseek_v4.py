"""DeepSeek-V4 in real vLLM: window, compressed rows and indexer recorded, and run again from the trace."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import tracekit
from tracekit.canonical.fp8_ds_mla import CODES, GROUP, from_keys
from tracekit.compare import Roundings, compare_envelope, envelope
from tracekit.gate.plan import joint_plan
from tracekit.gate.recorded import Legality, judge
from tracekit.gate.trace_launch import Launch as Seen
from tracekit.model import Bits, KVFamily, KVSource, Mode, Origin
from tracekit.providers.base import Launch
from tracekit.providers.indexers import IndexerLaunch
from tracekit.providers.vllm_dsv4 import KERNEL, VllmDsv4, executed
from tracekit.providers.vllm_dsv4_cache import FP8
from tracekit.providers.vllm_dsv4_indexer import VllmDsv4Indexer
from tracekit.store import write_trace
from tracekit.verdict import Status

pytestmark = pytest.mark.skipif(
    not torch.cpu._is_avx512_bf16_supported(), reason="this processor has no avx512_bf16"
)
RECENT, C4, C128 = KVFamily.RECENT, KVFamily.C4, KVFamily.C128
ORDER = [(RECENT,), (RECENT, C4), (RECENT, C128)]


class Ran:
    """What the program left: two traces, and the engine's own arguments."""

    def __init__(self, folder):
        self.folder = folder
        self.said = json.loads((folder / "said.json").read_text())
        self.arguments = np.load(folder / "arguments.npz")
        with tracekit.open(folder / "short.h5") as trace:
            self.recording, self.calls = trace.recording, list(trace)
        with tracekit.open(folder / "long.h5") as trace:
            self.long = list(trace)
            self.indexers = list(trace.indexer_calls())

    def of(self, call, name):
        """An argument of the layer that made a call of `short.h5`."""
        return self.arguments[f"{self.calls.index(call)}.{name}"]


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """In a process of its own: Triton's interpreter is for the whole process."""
    folder = tmp_path_factory.mktemp("tiny-deepseek-v4")
    command = [sys.executable, "-m", "tests.engines_vllm.record_deepseek_v4", str(folder)]
    here = Path(__file__).parents[2]
    done = subprocess.run(command, cwd=here, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return Ran(folder)


def patterns(array):
    return array.view(np.uint16)


def rows_of(call, place, family):
    return call.kv[call.rows.requests[place]][family]


def test_tokens_are_the_same_and_every_hook_fired(ran):
    assert ran.said["tokens"] == ran.said["plain"]
    assert ran.said["problems"] == []
    assert all(line.complete and line.recorded == 3 for line in ran.recording.ledger)
    assert [call.mode for call in ran.calls[::3]] == [Mode.PREFILL] * 2 + [Mode.DECODE] * 3
    assert tracekit.verify(ran.folder / "short.h5") == tracekit.verify(ran.folder / "long.h5") == []


def test_its_history_is_legal(ran):
    """Of all three kinds of layers over their pages; and of one layer of which a filter kept the end."""
    short, long = (tracekit.history(ran.folder / name) for name in ("short.h5", "long.h5"))
    assert (short.status, short.calls, short.assumed) == (Legality.LEGAL, len(ran.calls), 0), short
    assert (long.status, long.calls) == (Legality.LEGAL, len(ran.long)), long
    assert long.assumed > 0


@pytest.mark.parametrize("family", ["recent", "c4", "c128"])
def test_a_row_of_a_cache_that_was_not_written_by_then_is_refused(ran, family):
    """The pages of one family are those of another place in one launch."""
    launches = [Seen.of(call) for call in ran.calls]
    last = launches[-1].step
    for at, launch in enumerate(launches):
        if launch.step == last:
            held = {
                name: {f: moved(rows) if f.value == family else rows for f, rows in families.items()}
                for name, families in launch.held.items()
            }
            launches[at] = replace(launch, held=held)
    judgement = judge(ran.recording, launches)
    assert judgement.code == "G-SLOT-MOVED", judgement
    assert (judgement.place["step"], judgement.place["family"]) == (last, family)


def moved(held):
    return replace(held, pages=held.pages._replace(table=tuple(page + 90 for page in held.pages.table)))


def test_an_indexer_of_an_untested_version_shows_its_scores_first(ran):
    problems, count = ran.said["untested_indexers"]
    assert (problems, count) == ([], 1)
    problems, count = ran.said["contradicted_indexers"]
    assert count == 0
    assert any("scores keys otherwise than it declares" in text for text in problems)


def test_off_means_off(ran):
    assert ran.said["left"] == []
    assert ran.said["operator"] == "OpOverloadPacket"


def test_an_untested_version_is_recorded_only_where_its_numbers_fit(ran):
    assert ran.said["untested"] == []
    assert ran.said["contradicted"].startswith("R-NOTHING")
    assert "no other reading fits" in ran.said["contradicted"]


def test_what_was_recorded_is_what_the_layers_were_given(ran):
    assert len(ran.calls) == ran.said["calls"] == 15
    for call in ran.calls:
        assert np.array_equal(call.q.data, patterns(ran.of(call, "q")))
        assert np.array_equal(call.out.bits.data, patterns(ran.of(call, "out")))
        assert np.array_equal(call.rows.positions, ran.of(call, "positions"))
        assert np.array_equal(call.sink.to_float32(), ran.of(call, "sink"))
        assert call.out.origin is Origin.EXECUTED
        assert call.lse.origin is Origin.DERIVED
        assert tuple(call.selection.families) == ORDER[call.layer]
        conventions = call.conventions
        assert (conventions.window, conventions.kv_source) == (128, KVSource.CONSUMED)
        assert conventions.output_boundary == "before inverse rope"
        assert call.launch.kernel == call.provenance.executed.kernel == KERNEL


def test_each_row_reads_what_the_operator_read_in_its_order(ran):
    """Rows by their logical numbers, against a reading of the slots that shares no code with the recorder."""
    looked = 0
    for call in ran.calls:
        for t in {0, call.num_rows // 2, call.num_rows - 1}:
            held = call.kv[call.rows.ids[t].request]
            read = dict(call.selection.row(t))
            for family in read:
                name = "window" if family is RECENT else "compressed"
                rows = held[family].keys.data[read[family] - held[family].first, 0]
                assert np.array_equal(rows, patterns(ran.of(call, f"{name}.{t}"))), (call.step, call.layer, t)
                looked += len(rows)
    assert looked > 3000


def test_a_new_row_is_the_engines_own_argument_in_the_format_of_the_cache(ran):
    """The part without rotation: 448 elements, quantised again by torch; the writer keeps no small codes."""
    for call in ran.calls:
        given = torch.from_numpy(ran.of(call, "kv").copy()).view(torch.bfloat16)[:, :448].float()
        groups = given.unflatten(1, (7, 64))
        scale = torch.exp2(torch.ceil(torch.log2((groups.abs().amax(2) / 448).clamp(min=1e-4))))[..., None]
        steps = groups / scale
        steps = torch.where(steps.abs() < 2**-6, torch.copysign(torch.zeros(()), steps), steps)
        wanted = (steps.to(torch.float8_e4m3fn).float() * scale).flatten(1).to(torch.bfloat16)
        for t, row in enumerate(call.rows.ids):
            held = call.kv[row.request][RECENT]
            got = held.keys.data[row.position - held.first, 0, :448]
            assert np.array_equal(got, patterns(wanted[t].view(torch.int16).numpy())), (call.layer, row)


def test_what_a_row_may_read_changes_at_the_boundaries(ran):
    """3: the first C4 row. 127, 255: C128 rows. 128: the window drops row 0."""
    first = {call.layer: call for call in ran.calls if call.step == 0}
    recent, c4, c128 = (first[i].selection.families[f] for i, f in ((0, RECENT), (1, C4), (2, C128)))
    assert [c4.row(t).tolist() for t in (2, 3, 7)] == [[], [0], [0, 1]]
    assert [c128.row(t).tolist() for t in (126, 127, 255)] == [[], [0], [0, 1]]
    assert [recent.row(t)[0] for t in (127, 128, 129)] == [0, 1, 2]
    last = [call for call in ran.calls if call.step == 4]
    assert [rows_of(call, 0, RECENT).first for call in last] == [302 - 127] * 3
    assert rows_of(last[1], 0, C4).count == 303 // 4


def test_the_joint_plan_of_the_live_engine_comes_again_from_the_file(ran):
    """Kinds and boundaries, owned; and each plan names the rows whose bits the operator was seen to read."""
    plans = [joint_plan(call) for call in ran.calls]
    assert [plan.digest for plan in plans] == ran.said["plans"]
    assert [plan.kind for plan in plans] == ["C0", "C4", "C128"] * 5
    prefill = {plan.kind: [dict(row) for row in plan.candidates] for plan in plans[:3]}
    sizes = [[prefill["C4"][t][family].size for family in (RECENT, C4)] for t in (2, 3)]
    assert sizes == [[3, 0], [4, 1]]
    sizes = [[prefill["C128"][t][family].size for family in (RECENT, C128)] for t in (126, 127, 128)]
    assert sizes == [[127, 0], [128, 1], [128, 1]]
    assert [prefill["C0"][t][RECENT].size for t in (127, 128)] == [128, 128]
    for plan, call in zip(plans, ran.calls, strict=True):
        for t in {0, call.num_rows // 2, call.num_rows - 1}:
            for family, ids in plan.candidates[t]:
                held = call.kv[plan.rows[t].request][family]
                name = "window" if family is RECENT else "compressed"
                rows = held.keys.data[ids - held.first, 0]
                assert np.array_equal(rows, patterns(ran.of(call, f"{name}.{t}"))), (plan.kind, t)


def test_out_lies_in_the_envelope_of_the_rows_as_the_operator_reads_them(ran):
    """It reads small codes as larger ones (docs/findings.md). With that, every element is explained."""
    outside = 0
    for call in [*ran.calls, *ran.long]:
        where = Roundings(call.conventions.score_dtype, call.conventions.probability_dtype)
        read = compare_envelope(as_read(call), envelope(as_read(call), where), call.out.bits, None)
        assert read.inside.compared.elements
        assert read.outside.first is None, (call.layer, call.step, read.outside.first)
        outside += compare_envelope(
            call, envelope(call, where), call.out.bits, None
        ).outside.differences.elements
    assert outside > 0


def as_read(call):
    """The call with each code that has no exponent replaced by what the operator takes it for."""
    families = tuple(call.selection.families)
    at, kv = dict.fromkeys(families, 0), {key: {} for key in call.kv}
    for key in call.rows.requests:
        for family in families:
            rows, first = call.kv[key][family], at[family]
            name = "recent_scales" if family is RECENT else "compressed_scales"
            scales = call.launch.arrays[name][first : first + rows.count]
            at[family] += rows.count
            codes = from_keys(rows.keys, scales, FP8).nope.codes.data
            size = np.repeat(np.ldexp(1.0, scales.astype(int) - 127), GROUP, axis=1)
            taken = np.where(codes & 0x80, -1, 1) * (8 + (codes & 7)) * 2.0**-10 * size
            values = np.array(rows.keys.to_float32())
            values[:, 0, :CODES] = np.where(codes & 0x78, values[:, 0, :CODES], taken)
            kv[key][family] = replace(rows, keys=Bits.from_float32(values, call.dtype))
    return call.with_kv(kv)


def test_the_indexer_chose_the_rows_that_attention_read(ran):
    """Of more than 512 compressed rows each query takes 512, in the order of the indexer."""
    assert [call.num_rows for call in ran.long] == [32, 1, 1]
    for number, (attention, indexer) in enumerate(zip(ran.long, ran.indexers, strict=True)):
        chosen = attention.selection.families[C4]
        topk = ran.arguments[f"long.{number}"]
        for t in range(attention.num_rows):
            assert chosen.row(t).tolist() == indexer.top_k.row(t).tolist() == topk[t][topk[t] >= 0].tolist()
    last = ran.indexers[-1]
    assert (last.k, last.family, len(last.top_k.ids)) == (512, C4, 512)
    assert (rows_of(ran.long[-1], 0, C4).count,) == (last.visible[0],) == (520,)
    assert (np.diff(last.top_k.ids) < 0).any()


def test_the_indexers_own_operators_give_its_choice_again(ran):
    for call in ran.indexers:
        (again,) = VllmDsv4Indexer().run(IndexerLaunch((call,))).chosen
        assert np.array_equal(again.top_k.ids, call.top_k.ids)
        assert again.scores.same(call.scores)


def test_a_recorded_launch_gives_the_recorded_bits(ran):
    for call in [*ran.calls, *ran.long]:
        answer = VllmDsv4().run(Launch((call,)))
        assert answer.tensors[0].out.same(call.out.bits), (call.layer, call.step)
        assert answer.executed == call.provenance.executed


def test_its_claims_are_held_from_the_file_alone(ran):
    """A decode that reads lists, and a prefill of two requests; the goldens are held to all claims."""
    decode = ["recorded", "threads", "page-ids"]
    prefill = ["recorded", "rows", "requests"]
    for name, call, claims in (("long", 2, decode), ("short", 4, prefill)):
        path = ran.folder / f"{name}.h5"
        report = tracekit.replay(path, provider="vllm-dsv4-cpu", claims=claims, calls=[call])
        assert {verdict.status for verdict in report.verdicts} == {Status.HELD}
        assert {verdict.claim for verdict in report.verdicts} == set(claims)


@pytest.mark.parametrize(
    ("name", "claims"), [("deepseek-v4", ["solo", "decode"]), ("deepseek-v4-indexer", ["rows", "chunks"])]
)
def test_the_goldens_come_again_where_they_can(name, claims):
    """Recorded bits where the same library and instructions are here, its other promises everywhere."""
    path = Path(__file__).parents[2] / "traces" / f"{name}.vllm-cpu.h5"
    with tracekit.open(path) as trace:
        other = trace.call(0).provenance.executed.differences(executed())
    report = tracekit.replay(path, provider="vllm-dsv4-cpu", claims=["recorded", *claims])
    status = {verdict.claim: verdict.status for verdict in report.verdicts}
    assert status.pop("recorded") is (Status.NOT_RUN if other else Status.HELD)
    assert set(status.values()) == {Status.HELD}


def test_the_indexers_promises_are_held_on_the_golden():
    path = Path(__file__).parents[2] / "traces" / "deepseek-v4-indexer.vllm-cpu.h5"
    report = tracekit.replay(path, claims=["rows", "chunks"])
    for claim in ("rows", "chunks"):
        assert report.find(claim, "vllm-dsv4-indexer").status is Status.HELD


@pytest.mark.parametrize("broken", ["out", "scales", "order"])
def test_a_trace_that_says_something_else_is_refuted(ran, broken, tmp_path):
    """One bit of O; the scales of other bytes; a selection in another order."""
    call = ran.long[0]
    if broken == "out":
        data = np.array(call.out.bits.data)
        data[0, 1, 2] ^= 1
        call = replace(call, out=replace(call.out, bits=Bits(data, call.out.bits.dtype)))
    elif broken == "scales":
        scales = np.array(call.launch.arrays["recent_scales"])
        scales[:, 3] += 40
        arrays = {**call.launch.arrays, "recent_scales": scales}
        call = replace(call, launch=replace(call.launch, arrays=arrays))
    else:
        lists = call.selection.families[C4]
        turned = type(lists).of([lists.row(t)[::-1] for t in range(lists.rows)])
        families = {**call.selection.families, C4: turned}
        call = replace(call, selection=replace(call.selection, families=families))
    write_trace(tmp_path / "broken.h5", replace(ran.recording, ledger=()), [call])
    report = tracekit.replay(tmp_path / "broken.h5", provider="vllm-dsv4-cpu", claims=["recorded"])
    (verdict,) = report.verdicts
    assert verdict.status is (Status.NOT_RUN if broken == "scales" else Status.REFUTED)
