"""CPU replay needs no torch."""

import subprocess
import sys

LIGHT = (
    "tracekit.compare",
    "tracekit.relations",
    "tracekit.controls.base",
    "tracekit.providers.portable",
    "tracekit.providers.oracle",
    "tracekit.providers.registry",
    "tracekit.replayer",
    "tracekit.testing",
)


def test_nothing_but_the_torch_provider_imports_torch():
    code = f"import sys, {', '.join(LIGHT)}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
