"""Every probe of RL-Kernel's debug matrix is executed and found for its own reason; controls find nothing."""

from dataclasses import replace
from pathlib import Path

import pytest

from tools.binding.job import Job
from tools.binding.launch import launch
from tools.binding.mutations import BASE, MUTATIONS, RANKS, Mutation, fires, run_mutation
from tracekit.contract import Role, TopologyPolicy
from tracekit.contract.judge import bind_runs


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("mutations")


@pytest.fixture(scope="module")
def training() -> dict[Job, Path]:
    """Right training sides, by job."""
    return {}


def test_all_21_probes_are_here() -> None:
    assert len({mutation.name for mutation in MUTATIONS}) == len(MUTATIONS) == 21


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_a_probe_is_refused_for_its_own_reason(
    mutation: Mutation, folder: Path, training: dict[Job, Path]
) -> None:
    found = run_mutation(mutation, folder, training)

    assert fires(found, mutation), found.to_dict()
    assert found.comparable == (mutation.name != "tp_head_ownership")
    if mutation.name not in ("tp_head_ownership", "nonstrict_cp_degree"):  # what a rank states is not enough
        assert "BITS_DIFFER" in found.codes()


@pytest.mark.parametrize(
    ("name", "job"),
    [
        ("tp_partition_control", replace(BASE, tp=2)),
        ("batch_composition_control", replace(BASE, chunk=64)),
        ("prefill_decode_tail_control", replace(BASE, prompt=400)),
        ("context_parallel_control", RANKS),
    ],
)
def test_a_control_is_bitwise_zero(name: str, job: Job, folder: Path, training: dict[Job, Path]) -> None:
    """C0 to C2 of the matrix: whoever of them differs makes the probes worthless."""
    right = training.setdefault(BASE, folder / "right")
    if not right.exists():
        assert not any(launch(BASE, Role.TRAIN, right))
    assert not any(launch(job, Role.INFER, folder / name))

    found = bind_runs(right, folder / name, topology=TopologyPolicy.MAY_DIFFER)

    assert found.passed, found.issues
    assert found.bits["rows"] == BASE.tokens
