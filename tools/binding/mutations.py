"""The 21 probes of RL-Kernel's attention debug matrix, each executed: one thing wrong on the rollout side.

The training side is right, and both sides state the same identity; what went wrong must be found from what
ran. `python -m tools.binding.mutations DIR` runs them all and prints the table.
"""

import argparse
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from tools.binding.job import Job
from tools.binding.launch import launch
from tools.binding.settings import Settings
from tracekit.contract import Binding, Role
from tracekit.contract.judge import bind_runs
from tracekit.errors import BindingInvalid
from tracekit.model import DType
from tracekit.providers.split import Sequence

BASE = Job(tokens=416, prompt=408, chunk=200, layers=1, q_heads=8, kv_heads=2, head_dim=64, tp=1, cp=1)
RANKS = replace(BASE, cp=2, sequence=Sequence.ZIGZAG)


@dataclass(frozen=True)
class Mutation:
    """One probe.

    Args:
        name: as in RL-Kernel's matrix.
        axis: its axis there.
        rollout: what the rollout side runs.
        code: an issue that must be there.
        field: how the field of that issue begins.
        training: what the training side runs.
        requested_cp: the context-parallel size that the rollout side was asked for.
    """

    name: str
    axis: str
    rollout: Job
    code: str
    field: str
    training: Job = BASE
    requested_cp: int | None = None


def _changed(base: Job = BASE, **settings: object) -> Job:
    return replace(base, settings=Settings(**settings))  # type: ignore[arg-type]


def _bits(name: str, axis: str, field: str, **settings: object) -> Mutation:
    return Mutation(name, axis, _changed(BASE, **settings), "BITS_DIFFER", f"layer 0.{field}")


MUTATIONS = (
    _bits("position_ids", "position", "q", rope_positions="shifted"),
    _bits("rope_theta", "position", "q", rope_theta=1e4),
    _bits("position_offsets", "position", "q", rope_positions="restarted"),
    _bits("decode_cache_position", "position", "selection", sees="not itself"),
    _bits("qk_norm_eps", "preprocess", "q", norm_eps=1e-2),
    _bits("qk_norm_disabled", "preprocess", "q", norm=False),
    _bits("qk_norm_weight", "preprocess", "q", norm_weight=2),
    _bits("attention_scale", "preprocess", "conventions", scale=1.0001),
    _bits("scale_placement", "preprocess", "conventions", scale_in="queries"),
    _bits("causal_mask", "mask", "conventions", sees="ahead"),
    _bits("key_padding_mask", "mask", "selection", sees="masked"),
    Mutation("tp_head_ownership", "ownership", replace(BASE, tp=2), "TOPOLOGY_MISMATCH", "sharding."),
    _bits("kv_page_order", "cache", "keys", pages="swapped"),
    _bits("kv_cache_content", "cache", "keys", cache="overwritten"),
    Mutation(
        "accum_dtype", "numerics", _changed(RANKS, accumulate=DType.BFLOAT16), "REDUCTION_MANDATE_VIOLATION",
        "rollout.rank[tp 0, cp 0].reduction.accumulate", RANKS,
    ),
    Mutation(
        "execution_dtype", "numerics", _changed(dtype=DType.FLOAT16, write=DType.FLOAT16),
        "REDUCTION_SEMANTIC_MISMATCH", "dtype",
    ),
    _bits("final_write_dtype", "numerics", "out", write=DType.FLOAT16),
    Mutation(
        "early_downcast", "numerics", _changed(RANKS, downcast="per_block"), "REDUCTION_MANDATE_VIOLATION",
        "rollout.rank[tp 0, cp 0].reduction.downcast", RANKS,
    ),
    Mutation("nonstrict_cp_degree", "schedule", BASE, "CP_FALLBACK", "rollout.world", requested_cp=2),
    Mutation(
        "split_kv", "schedule", _changed(RANKS, tree="left_fold"), "REDUCTION_SEMANTIC_MISMATCH",
        "reduction.tree", RANKS,
    ),
    Mutation(
        "merge_order", "schedule", _changed(RANKS, order="arrival"), "REDUCTION_MANDATE_VIOLATION",
        "rollout.rank[tp 0, cp 0].reduction.order", RANKS,
    ),
)  # fmt: skip
"""All 21. `tp_head_ownership` is RL-Kernel's row A4: it is rejected as not comparable, without a number."""


def run_mutation(mutation: Mutation, folder: Path, training: dict[Job, Path]) -> Binding:
    """Run one probe and bind it with a right training side, which is run once a job.

    Raises:
        RuntimeError: a rank failed: then nothing was probed.
    """
    right = training.get(mutation.training)
    if right is None:
        right = training[mutation.training] = folder / f"training-{len(training)}"
        _launch(mutation.training, Role.TRAIN, right)
    mutated = folder / mutation.name
    _launch(mutation.rollout, Role.INFER, mutated, requested_cp=mutation.requested_cp)
    return bind_runs(right, mutated)


def _launch(job: Job, role: Role, folder: Path, *, requested_cp: int | None = None) -> None:
    if any(codes := launch(job, role, folder, requested_cp=requested_cp)):
        raise RuntimeError(f"the ranks of {folder.name} ended with {codes}; see what they said above.")


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m tools.binding.mutations", description=__doc__)
    parser.add_argument("folder", type=Path, help="where the runs go")
    folder = parser.parse_args().folder
    table = Table("axis", "probe", "verdict", "first issue", "values that differ", box=None)
    training: dict[Job, Path] = {}
    missed = 0
    for mutation in MUTATIONS:
        try:
            found = run_mutation(mutation, folder, training)
        except (BindingInvalid, RuntimeError) as failed:
            parser.error(str(failed))
        expected = fires(found, mutation)
        missed += not expected
        issue = found.issues[0] if found.issues else None
        differ = sum(part["differ"] for part in found.bits.get("parts", ())) if found.comparable else ""
        verdict = found.status if expected else f"MISSED ({found.status})"
        first = f"{issue.code} {issue.field}" if issue else ""
        table.add_row(mutation.axis, mutation.name, verdict, Text(first), str(differ))
    Console(width=140).print(table)
    return 1 if missed else 0


def fires(found: Binding, mutation: Mutation) -> bool:
    """Whether a binding refuses a probe for its own reason."""
    mine = [issue for issue in found.issues if issue.code == mutation.code]
    return not found.passed and any(issue.field.startswith(mutation.field) for issue in mine)


if __name__ == "__main__":
    raise SystemExit(main())
