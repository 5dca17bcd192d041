"""What stdout is never changes a verdict: no encoding, no closed pipe, no full disk."""

import os
import subprocess
import sys

import pytest

COMMAND = [sys.executable, "-c", "import sys; from tracekit.cli.main import main; main(sys.argv[1:])"]
RAISING = [
    sys.executable,
    "-c",
    "import sys, click\n"
    "from tracekit.cli import inspect\n"
    "from tracekit.cli.main import main\n"
    "@click.command('inspect')\n"
    "def command():\n"
    "    click.echo('told ' + chr(0xb7) + chr(0x1f600) + chr(0xdcff) + '!' * 99999)\n"
    "    return int(sys.argv[2])\n"
    "inspect.command = command\n"
    "main(sys.argv[1:2])",
    "inspect",
]


def _closed(*command):
    """Run with a stdout whose reader is gone."""
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer) as out:
        return subprocess.run(command, check=False, stdout=out, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize(("code", "expected"), [(0, 141), (1, 1), (3, 141)])
def test_a_closed_pipe(code, expected):
    done = _closed(*RAISING, str(code))
    assert (done.returncode, done.stderr) == (expected, "")


def test_a_short_output_into_a_closed_pipe(prefill):
    for options in ([], ["--json"]):
        done = _closed(*COMMAND, "inspect", str(prefill), *options)
        assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.parametrize(("code", "expected"), [(0, 2), (1, 1), (3, 2)])
def test_a_full_disk(code, expected):
    with open("/dev/full", "w") as out:  # noqa: PTH123
        done = subprocess.run(
            [*RAISING, str(code)], check=False, stdout=out, stderr=subprocess.PIPE, text=True
        )
    assert done.returncode == expected
    assert done.stderr == (
        "tracekit: the output cannot be written: no space left on device; send it elsewhere.\n"
    )


@pytest.mark.parametrize(
    "environment",
    [{"PYTHONIOENCODING": "ascii"}, {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}],
)
def test_an_encoding_that_lacks_the_characters(prefill, environment):
    for command in ([*RAISING, "0"], [*COMMAND, "inspect", str(prefill)]):
        done = subprocess.run(command, check=False, capture_output=True, env={**os.environ, **environment})
        assert (done.returncode, done.stderr) == (0, b"")
    assert rb"\xb7" in done.stdout
