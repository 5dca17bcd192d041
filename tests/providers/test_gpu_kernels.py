"""Providers of GPU libraries: signatures against what is installed, and their host side with stand-ins.

Nothing here runs on a GPU. torch's operators and vLLM's kernel are held against the installed packages
(vLLM's in tests/engines_vllm); the other libraries are no part of any environment here, and stand-ins take
their calls.
"""

import sys
from types import ModuleType

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from tests.providers import gpu_stand_ins  # noqa: E402
from tracekit.errors import Unavailable  # noqa: E402
from tracekit.model import DType  # noqa: E402
from tracekit.providers import aiter, flash_attn, flash_mla, flashinfer, registry, torch_cuda  # noqa: E402
from tracekit.providers.base import Provider  # noqa: E402
from tracekit.providers.gpu_batch import answer  # noqa: E402
from tracekit.providers.gpu_kernel import load  # noqa: E402
from tracekit.testing import ProviderSuite, dense_call, sparse_call  # noqa: E402


def schema(name):
    return {one.name for one in getattr(torch.ops.aten, name).default._schema.arguments}


@pytest.mark.parametrize("name", torch_cuda.SCHEMAS)
def test_the_installed_torch_has_the_arguments(name):
    assert set(torch_cuda.SCHEMAS[name]) <= schema(name)


def test_an_argument_that_is_gone_shows():
    """The control: CPU flash attention has none of the cumulative lengths."""
    wanted = set(torch_cuda.SCHEMAS["_flash_attention_forward"])
    assert not wanted <= schema("_scaled_dot_product_flash_attention_for_cpu")


@pytest.mark.parametrize("name", registry.UNTESTED)
def test_without_a_gpu_each_is_unavailable(no_device, name):
    with pytest.raises(Unavailable) as caught:
        registry.create(name)
    assert caught.value.rule == "P-DEVICE"


def test_a_library_that_fails_on_import_in_its_own_way_is_unavailable(monkeypatch, tmp_path):
    """Built for another torch, without a compiler, on another driver: libraries raise what they like."""
    (tmp_path / "broken_library.py").write_text("raise RuntimeError('built for\\nCUDA 11')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(Unavailable, match="needs broken_library: built for CUDA 11") as caught:
        load(flash_attn.FlashAttn, "broken_library:f", ("q",))
    assert caught.value.rule == "P-LIBRARY"


def test_a_function_that_does_not_say_what_it_takes_is_another_version():
    with pytest.raises(Unavailable, match="has no argument q") as caught:
        load(flash_attn.FlashAttn, "builtins:type", ("q",))
    assert caught.value.rule == "P-SIGNATURE"


def on_cpu(kind):
    return type(kind.__name__, (kind,), {"device": "cpu"})()


@pytest.fixture
def libraries(monkeypatch):
    """Stand-ins under the names of the libraries."""
    for name, members in {
        "flash_attn": {"flash_attn_varlen_func": gpu_stand_ins.flash_attn_varlen_func},
        "aiter": {},
        "aiter.ops": {},
        "aiter.ops.mha": {"flash_attn_varlen_func": gpu_stand_ins.aiter_varlen},
        "flashinfer": {
            "BatchPrefillWithPagedKVCacheWrapper": gpu_stand_ins.BatchPrefillWithPagedKVCacheWrapper
        },
        "flash_mla": {"flash_mla_sparse_fwd": gpu_stand_ins.flash_mla_sparse_fwd},
    }.items():
        module = ModuleType(name)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)
    return monkeypatch


@pytest.mark.usefixtures("libraries")
class TestFlashAttn(ProviderSuite):
    def provider(self) -> Provider:
        return on_cpu(flash_attn.FlashAttn)


@pytest.mark.usefixtures("libraries")
class TestAiter(ProviderSuite):
    def provider(self) -> Provider:
        return on_cpu(aiter.Aiter)


@pytest.mark.usefixtures("libraries")
class TestFlashInfer(ProviderSuite):
    def provider(self) -> Provider:
        return on_cpu(flashinfer.FlashInfer)


@pytest.mark.usefixtures("libraries")
class TestFlashMla(ProviderSuite):
    def provider(self) -> Provider:
        return on_cpu(flash_mla.FlashMla)

    def calls(self):
        return [
            sparse_call(lengths=(30, 17), heads=64, head_dim=512, seed=5),
            sparse_call(lengths=(9,), heads=64, head_dim=512, sink=False, seed=6),
            sparse_call(heads=8, head_dim=512),
            dense_call(),
        ]


@pytest.mark.usefixtures("libraries")
def test_a_library_that_lost_an_argument_is_refused_by_name(libraries):
    def other(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale=None, causal=False
    ):
        raise AssertionError("it is not called")

    libraries.setattr(sys.modules["flash_attn"], "flash_attn_varlen_func", other)
    with pytest.raises(Unavailable, match="no argument window_size, return_attn_probs") as caught:
        on_cpu(flash_attn.FlashAttn)
    assert caught.value.rule == "P-SIGNATURE"


def test_a_library_that_is_not_there_is_refused_by_name():
    with pytest.raises(Unavailable, match="flash-mla needs flash_mla") as caught:
        on_cpu(flash_mla.FlashMla)
    assert caught.value.rule == "P-LIBRARY"


def test_a_base_2_lse_and_an_empty_row_become_natural():
    call = dense_call(lengths=(2,), heads=1, kv_heads=1)
    out = torch.zeros(2, 1, 16, dtype=torch.bfloat16)
    lse = answer(call, out, torch.tensor([[3.0], [torch.inf]]), base2=True).lse.to_float32()
    assert np.array_equal(lse, np.array([[3 * 0.6931471805599453], [-np.inf]], np.float32))


def test_the_lse_of_packed_rows_in_either_shape():
    starts = torch.tensor([0, 2, 3])
    flat = torch.arange(6.0).reshape(2, 3)  # [H, T]
    padded = torch.full((2, 2, 2), torch.nan)  # [S, H, longest]
    padded[0], padded[1, :, :1] = flat[:, :2], flat[:, 2:]
    assert torch.equal(torch_cuda.unpadded(flat, starts), flat.T)
    assert torch.equal(torch_cuda.unpadded(padded, starts), flat.T)


def test_wrong_conventions_show(libraries):
    """The control of the suites above: an LSE in base 2 that is called natural lies outside."""
    right = gpu_stand_ins.flash_attn_varlen_func

    def base_2(*arguments, **named):
        out, lse, rest = right(*arguments, **named)
        return out, lse * 1.4426950408889634, rest

    base_2.__signature__ = __import__("inspect").signature(right)
    libraries.setattr(sys.modules["flash_attn"], "flash_attn_varlen_func", base_2)
    with pytest.raises(AssertionError):
        TestFlashAttn().test_answers_lie_in_the_envelope()


def test_untested_kernels_are_labelled():
    assert registry.label("flash-attn") == "by signature, untested on hardware"
    assert registry.label("tka1") == ""
    assert DType.BFLOAT16 in flash_attn.FlashAttn.dtypes
