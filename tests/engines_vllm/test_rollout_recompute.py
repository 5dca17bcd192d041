"""Rollout against recompute in vLLM, same engine and weights (docs/findings.md)."""

import pytest
import torch

from tests.engines_vllm import tiny_engine  # noqa: F401 - sets what vLLM reads when it is imported
from tools.findings.vllm_rollout_recompute import compared


def differing(line):
    """Elements that differ and those compared, of Q, keys, values, the selection and O."""
    _, *cells = line.split(" | ")
    return [tuple(int(part.replace(",", "")) for part in cell.split(" of ")) for cell in cells]


def test_with_tka1_recompute_has_the_bits_of_the_rollout(qwen3_tka1):
    for line in compared(qwen3_tka1, 300):
        assert all(not wrong and seen for wrong, seen in differing(line))


@pytest.mark.skipif(not torch.cpu._is_amx_tile_supported(), reason="the finding is of the path for AMX")
def test_with_vllms_own_kernel_equal_inputs_have_other_outputs(qwen3):
    *inputs, out = differing(compared(qwen3, 300)[0])
    assert not any(wrong for wrong, _ in inputs)
    assert out[0]
