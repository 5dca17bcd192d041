"""`python -m tools.pair DIR`: vLLM serves, Megatron-core trains on it, then the two runs are bound.

Each engine is a process of its own. `--tka1` puts TKA-1 in the place of both attention kernels, and
`--inject` gives Megatron's core attention the rollout's own queries, keys and values.
"""

import argparse
import json
from pathlib import Path

from tools.pair.launch import launch
from tracekit.cli.bind import EXITS
from tracekit.contract.judge import bind_runs


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.pair", description=__doc__)
    parser.add_argument("folder", type=Path, help="where the runs `training` and `rollout` go")
    parser.add_argument("--tka1", action="store_true", help="TKA-1 as the attention of both engines")
    parser.add_argument(
        "--inject", action="store_true", help="the same queries, keys and values on both sides"
    )
    given = parser.parse_args()
    rollout, training = given.folder / "rollout", given.folder / "training"
    if there := [str(run) for run in (rollout, training) if run.exists()]:
        parser.error(f"{there[0]} exists; a run is never written over another: name a new folder.")
    both = ["--tka1"] if given.tka1 else []
    inject = ["--inject"] if given.inject else []
    try:
        launch("rollout", rollout, *both)
        launch("training", training, str(rollout), *both, *inject)
    except RuntimeError as failed:
        parser.exit(2, f"{failed}\n")
    found = bind_runs(training, rollout)
    print(json.dumps(found.to_dict(), indent=1))
    return EXITS[found.status]


if __name__ == "__main__":
    raise SystemExit(main())
