"""A checkpoint in the cache is written once, and is there complete or not at all."""

import pytest

from tracekit.engines import cached
from tracekit.env import settings


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TRACEKIT_CACHE", str(tmp_path / "cache"))
    settings.cache_clear()
    yield tmp_path / "cache"
    settings.cache_clear()


def test_a_checkpoint_is_written_once(cache, capsys):
    written = []

    def write(folder):
        written.append(folder)
        (folder / "config.json").write_text("{}")

    for _ in range(2):
        assert cached.prepared("m-1", write, "converting m") == cache / "m-1"
    assert len(written) == 1
    assert capsys.readouterr().err == f"tracekit: converting m into {cache / 'm-1'}\n"
    assert [item.name for item in cache.iterdir()] == ["m-1"]


def test_a_failure_leaves_nothing(cache):
    def write(folder):
        (folder / "config.json").write_text("{}")
        raise RuntimeError("full")

    with pytest.raises(RuntimeError, match="full"):
        cached.prepared("m-1", write)
    assert list(cache.iterdir()) == []
