"""One run with a stand-in for all tests that read its evidence."""

import os
import sys

import pytest

GOLDEN = "smollm2-prefill.tka1.h5"


@pytest.fixture(scope="session")
def stood_in_once(tmp_path_factory: pytest.TempPathFactory):
    """Exit code, evidence and path of the evidence of a run with the provider `tka1` for a device."""
    pytest.importorskip("torch")
    from tools.gpu_acceptance.__main__ import main
    from tools.gpu_acceptance.evidence import parse_evidence

    out = tmp_path_factory.mktemp("run") / "e.json"
    with pytest.MonkeyPatch.context() as patch:  # the tool sets the path of its children
        patch.setenv("PYTHONPATH", os.environ.get("PYTHONPATH", ""))
        patch.setattr(sys, "path", list(sys.path))
        code = main(["--stand-in", "--golden", GOLDEN, "-o", str(out), "--commit", "0" * 40])
    return code, parse_evidence(out.read_text()), out
