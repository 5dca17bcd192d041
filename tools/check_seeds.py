"""`python -m tools.check_seeds`: whether docs/seeds.md says the truth about what proves each feature.

Each row A1 to A21 and B1 to B19 names tests or says *not run: REASON*. Every named test must exist; every
row that is not run must be in tests/seeds_not_run.txt with the same reason, and nothing else may be there.
With `--passed FILE`, what `pytest --passed FILE` wrote, each named test outside tests/engines_* must also
have passed, in at least one of its cases. Exits 1 and lists what is wrong.
"""

import argparse
import ast
import re
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[1]
ROWS = [*(f"A{number}" for number in range(1, 22)), *(f"B{number}" for number in range(1, 20)), "B18b"]
ENGINES = "tests/engines_"
"""Folders that `make test-engines` runs, and `make test` does not."""

_TEST = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")
_NOT_RUN = re.compile(r"\*not run: ([^*]+)\*")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.check_seeds", description=__doc__)
    parser.add_argument("--passed", type=Path, help="node ids of the tests that passed, one a line")
    passed = parser.parse_args().passed
    page, listed = (
        (ROOT / "docs" / "seeds.md").read_text(),
        (ROOT / "tests" / "seeds_not_run.txt").read_text(),
    )
    ran = None if passed is None else set(passed.read_text().splitlines())
    wrong = problems(page, listed, ROOT, ran)
    for line in wrong:
        print(f"docs/seeds.md: {line}")
    return 1 if wrong else 0


def problems(page: str, listed: str, root: Path, passed: set[str] | None = None) -> list[str]:
    """Return what is wrong, one sentence each.

    Args:
        page: the text of docs/seeds.md.
        listed: the text of tests/seeds_not_run.txt.
        root: where the tests are.
        passed: node ids that passed; None checks only that tests exist.
    """
    rows = dict(re.findall(r"^\| ([AB]\d+b?) \|(.*)\|$", page, re.MULTILINE))
    wrong = [f"row {name} is missing" for name in ROWS if name not in rows]
    absent = set()
    for name, text in rows.items():
        tests, reasons = _TEST.findall(text), _NOT_RUN.findall(text)
        if not tests and not reasons:
            wrong.append(f"row {name} names no test and does not say why")
        absent |= {f"{name} | {reason}" for reason in reasons}
        for path, test in tests:
            wrong += _of_test(name, path, test, root, passed)
    known = {line for line in listed.splitlines() if line and not line.startswith("#")}
    wrong += [f"not run, and not in tests/seeds_not_run.txt: {entry}" for entry in sorted(absent - known)]
    wrong += [f"in tests/seeds_not_run.txt, and not on the page: {entry}" for entry in sorted(known - absent)]
    return wrong


def _of_test(row: str, path: str, test: str, root: Path, passed: set[str] | None) -> Iterable[str]:
    file = root / path
    if not file.exists() or test not in _names(file):
        return [f"row {row} names {path}::{test}, which does not exist"]
    if passed is None or path.startswith(ENGINES):
        return []
    node = f"{path}::{test}"
    if any(re.fullmatch(re.escape(node) + r"(::\w+|\[.*\])?", name) for name in passed):
        return []
    return [f"row {row} names {node}, which did not pass in this run"]


def _names(file: Path) -> set[str]:
    """The tests of a file: functions, and names that are given to test classes of others."""
    names = set()
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return {name for name in names if name.lower().startswith("test")}


if __name__ == "__main__":
    sys.exit(main())
