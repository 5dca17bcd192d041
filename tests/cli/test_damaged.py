"""A damaged trace on the command line: the table first, then one sentence that names the file."""

from tracekit.errors import TraceCorrupt
from tracekit.store import Trace


def test_the_error_is_told_behind_the_table(tracekit_cli, prefill, monkeypatch):
    read = Trace.call

    def call(self, index):
        if index:
            raise TraceCorrupt("Chunk 9 is damaged.", rule="E-19")
        return read(self, index)

    monkeypatch.setattr(Trace, "call", call)
    done = tracekit_cli(
        "replay", prefill, "--provider", "torch-flash-cpu", "--claim", "solo", "--calls", "0,1"
    )

    assert done.code == 1
    assert "REFUTED" in done.out
    assert done.err.splitlines()[-1] == f"tracekit: {prefill}: Chunk 9 is damaged."
