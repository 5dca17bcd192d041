"""`python -m tools.portability`: one hash for every form of TKA-1, into docs/portability.md.

It ends with 1 when a form gives other bits, or is missing for a reason that tests/not_run.txt does not hold.
"""

import argparse
import sys
from pathlib import Path

from tools.portability.forms import Found, all_forms
from tracekit.providers.tka1 import selftest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "portability.md"
HEAD = """# TKA-1: the same bits everywhere

Written by `python -m tools.portability`. Every form of TKA-1 (docs/tka1.md) computes the wild launches
of the self-test: lists and ranges, one and two families, sinks, rows without keys, NaN, infinities,
subnormals; in bf16, binary16 and binary32. Hashed are the binary32 partials, O and both LSE.

The forms of the GPU body ran on a CPU. **None of this is a run on a GPU**: a device is called
bit-verified only by its own self-test.

"""


def page(found: list[Found]) -> str:
    """Return the text of docs/portability.md."""
    gave = [f"not run: {f.missing}" if f.missing else " ".join(d[:16] for d in f.digests) for f in found]
    rows = [f"| {f.form} | {f.how} | {what} |" for f, what in zip(found, gave, strict=True)]
    wanted = f"{selftest.EXPECTED[:16]} {selftest.EXPECTED_WIDE[:16]}"
    table = [
        "| form | what ran | SHA-256, first 16 digits: bf16, then binary16 and binary32 |",
        "|---|---|---|",
    ]
    return HEAD + "\n".join(table + rows) + f"\n\nThe definition gives `{wanted}`.\n"


def faults(found: list[Found], listed: str) -> list[str]:
    """Return what is wrong: other bits, or a form that is missing without a listed reason."""
    reasons = {line.split(" | ")[-1] for line in listed.splitlines() if line and not line.startswith("#")}
    other = [f"{f.form} gives {f.digests}" for f in found if not f.missing and not f.right]
    missing = [f"{f.form} did not run: {f.missing}" for f in found if f.missing and f.missing not in reasons]
    return other + missing


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.portability", description=__doc__)
    parser.add_argument("--check", action="store_true", help="do not write the page")
    options = parser.parse_args()
    found = list(all_forms())
    text = page(found)
    print(text[text.index("| form") :])
    wrong = faults(found, (ROOT / "tests" / "not_run.txt").read_text())
    for line in wrong:
        print(line, file=sys.stderr)
    if not options.check:
        PAGE.write_text(text)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
