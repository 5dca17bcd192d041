import pytest
import torch

from tracekit.engines.torch_bits import own
from tracekit.engines.transformers_weights import Weights
from tracekit.recorder.arena import Arena

LAYOUTS = {
    "contiguous": lambda t: t,
    "heads inside": lambda t: t.transpose(1, 2),
    "a part of wider rows": lambda t: t[..., 2:5],
    "every second row": lambda t: t[:, ::2],
    "broadcast": lambda t: t[:, :1].expand(-1, 6, -1, -1),
    "with a gradient": lambda t: t.clone().requires_grad_(),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_copy_has_the_bits_of_every_element_and_is_its_own(layout, dtype):
    source = torch.randn(2, 4, 3, 8).to(dtype)
    tensor = LAYOUTS[layout](source)
    before = tensor.detach().clone()
    copy = own(tensor, Arena())
    tensor.detach().zero_()

    assert torch.equal(copy.tensor(), before)
    assert copy.memory.nbytes <= before.nbytes


def test_every_kind_of_update_of_the_weights_is_seen():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2, bias=False), torch.nn.Sequential(torch.nn.Linear(2, 2)))
    weights = Weights(model)
    assert not weights.changed()
    with torch.no_grad():
        model[1][0].bias.add_(1)
    assert weights.changed()
    assert not weights.changed()
    model[0].weight = torch.nn.Parameter(torch.zeros(2, 2))
    assert weights.changed()
    model[1][0] = torch.nn.Linear(2, 2)
    assert weights.changed()
    assert not weights.changed()
