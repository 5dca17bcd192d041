"""h5py with hdf5plugin, and nothing of tracekit, reads the same bytes."""

import subprocess
import sys

import h5py
import hdf5plugin  # noqa: F401 (registers the zstd filter)
import numpy as np
import pytest

from tests.store.calls import decode_steps, plan, prefill, recording, two_families
from tracekit.store import open_trace, write_trace


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("stock") / "x.h5"
    large = prefill(5, (900,), heads=(8, 2), dims=(64, 64), launch=plan(900, 1))
    write_trace(path, recording(), [prefill(), large, two_families(), *decode_steps(4)])
    return path


def test_every_payload_dataset_has_the_same_bytes(path):
    with open_trace(path) as trace, h5py.File(path) as file:
        specs = trace.head.payload.values()
        assert len(specs) > 8
        for spec in specs:
            stock = file[f"payload/{spec.path}"]
            ours = trace.payload.read(spec.path, 0, spec.rows)
            assert stock.dtype == ours.dtype
            assert stock[()].tobytes() == ours.tobytes()


def test_q_of_a_call_by_the_index_tables(path):
    with open_trace(path) as trace, h5py.File(path) as file:
        call = trace.call(1)
        line = file["index/tensors"][file["index/calls"][1]["tensors"]]
        stack = file[f"payload/q/{line['stack']}"]
        assert stack.attrs["tracekit_dtype"] == b"bfloat16"
        assert np.array_equal(stack[line["first"] : line["first"] + 900], call.q.data)


def test_fixed_shapes_and_chunks_after_the_head(path):
    with open_trace(path) as trace, h5py.File(path) as file:
        end = 512 + trace.head.block.head
        for spec in trace.head.payload.values():
            stock = file[f"payload/{spec.path}"]
            assert stock.maxshape == stock.shape
            assert all(stock.id.get_chunk_info(i).byte_offset >= end for i in range(spec.chunks))


def test_writing_needs_no_filter_plugin(tmp_path):
    """The core installs h5py without hdf5plugin: chunks are encoded by tracekit itself."""
    code = (
        "import sys; sys.modules['hdf5plugin'] = None\n"
        "from tests.store.calls import prefill, recording\n"
        "from tracekit.store import open_trace, verify_trace, write_trace\n"
        f"path = {str(tmp_path / 'x.h5')!r}\n"
        "write_trace(path, recording(), [prefill()])\n"
        "assert verify_trace(path) == []\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
