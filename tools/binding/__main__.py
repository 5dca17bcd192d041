"""`python -m tools.binding DIR`: run training and rollout over real processes, then bind them."""

import argparse
import json
from pathlib import Path

from tools.binding.job import Job
from tools.binding.launch import launch
from tracekit.cli.bind import EXITS
from tracekit.contract import Role
from tracekit.contract.judge import bind_runs
from tracekit.errors import BindingInvalid
from tracekit.providers.split import Sequence


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m tools.binding", description=__doc__)
    parser.add_argument("folder", type=Path, help="where the runs `training` and `rollout` go")
    parser.add_argument("--tp", type=int, default=2, help="tensor-parallel ranks (default: 2)")
    parser.add_argument("--cp", type=int, default=2, help="context-parallel ranks (default: 2)")
    parser.add_argument("--layout", type=Sequence, choices=list(Sequence), default=Sequence.ZIGZAG)
    parser.add_argument("--tokens", type=int, default=Job.tokens)
    given = parser.parse_args()
    job = Job(tp=given.tp, cp=given.cp, sequence=given.layout, tokens=given.tokens)
    for role, name in ((Role.TRAIN, "training"), (Role.INFER, "rollout")):
        try:
            codes = launch(job, role, given.folder / name)
        except BindingInvalid as refused:
            parser.error(str(refused))
        print(f"{name}: {len(codes)} processes ended with {codes}")
    found = bind_runs(given.folder / "training", given.folder / "rollout")
    print(json.dumps(found.to_dict(), indent=1))
    return EXITS[found.status]


if __name__ == "__main__":
    raise SystemExit(main())
