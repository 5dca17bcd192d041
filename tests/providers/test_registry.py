"""Names of providers."""

from importlib.metadata import EntryPoint

import pytest

from tracekit.errors import UsageError
from tracekit.providers import registry
from tracekit.providers.base import Provider


@pytest.mark.parametrize("name", ["trace", "tka1", "tka1-numpy", "oracle"])
def test_built_in_providers_have_their_name(name):
    provider = registry.create(name)
    assert isinstance(provider, Provider)
    assert provider.id == name


def test_a_factory_is_found_by_path():
    assert registry.create("tracekit.providers.oracle:Oracle").id == "oracle"


def test_an_unknown_name_lists_the_valid_ones():
    with pytest.raises(UsageError) as error:
        registry.create("torch-flash")
    assert error.value.rule == "P-UNKNOWN"
    assert "torch-flash-cpu" in error.value.fields["valid"]
    assert "Did you mean torch-flash-cpu?" in str(error.value)


@pytest.mark.parametrize("spec", ["tracekit.providers.oracle:Orakel", "no.such.module:Thing"])
def test_what_cannot_be_imported_is_a_usage_error(spec):
    with pytest.raises(UsageError) as error:
        registry.create(spec)
    assert error.value.rule == "P-IMPORT"


def test_other_packages_add_providers_and_do_not_replace_ours(monkeypatch):
    entries = [
        EntryPoint("theirs", "tracekit.providers.oracle:Oracle", registry.GROUP),
        EntryPoint("tka1", "tracekit.providers.oracle:Oracle", registry.GROUP),
    ]
    monkeypatch.setattr(registry, "entry_points", lambda group: entries)
    registry.names.cache_clear()
    try:
        assert registry.create("theirs").id == "oracle"
        assert registry.create("tka1").id == "tka1"
    finally:
        registry.names.cache_clear()
