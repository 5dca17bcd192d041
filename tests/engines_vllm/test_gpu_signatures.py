"""vLLM's implementations for GPUs: what is relied on stands in the installed sources, and Triton's runs here.

FlashAttention and FlashInfer cannot run here. Their classes, arguments and metadata are read out of their
sources, which also shows at once when a version changes them.
"""

import ast
import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import make_dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tracekit
from tracekit.engines.patch import EVIDENCE
from tracekit.engines.vllm_signatures import (
    FORWARD,
    SIGNATURES,
    batch_of,
    flashinfer_batch,
    page_layout,
    read_rows,
)
from tracekit.errors import InvalidCall, Unsupported
from tracekit.verdict import Status


def source(module):
    """The syntax of an installed module, without importing it: some need a GPU for that."""
    root = Path(importlib.util.find_spec("vllm").origin).parent
    return ast.parse((root.parent / f"{module.replace('.', '/')}.py").read_text())


def class_of(tree, name):
    return next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)


def fields(node):
    return {part.target.id for part in node.body if isinstance(part, ast.AnnAssign)}


@pytest.mark.parametrize(
    ("place", "signature"), SIGNATURES.items(), ids=lambda part: part[-1] if isinstance(part, tuple) else ""
)
def test_the_installed_source_has_the_signature(place, signature):
    module, name = place
    tree = source(module)
    implementation = class_of(tree, name)
    forward = next(n for n in implementation.body if isinstance(n, ast.FunctionDef) and n.name == "forward")
    assert tuple(argument.arg for argument in forward.args.args) == FORWARD
    metadata, read = signature.metadata
    assert read <= fields(class_of(tree, metadata))
    assigned = {
        node.attr
        for node in ast.walk(implementation)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
    }
    assert signature.own <= assigned
    # The logical order of the cache, as the source says it beside `forward`.
    text = " ".join(ast.get_docstring(forward).split())
    assert "[num_blocks, num_kv_heads, block_size, 2 * head_size]" in text.replace(
        "2*head_size", "2 * head_size"
    )


def test_a_signature_that_changed_is_seen():
    """The check above can fail."""
    tree = source("vllm.v1.attention.backends.triton_attn")
    assert not {"kv_indptr"} <= fields(class_of(tree, "TritonAttentionMetadata"))


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 3), st.sampled_from([1, 4, 16]), st.booleans(), st.data())
def test_rows_come_back_whatever_the_strides(heads, page, nhd, data):
    """HND and NHD are the same logical shape with other strides."""
    dim, pages, count = 8, 6, data.draw(st.integers(1, 4 * page))
    first = data.draw(st.integers(0, count - 1))
    shape = (pages, page, heads, 2 * dim) if nhd else (pages, heads, page, 2 * dim)
    cache = torch.randint(-(2**15), 2**15, shape, dtype=torch.int16).view(torch.bfloat16)
    cache = cache.transpose(1, 2) if nhd else cache
    table = np.array(data.draw(st.permutations(range(1, pages))), np.int32)
    keys, values = read_rows(cache, dim, table, first, count)
    words = cache.view(torch.int16).numpy().view(np.uint16)
    for at in range(first, count):
        row = words[table[at // page], :, at % page]
        assert np.array_equal(keys[at - first], row[:, :dim])
        assert np.array_equal(values[at - first], row[:, dim:])


def test_pages_that_are_nobodys_are_refused():
    cache = torch.zeros(4, 2, 4, 16, dtype=torch.bfloat16)
    for table, rule in (
        ([0, 1], "C-PAGE-NULL"),
        ([1, 1], "C-PAGE-TWICE"),
        ([1, 9], "C-PAGE-HOLE"),
        ([1], "C-PAGE-LENGTH"),
    ):
        with pytest.raises(InvalidCall) as caught:
            read_rows(cache, 8, np.array(table, np.int32), 0, 8)
        assert caught.value.rule == rule
    with pytest.raises(Unsupported, match="rows with scales between them"):
        page_layout((4, 2, 4, 24), 8)


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


def test_requests_of_flash_attention_and_triton():
    batch = batch_of(
        SimpleNamespace(
            query_start_loc=ints(0, 1, 4), seq_lens=ints(9, 3), block_table=torch.arange(4).reshape(2, 2)
        )
    )
    assert batch.starts.tolist() == [0, 1, 4]
    assert [table.tolist() for table in batch.tables] == [[0, 1], [2, 3]]


def test_requests_of_flashinfer_are_decodes_then_prefills():
    decode = SimpleNamespace(block_tables=torch.tensor([[5, 6]]), seq_lens=ints(40))
    prefill = SimpleNamespace(
        block_tables=torch.tensor([[1], [2]]), seq_lens=ints(7, 20), cum_seq_lens_q=ints(0, 7, 11)
    )
    batch = flashinfer_batch(
        SimpleNamespace(num_decodes=1, num_decode_tokens=1, decode=decode, prefill=prefill)
    )
    assert batch.starts.tolist() == [0, 1, 8, 12]
    assert batch.lengths.tolist() == [40, 7, 20]
    wrapped = make_dataclass("FIPrefill", ["wrapper"])(object())
    with pytest.raises(Unsupported, match="FIPrefill") as caught:
        flashinfer_batch(SimpleNamespace(decode=None, prefill=wrapped))
    assert caught.value.rule == "V-FLASHINFER"


def run_triton(out, model, *more):
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.engines_vllm.triton_engine", model, str(out), *more],
        cwd=Path(__file__).parents[2],
        env=os.environ,
        capture_output=True,
        text=True,
        check=False,
    )
    return ran, json.loads(ran.stdout.splitlines()[-1]) if ran.returncode == 0 else None


@pytest.mark.parametrize("model", ["tiny-qwen3", "tiny-gpt-oss"])
def test_tritons_implementation_is_recorded_in_a_real_engine(model, tmp_path):
    """Chunked prefill, a mixed batch, decode; gpt-oss with sinks and a window. O fits what is declared."""
    out = tmp_path / "run.h5"
    ran, said = run_triton(out, model)
    assert said is not None, ran.stderr[-2000:]
    assert said["problems"] == []
    assert said["notes"]["evidence"] == f"TRITON_ATTN: {EVIDENCE}"
    with tracekit.open(out) as trace:
        calls = list(trace)
    assert {call.provenance.executed.kernel for call in calls} == {"vllm.triton_attn"}
    assert {call.provenance.details["evidence"] for call in calls} == {EVIDENCE}
    assert {call.conventions.window for call in calls} == ({None} if "qwen3" in model else {16, None})
    report = tracekit.replay(out, provider="trace", claims=["control"])
    assert report.status is Status.BOUNDED


def test_a_window_that_means_something_else_is_not_recorded(tmp_path):
    """One row of each layer is asked before anything is kept; the layer without a window still is."""
    out = tmp_path / "run.h5"
    ran, said = run_triton(out, "tiny-gpt-oss", "a wrong window")
    assert said is not None, ran.stderr[-2000:]
    assert len(said["problems"]) == 4
    assert all("layer 0, position " in text for text in said["problems"])
    with tracekit.open(out) as trace:
        assert {call.layer for call in trace} == {1}
        assert not any(line.complete for line in trace.recording.ledger)


def test_the_provider_calls_unified_attention_as_the_installed_source_has_it():
    from tracekit.providers.vllm_triton import ARGUMENTS, TARGET

    module, name = TARGET.split(":")
    function = next(n for n in source(module).body if isinstance(n, ast.FunctionDef) and n.name == name)
    given = [argument.arg for argument in function.args.args]
    assert set(ARGUMENTS) <= set(given)
    without_default = given[: len(given) - len(function.args.defaults)]
    assert set(without_default) <= set(ARGUMENTS)


def test_the_provider_runs_vllms_kernel_in_the_interpreter():
    """Pages, GQA, decode, window, sinks: O lies in the envelope. No GPU ran it."""
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.engines_vllm.triton_provider"],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    said = json.loads(ran.stdout.splitlines()[-1])
    assert said["kernel"] == "vllm.triton_unified_2d"
    assert all(elements and inside for elements, inside in said["found"])
