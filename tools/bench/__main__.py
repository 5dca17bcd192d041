"""`python -m tools.bench NAME`: our time against a peer's, same work, in one process.

Prints name, ours, peer, ratio (peer / ours), gate and ok; what cannot be run here says why.
With `--gate` a missed gate ends with exit code 1, and a gate that could not be judged here with 3;
a process that fails ends it with 6.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from tools.bench import gate, kernels, record, replay
from tools.bench.timing import Row, exit_code

BENCHES: dict[str, Callable[[int], list[Row]]] = {
    "kernels": kernels.rows,
    "gate": gate.rows,
    "record": record.rows,
    "replay": replay.rows,
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.bench", description=__doc__)
    parser.add_argument("name", choices=BENCHES)
    parser.add_argument("--rounds", type=_count, default=9, help="timed turns of each function (default: 9)")
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    parser.add_argument(
        "--gate", action="store_true", help="exit with 1 when a gate is missed, 3 when not run"
    )
    options = parser.parse_args()

    try:
        rows = BENCHES[options.name](options.rounds)
    except subprocess.CalledProcessError as error:  # its own code must not be read as that of a missed gate
        command = " ".join(map(str, error.cmd))[:200]
        print(f"a bench needs `{command}`, and that ended with {error.returncode}; run it alone to see why.")
        return 6
    print(f"{'name':35} {'ours ms':>9} {'peer ms':>9} {'peer/ours':>9} {'gate':>5}  ok   peer")
    for row in rows:
        print(line(row))
    missed = [row for row in rows if row.ok is False]
    unjudged = [row.name for row in rows if row.gate and row.ok is None]
    if missed and not options.gate:
        print(f"{len(missed)} of {len(rows)} below the gate; --gate makes that an error.")
    if unjudged:
        print(f"inconclusive: {', '.join(unjudged)} gave no time here, so the gates of these say nothing.")
    if options.json:
        options.json.write_text(json.dumps([row.to_dict() for row in rows], indent=1) + "\n")
    return exit_code(rows) if options.gate else 0


def _count(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is no number of rounds; give 1 or more")
    return int(text)


def line(row: Row) -> str:
    """One row of the table; a row without a gate is neither ok nor missed."""
    if row.not_run:
        return f"{row.name:35} not run: {row.not_run}"
    gate = f"{row.gate:5.1f}" if row.gate else "    -"
    ok = {True: "yes", False: "no", None: "-"}[row.ok]
    others = "".join(
        f"  [{peer} {time / row.ours:.2f}]" for peer, time in row.peers.items() if len(row.peers) > 1
    )
    times = f"{_ms(row.ours)} {_ms(row.peer)} {row.ratio:9.2f}"
    return f"{row.name:35} {times} {gate}  {ok:3}  {row.peer_name}{others}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:9.2f}" if seconds >= 1e-3 else f"{seconds * 1e3:9.4f}"


if __name__ == "__main__":
    sys.exit(main())
