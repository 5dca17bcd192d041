"""Megatron-core trains, vLLM serves: real processes, the same weights and tokens, bound by what they ran.

On their own kernels the honest verdict is no pass; the codes below are its golden. With TKA-1 in both and
equal inputs the two bind, and each thing that is broken is refused for its own reason.
"""

import json
import shutil
import signal
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

import tracekit
from tools.pair.job import weights_file
from tools.pair.launch import launch
from tools.pair.readback import TKA1_ASKED, leave, merged_leaves
from tools.pair.weights import same, to_checkpoint, to_megatron
from tracekit.cli.main import run
from tracekit.contract import Role
from tracekit.contract.judge import bind_runs
from tracekit.errors import BindingInvalid
from tracekit.model import Bits, DType, Origin, Output
from tracekit.store import open_trace, write_trace
from tracekit.verdict import Status

OWN_KERNELS = {
    ("ATTENTION_CORE_MISMATCH", "core.core_id"),
    ("ATTENTION_CORE_SCHEDULE", "rollout.rank[tp 0, cp 0].core.schedule"),
    ("ATTENTION_CORE_SCHEDULE", "training.rank[tp 0, cp 0].core.schedule"),
    ("BITS_DIFFER", "layer 0.q"),
    ("LSE_NOT_EXPORTED", "rollout.lse"),
    ("LSE_NOT_EXPORTED", "rollout.rank[tp 0, cp 0].export_lse"),
    ("LSE_NOT_EXPORTED", "training.lse"),
    ("LSE_NOT_EXPORTED", "training.rank[tp 0, cp 0].export_lse"),
    ("RUNTIME_UNOBSERVABLE", "rollout.rank[tp 0, cp 0].knobs.split_kv"),
    ("RUNTIME_UNOBSERVABLE", "rollout.rank[tp 0, cp 0].reduction"),
    ("RUNTIME_UNOBSERVABLE", "training.rank[tp 0, cp 0].knobs.split_kv"),
    ("RUNTIME_UNOBSERVABLE", "training.rank[tp 0, cp 0].reduction"),
    ("SPLIT_KV_REQUEST", "rollout.rank[tp 0, cp 0].split_kv"),
    ("SPLIT_KV_RUNTIME_MISSING", "rollout.split_kv_runtime_plan_set"),
    ("SPLIT_KV_RUNTIME_MISSING", "training.split_kv_runtime_plan_set"),
}
"""The verdict on the engines as they come: comparable, refused, by these issues and no other."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """`own`: both engines as they come. `tka1`: TKA-1 in both, and the rollout's rows in both.

    Beside them single sides: an engine that falls back, and engines that are killed. Two processes at a time,
    for most of what each does is to import its engine.
    """
    folder = tmp_path_factory.mktemp("pair")
    served = str(folder / "tka1" / "rollout")

    def start(side, name, *options, **more):
        return pool.submit(launch, side, folder / name / side, *options, **more)

    with ThreadPoolExecutor(2) as pool:
        whole = [
            start("rollout", "own"),
            start("rollout", "tka1", "--tka1"),
            start("rollout", "fallen", "--tka1", "--falls-back"),
        ]
        killed = [start("rollout", "killed", "--tka1", dies=True)]
        assert [one.result() for one in whole] == [0, 0, 0]
        whole = [
            start("training", "own", str(folder / "own" / "rollout")),
            start("training", "tka1", served, "--tka1", "--inject"),
        ]
        killed.append(start("training", "killed", served, "--tka1", "--inject", dies=True))
    assert [one.result() for one in whole] == [0, 0]
    assert [one.result() for one in killed] == [-signal.SIGKILL] * 2
    return folder


@pytest.fixture
def pair(runs, tmp_path):
    """A copy of the sound pair, to be damaged."""
    return shutil.copytree(runs / "tka1", tmp_path / "pair")


def bind(folder):
    return bind_runs(folder / "training", folder / "rollout")


def issues(found):
    return {(issue.code, issue.field) for issue in found.issues}


def trace_of(side):
    with open_trace(side / "trace.h5") as trace:
        return trace.recording, list(trace)


def rank_file(side):
    return side / "ranks" / "tp0-cp0.json"


def test_own_kernels_are_comparable_and_do_not_pass(runs):
    found = bind(runs / "own")

    assert (found.comparable, found.passed, found.status) == (True, False, "refused")
    assert issues(found) == OWN_KERNELS
    assert found.bits["elements"] > 0


def test_readbacks_say_unobservable_and_not_what_was_set(runs):
    for side in ("rollout", "training"):
        told = json.loads(rank_file(runs / "own" / side).read_text())
        assert told["readback"]["reduction"] is None
        assert told["plans"] == []
        knob = told["readback"]["knobs"]["split_kv"]
        assert (knob["state"], knob["effective"]) == ("unobservable", None)
        assert told["readback"]["knobs"]["attention_kernel"]["state"] == "applied"


def test_weights_come_back_from_megatron_as_they_went_in():
    checkpoint = load_file(weights_file())
    there = to_megatron(checkpoint, 2)

    assert same(to_checkpoint(there, 2, 32), checkpoint)
    there["decoder.layers.1.self_attention.linear_qkv.weight"].view(torch.int16)[150, 3] ^= 1
    assert not same(to_checkpoint(there, 2, 32), checkpoint)


def test_tka1_in_both_engines_passes(runs, capsys):
    found = bind(runs / "tka1")

    assert found.issues == ()
    assert found.passed
    assert found.recorded_differences["engine"]["rollout"].startswith("vllm ")
    assert found.recorded_differences["engine"]["training"].startswith("megatron-core ")
    assert {part["verdict"] for part in found.bits["parts"] if part["tensor"] != "sink"} == {"equal"}
    assert any("of the rollout were put in the place" in sentence for sentence in found.boundary)
    assert run(["bind", str(runs / "tka1" / "training"), str(runs / "tka1" / "rollout"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["claim_boundary"] == list(found.boundary)


def test_the_backward_that_ran_is_that_of_tka1(runs):
    """The bound contract has digests of the gradients; this says that they are the right ones."""
    report = tracekit.replay(
        runs / "tka1" / "training" / "trace.h5", provider="tka1", claims=["grad", "backward"]
    )

    assert {verdict.status for verdict in report.verdicts} == {Status.HELD}
    told = json.loads(rank_file(runs / "tka1" / "training").read_text())
    assert {"d_out", "d_q", "d_keys", "d_values"} <= told["digests"].keys()


def flipped(call, tensor):
    bits = getattr(call, tensor).bits
    data = bits.data.copy()
    data.reshape(-1).view(data.dtype)[0] ^= 1
    return replace(call, **{tensor: Output(Bits(data, bits.dtype), getattr(call, tensor).origin)})


@pytest.mark.parametrize("tensor", ["out", "lse"])
def test_one_bit_of_one_row(pair, tensor):
    """Even where the readback is made of the changed rows: then they are no rows of TKA-1."""
    recording, calls = trace_of(pair / "rollout")
    calls[2] = flipped(calls[2], tensor)
    (pair / "rollout" / "trace.h5").unlink()
    write_trace(pair / "rollout" / "trace.h5", recording, calls)
    assert {code for code, _ in issues(bind(pair))} == {"BITS_DIFFER", "EVIDENCE_MISMATCH"}

    leave(pair / "rollout", Role.INFER, TKA1_ASKED, recording, calls)
    codes = {code for code, _ in issues(bind(pair))}
    assert {"BITS_DIFFER", "RUNTIME_UNOBSERVABLE", "SPLIT_KV_RUNTIME_MISSING"} <= codes
    assert "EVIDENCE_MISMATCH" not in codes


def test_another_tree(pair):
    """The same leaves of the same rows, merged one after the other: what ran is not TKA-1's tree."""
    recording, calls = trace_of(pair / "rollout")
    folded = []
    for call in calls:
        ran = merged_leaves(call, left_fold=True)
        out, lse = Bits(ran.out, call.dtype), Bits(ran.lse, DType.FLOAT32)
        folded.append(replace(call, out=Output(out, Origin.EXECUTED), lse=Output(lse, Origin.EXECUTED)))
    (pair / "rollout" / "trace.h5").unlink()
    write_trace(pair / "rollout" / "trace.h5", recording, folded)
    leave(pair / "rollout", Role.INFER, TKA1_ASKED, recording, folded)

    found = issues(bind(pair))
    assert ("RUNTIME_UNOBSERVABLE", "rollout.rank[tp 0, cp 0].reduction") in found
    assert "BITS_DIFFER" in {code for code, _ in found}
    assert "EVIDENCE_MISMATCH" not in {code for code, _ in found}


def test_three_leaves_prove_no_tree(pair):
    """The first chunks see 320 keys: their bits are those of every tree, so nobody observed one."""
    recording, calls = trace_of(pair / "rollout")
    leave(pair / "rollout", Role.INFER, TKA1_ASKED, recording, [call for call in calls if call.step < 2])
    assert json.loads(rank_file(pair / "rollout").read_text())["readback"]["reduction"] is None

    leave(pair / "rollout", Role.INFER, TKA1_ASKED, recording, calls)
    assert (
        json.loads(rank_file(pair / "rollout").read_text())["readback"]["reduction"]["tree"]
        == "aligned_binary"
    )


def test_a_tree_that_is_only_stated(pair):
    told = json.loads(rank_file(pair / "rollout").read_text())
    told["readback"]["reduction"]["tree"] = "left_fold"
    rank_file(pair / "rollout").write_text(json.dumps(told))

    assert issues(bind(pair)) == {("REDUCTION_SEMANTIC_MISMATCH", "reduction.tree")}


def test_a_readback_of_another_run(pair, runs):
    shutil.copy(rank_file(runs / "own" / "rollout"), rank_file(pair / "rollout"))

    found = bind(pair)
    assert not found.passed
    assert ("EVIDENCE_MISMATCH", "rollout.rank[tp 0, cp 0].core.core_id") in issues(found)


def test_a_readback_before_the_run_is_over(pair):
    """Before anything ran there is none; one of the first chunks does not fit what ran in the end."""
    recording, calls = trace_of(pair / "rollout")
    with pytest.raises(BindingInvalid) as caught:
        leave(pair / "rollout", Role.INFER, TKA1_ASKED, recording, [])
    assert caught.value.rule == "B-READBACK"

    leave(pair / "rollout", Role.INFER, TKA1_ASKED, recording, [call for call in calls if call.step < 2])
    codes = {code for code, _ in issues(bind(pair))}
    assert {"EVIDENCE_MISMATCH", "TOPOLOGY_MISMATCH"} <= codes


def test_an_engine_that_falls_back_in_one_layer(runs):
    found = bind_runs(runs / "tka1" / "training", runs / "fallen" / "rollout")

    assert not found.passed
    assert {
        ("RUNTIME_FALLBACK", "rollout.rank[tp 0, cp 0].knobs.attention_kernel"),
        ("RUNTIME_FALLBACK", "rollout.rank[tp 0, cp 0].core.fallback"),
        ("SPLIT_KV_RUNTIME_MISSING", "rollout.split_kv_runtime_plan_set"),
    } <= issues(found)


@pytest.mark.parametrize("side", ["rollout", "training"])
def test_an_engine_that_is_killed_leaves_no_verdict(runs, side):
    sides = {name: runs / ("killed" if name == side else "tka1") / name for name in ("training", "rollout")}

    found = bind_runs(sides["training"], sides["rollout"])
    assert found.status == "inconclusive"
    assert ("BITS_NOT_COMPARED", "trace") in issues(found)
    assert run(["bind", str(sides["training"]), str(sides["rollout"])]) == 3
