"""The same Q, K and V rows in each engine's own layout, batch and cut: TKA-1 gives equal bits in all of them.

The rows are those of a real vLLM run on TKA-1: chunked prefill, mixed batches, pages, windows, decode, with O
and LSE as the engine got them. Each further leg lays the same rows out as its engine does and runs what the
engine calls. What must differ stands beside it: one bit of one key, and the engine's own kernel.
"""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from transformers.masking_utils import causal_mask_function, sliding_window_causal_mask_function

from tests.engines_vllm.tiny_engine import dense
from tracekit.engines import megatron_backend, transformers_backend
from tracekit.engines.megatron_mask import slots_of_mask
from tracekit.model import Bits, DType
from tracekit.providers.base import Launch
from tracekit.providers.torch_tensors import from_torch, to_torch
from tracekit.providers.vllm_cpu import VllmCpuNoSplit


@dataclass(frozen=True)
class Sequence:
    """All rows of one request in one layer, bf16 bits `[N, H, D]`, and what vLLM's backend answered."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    out: np.ndarray
    lse: np.ndarray


@dataclass(frozen=True)
class Layer:
    """The rows of one layer and what they are read with."""

    sequences: list[Sequence]
    sink: Bits | None
    scale: float
    window: int | None


def assemble(calls):
    """Put the steps of a layer together again, by request and position."""
    last = max(calls, key=lambda call: call.step)
    sequences = []
    for key in sorted({key for call in calls for key in call.rows.requests}):
        parts = [(call, call.rows.requests.index(key)) for call in calls if key in call.rows.requests]
        rows = [(call, call.rows.request == index) for call, index in parts]
        order = np.argsort(np.concatenate([call.rows.positions[mine] for call, mine in rows]))
        held = {}
        for call, index in parts:
            kv = dense(call, index)
            for at in range(kv.count):
                pair = kv.keys.data[at].tobytes(), kv.values.data[at].tobytes()
                assert held.setdefault(kv.first + at, pair) == pair
        shape = (len(held), *dense(*parts[0]).keys.shape[1:])
        k, v = (
            np.frombuffer(b"".join(held[at][side] for at in sorted(held)), np.uint16).reshape(shape)
            for side in (0, 1)
        )
        joined = [
            np.concatenate([pick(call).data[mine] for call, mine in rows])[order]
            for pick in (lambda c: c.q, lambda c: c.out.bits, lambda c: c.lse.bits)
        ]
        assert len(joined[0]) == len(k), "every row of the request was computed in the run"
        sequences.append(Sequence(joined[0], k, v, *joined[1:]))
    return Layer(sequences, last.sink, last.conventions.scale, last.conventions.window)


def tensor(data, dtype=DType.BFLOAT16):
    return to_torch(Bits(np.ascontiguousarray(data), dtype))


def left_padded(arrays):
    """`[B, H, S, D]` of transformers: shorter sequences are padded on the left, with numbers."""
    longest = max(map(len, arrays))
    batch = np.full((len(arrays), longest, *arrays[0].shape[1:]), 0x3F9D, np.uint16)
    for row, array in zip(batch, arrays, strict=True):
        row[longest - len(array) :] = array
    return tensor(batch.transpose(0, 2, 1, 3))


def transformers_prefill(layer):
    """One left-padded batch, every row at once."""
    return _transformers(layer, [len(s.q) for s in layer.sequences])


def transformers_decode(layer):
    """The last row of each sequence as a decode over the cache of the batch."""
    return _transformers(layer, [1] * len(layer.sequences))


def _transformers(layer, new):
    seqs = layer.sequences
    longest, rows = max(len(s.k) for s in seqs), max(new)
    real = torch.tensor([[False] * (longest - len(s.k)) + [True] * len(s.k) for s in seqs])
    mask = transformers_backend.row_mask(
        len(seqs),
        rows,
        longest,
        q_offset=longest - rows,
        mask_function=sliding_window_causal_mask_function(layer.window)
        if layer.window
        else causal_mask_function,
        attention_mask=real,
    )
    out, lse = transformers_backend.attend(
        torch.nn.Module(),
        left_padded([s.q[len(s.q) - n :] for s, n in zip(seqs, new, strict=True)]),
        left_padded([s.k for s in seqs]),
        left_padded([s.v for s in seqs]),
        mask,
        scaling=layer.scale,
        s_aux=None if layer.sink is None else to_torch(layer.sink),
    )
    return [
        (from_torch(out[i, rows - n :].contiguous(), "out")[0], from_torch(lse[i, rows - n :], "lse")[0])
        for i, n in enumerate(new)
    ]


def megatron_padded(layer):
    """`[sq, b, np, hn]`: shorter sequences are padded on the right, and a mask hides what is padding."""
    longest = max(len(s.q) for s in layer.sequences)
    document = np.full((len(layer.sequences), longest), -1)
    for place, sequence in zip(document, layer.sequences, strict=True):
        place[: len(sequence.q)] = 0
    return _megatron(layer, document, [(b, 0) for b in range(len(layer.sequences))])


def megatron_documents(layer):
    """All sequences are documents of one place of the batch, one after the other."""
    lengths = [len(s.q) for s in layer.sequences]
    document = np.repeat(np.arange(len(lengths)), lengths)[None]
    return _megatron(layer, document, [(0, start) for start in np.cumsum([0, *lengths[:-1]])])


def _megatron(layer, document, starts):
    """Run documents `[b, sq]`, -1 for padding; sequence i stands at `starts[i]`, place and slot."""
    batch, length = document.shape
    at = np.arange(length)
    reads = at[:, None] >= at
    if layer.window:
        reads &= at[:, None] - at < layer.window
    reads = reads & (document[:, :, None] == document[:, None]) & (document >= 0)[:, None]
    mask = torch.from_numpy(~reads[:, None])
    where = [
        (slice(start, start + len(s.q)), place)
        for s, (place, start) in zip(layer.sequences, starts, strict=True)
    ]
    sides = []
    for name in ("q", "k", "v"):
        rows = [getattr(sequence, name) for sequence in layer.sequences]
        side = np.full((length, batch, *rows[0].shape[1:]), 0x3F9D, np.uint16)
        for slot, array in zip(where, rows, strict=True):
            side[slot] = array
        sides.append(tensor(side))
    out, lse = megatron_backend.attend(
        *sides,
        slots_of_mask(mask, None, batch, length),
        mask=mask,
        window=None,
        scale=layer.scale,
        sink=None if layer.sink is None else to_torch(layer.sink),
    )
    return [
        (from_torch(out[slot].contiguous(), "out")[0], from_torch(lse[slot].contiguous(), "lse")[0])
        for slot in where
    ]


LEGS = {
    "transformers, prefill": transformers_prefill,
    "transformers, decode": transformers_decode,
    "Megatron, padded": megatron_padded,
    "Megatron, documents": megatron_documents,
}


def differing(layer, answers):
    """How many values of O and LSE differ from those of vLLM, over the rows that a leg answered."""
    count = compared = 0
    for sequence, (out, lse) in zip(layer.sequences, answers, strict=True):
        rows = slice(len(sequence.q) - len(out), None)
        count += int((sequence.out[rows] != out).sum() + (sequence.lse[rows] != lse.view(np.uint32)).sum())
        compared += out.size + lse.size
    assert compared
    return count


@pytest.fixture(scope="module")
def ran(request, run, prompt):
    """The calls of each engine: prompts of several chunks beside short ones, then decode."""
    found = {}
    for name in ("qwen3", "gpt_oss"):
        llm = request.getfixturevalue(f"{name}_tka1")
        got = run(llm, [prompt(150, 1), prompt(7, 2), prompt(90, 3)], 5)
        assert got.session.problems == []
        found[name] = got
    return found


@pytest.mark.parametrize("leg", LEGS)
@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("name", ["qwen3", "gpt_oss"])
def test_the_same_rows_have_the_same_bits_in_every_engine(ran, name, number, leg):
    layer = assemble(ran[name].of(number))
    assert [len(s.q) for s in sorted(layer.sequences, key=lambda s: len(s.q))] == [11, 94, 154]
    assert differing(layer, LEGS[leg](layer)) == 0


@pytest.mark.parametrize("leg", LEGS)
def test_one_bit_of_one_key_is_seen(ran, leg):
    layer = assemble(ran["qwen3"].of(0))
    longest = max(range(3), key=lambda i: len(layer.sequences[i].k))
    k = layer.sequences[longest].k.copy()
    k[100, 0, 3] ^= 0x4000
    spoiled = list(layer.sequences)
    spoiled[longest] = Sequence(
        spoiled[longest].q, k, spoiled[longest].v, spoiled[longest].out, spoiled[longest].lse
    )
    assert differing(layer, LEGS[leg](Layer(spoiled, layer.sink, layer.scale, layer.window))) > 0


def test_the_engines_own_kernel_has_other_bits(ran):
    """Without the portable kernel the comparison above does not come out even."""
    same = [
        VllmCpuNoSplit().run(Launch((call,))).tensors[0].out.same(call.out.bits)
        for call in ran["qwen3"].of(0)
    ]
    assert not all(same)
