"""Every provider of the CPU keeps the protocol."""

import pytest

from tracekit.providers.base import Provider
from tracekit.providers.registry import create
from tracekit.testing import ProviderSuite


class TestTka1(ProviderSuite):
    def provider(self) -> Provider:
        return create("tka1")


class TestTka1Numpy(ProviderSuite):
    def provider(self) -> Provider:
        return create("tka1-numpy")


class TestOracle(ProviderSuite):
    def provider(self) -> Provider:
        return create("oracle")


class TestTorchFlashCpu(ProviderSuite):
    def provider(self) -> Provider:
        pytest.importorskip("torch")
        return create("torch-flash-cpu")


class TestTransformers(ProviderSuite):
    def provider(self) -> Provider:
        pytest.importorskip("transformers")
        return create("transformers")
