"""The Python of README runs as it is written, in one fresh process, in the order of the page."""

import re
import subprocess
import sys
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"


def snippets() -> list[str]:
    return re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)


def test_python_snippets_run(tmp_path):
    recording, backend, _, gated = snippets()
    code = recording + backend + "\nwith __import__('torch').no_grad(): model(**inputs)\n" + gated
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "mine.h5").exists()


def test_the_pytest_snippet_passes(tmp_path):
    _, _, marked, _ = snippets()
    (tmp_path / "traces").symlink_to(README.parent / "traces")
    (tmp_path / "test_it.py").write_text(marked)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "--rootdir",
        str(tmp_path),
        "test_it.py",
    ]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert "1 passed" in done.stdout, done.stdout + done.stderr
