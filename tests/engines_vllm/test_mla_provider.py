"""`vllm-mla-cpu` runs vLLM's own decode over latents; no engine is asked."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import tracekit
from tracekit.model import Bits, DType, KVFamily, KVRows
from tracekit.providers import vllm_cpu_ops
from tracekit.providers.base import Launch, Provider
from tracekit.providers.vllm_mla import KERNEL, VllmMla, executed
from tracekit.store import write_trace
from tracekit.testing import ProviderSuite
from tracekit.testing.build import dense_call
from tracekit.verdict import Status

GOLDEN = Path(__file__).parents[2] / "traces" / "mla.vllm-cpu.h5"


def latent_call(lengths, seed=0, dtype=DType.BFLOAT16, new=None):
    """Decodes over latents: one head of 576 elements, of which the first 512 are the value."""
    sizes = {"heads": 4, "kv_heads": 1, "head_dim": 576, "dtype": dtype, "seed": seed}
    call = dense_call(lengths=lengths, new=new or (1,) * len(lengths), **sizes)

    def latents(rows):
        return KVRows(rows.keys, rows.keys.part((..., slice(512))))

    return replace(
        call,
        kv={key: {KVFamily.DENSE: latents(held[KVFamily.DENSE])} for key, held in call.kv.items()},
    )


class TestVllmMla(ProviderSuite):
    def provider(self) -> Provider:
        return VllmMla()

    def calls(self):
        return [
            latent_call((40, 17, 200), seed=1),
            latent_call((16,), seed=2, dtype=DType.FLOAT16),
            latent_call((33, 1), seed=3, dtype=DType.FLOAT32),
            dense_call(),
        ]


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (latent_call((9, 20)), None),
        (latent_call((9,), new=(3,)), "one row of each request"),
        (dense_call(lengths=(9,), new=(1,)), "its rows are one head of 576 elements"),
        (dense_call(lengths=(9,), new=(1,), heads=4, kv_heads=1, head_dim=576), "of which 512 are the value"),
        (dense_call(lengths=(9,), new=(1,), sink=True), "sink"),
    ],
)
def test_what_it_takes(call, words):
    told = VllmMla().refuses(call)
    assert told is None if words is None else words in told


def test_values_that_are_not_the_start_of_their_keys_are_refused():
    call = latent_call((9, 20))
    key = call.rows.requests[1]
    rows = call.kv[key][KVFamily.DENSE]
    values = Bits(rows.values.data ^ 1, rows.values.dtype)
    other = call.with_kv({**call.kv, key: {KVFamily.DENSE: replace(rows, values=values)}})
    assert "its values are the first part of its keys" in VllmMla().refuses(other)


def test_the_number_of_threads_decides_bits_and_is_recorded():
    """docs/findings.md: keys are split over threads, so `threads` is no promise of it."""
    call = latent_call((200, 37, 1, 16, 90), seed=4)
    one, two = (
        VllmMla().run(Launch((replace(call, provenance=replace(call.provenance, threads=n)),))).tensors[0].out
        for n in (1, 2)
    )
    assert not one.same(two)
    assert "threads" not in VllmMla().advertised()


def test_a_build_without_the_operator_is_told(monkeypatch):
    monkeypatch.setattr(vllm_cpu_ops, "operators", object)
    with pytest.raises(tracekit.errors.Unavailable, match="has no mla_decode_kvcache"):
        VllmMla()


def test_its_claims_are_held_on_the_golden():
    """Recorded bits where the same library is here, its other promises everywhere."""
    with tracekit.open(GOLDEN) as trace:
        recorded = trace.call(0).provenance.executed
    assert recorded.kernel == KERNEL
    report = tracekit.replay(GOLDEN, provider="vllm-mla-cpu")
    status = {verdict.claim: verdict.status for verdict in report.verdicts}
    other = recorded.differences(executed())
    assert status.pop("recorded") is (Status.NOT_RUN if other else Status.HELD)
    assert set(status) == VllmMla().advertised() - {"recorded"}
    assert set(status.values()) == {Status.HELD}


def test_a_flipped_bit_of_the_golden_is_refuted(tmp_path):
    with tracekit.open(GOLDEN) as trace:
        recording, calls = trace.recording, list(trace)
    data = np.array(calls[0].out.bits.data)
    data[0, 1, 2] ^= 1
    broken = replace(calls[0], out=replace(calls[0].out, bits=Bits(data, calls[0].dtype)))
    write_trace(tmp_path / "broken.h5", replace(recording, ledger=()), [broken])
    report = tracekit.replay(tmp_path / "broken.h5", provider="vllm-mla-cpu", claims=["recorded"])
    other = broken.provenance.executed.differences(executed())
    assert report.find("recorded").status is (Status.NOT_RUN if other else Status.REFUTED)
