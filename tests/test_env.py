"""`TRACEKIT_*`: read once, parsed at the border, never guessed."""

import pytest

from tracekit.env import KNOWN, parse_settings
from tracekit.errors import UsageError


def test_defaults():
    settings = parse_settings({"HOME": "/nowhere"})
    assert settings.threads >= 1
    assert settings.isa is None
    assert settings.cache.name == "tracekit"


@pytest.mark.parametrize(("cores", "threads"), [(3, 3), (None, 1)])
def test_threads_where_the_system_tells_no_affinity(monkeypatch, cores, threads):
    monkeypatch.delattr("os.sched_getaffinity")
    monkeypatch.setattr("os.cpu_count", lambda: cores)
    assert parse_settings({"HOME": "/nowhere"}).threads == threads


@pytest.mark.parametrize(
    ("environ", "rule"),
    [
        ({"TRACEKIT_TREADS": "2"}, "V-UNKNOWN"),
        ({"TRACEKIT_ISA": "avx512"}, "V-ISA"),
        ({"TRACEKIT_THREADS": "two"}, "V-NUMBER"),
        ({"TRACEKIT_THREADS": "0"}, "V-NUMBER"),
        ({"TRACEKIT_THREADS": "2.5"}, "V-NUMBER"),
        ({"TRACEKIT_TIMEOUT": "nan"}, "V-NUMBER"),
        ({"TRACEKIT_TIMEOUT": "inf"}, "V-NUMBER"),
        ({"TRACEKIT_TIMEOUT": "1e8"}, "V-NUMBER"),
        ({"TRACEKIT_RECORD": ""}, "V-RECORD"),
        ({"TRACEKIT_BACKEND": "tka2"}, "V-BACKEND-NAME"),
    ],
)
def test_bad_values_are_named(environ, rule):
    with pytest.raises(UsageError) as caught:
        parse_settings(environ)
    assert caught.value.rule == rule


def test_a_misspelt_name_lists_the_valid_ones():
    with pytest.raises(UsageError) as caught:
        parse_settings({"TRACEKIT_X": "1"})
    assert caught.value.fields["valid"] == list(KNOWN)
