"""Readbacks as JSON: there and back, a published schema, and one refusal a way of being wrong."""

import copy
import json
from typing import Any

import jsonschema
import pytest

from tests.contract.pair import CONTIGUOUS, plan_set, ranks
from tools.binding.schema import PUBLISHED, document
from tracekit.contract import Knob, Role, Stage, State
from tracekit.contract.folder import RankFile
from tracekit.contract.wire import dump, parse, schema
from tracekit.errors import BindingInvalid


def rank_file() -> RankFile:
    """What a sound rank leaves."""
    plans = plan_set().entries[:2]
    return RankFile(ranks(Role.INFER)[0], (512,), plans, {"out": "0" * 64})


def test_there_and_back() -> None:
    told = json.loads(json.dumps(dump(rank_file())))

    assert parse(RankFile, told) == rank_file()


def test_the_published_schema_is_that_of_the_code_and_takes_a_sound_file() -> None:
    published = json.loads(PUBLISHED.read_text())

    assert published == document(), "write it again: python -m tools.binding.schema"
    jsonschema.validate(dump(rank_file()), {**published, "$ref": "#/$defs/rank"})


@pytest.mark.parametrize(
    ("words", "path", "value"),
    [
        ("needs core", ("readback", "core"), None),
        ("does not know colour", ("readback", "colour"), "blue"),
        ("readback.export_lse is 1, which is no bool", ("readback", "export_lse"), 1),
        ("tp_rank is True, which is no int", ("readback", "sharding", "tp_rank"), True),
        ("tp_rank is 0.0, which is no int", ("readback", "sharding", "tp_rank"), 0.0),
        ("role is 'both'; it is one of train, infer", ("readback", "role"), "both"),
        (r"blocks\[0\] holds 3 items, not 2", ("readback", "sharding", "blocks"), [[0, 128, 256]]),
        ("blocks is 'all', which is no list", ("readback", "sharding", "blocks"), "all"),
        ("knobs is \\[\\], which is no dict", ("readback", "knobs"), []),
        ("core is None, which is no dict", ("readback", "core"), None),
        ("reduction is 5, which is no dict", ("readback", "reduction"), 5),
        ("digests.out is 5", ("digests", "out"), 5),
    ],
)
def test_json_that_is_no_readback(words: str, path: tuple[str, ...], value: Any) -> None:
    told: Any = copy.deepcopy(dump(rank_file()))
    place = told
    for name in path[:-1]:
        place = place[name]
    if value is None and words.startswith("needs"):
        del place[path[-1]]
    else:
        place[path[-1]] = value

    with pytest.raises(BindingInvalid, match=words) as refused:
        parse(RankFile, told, "file")

    assert refused.value.rule == "B-JSON"
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(told, schema(RankFile)) if value != 0.0 else _draft_takes_whole_floats()


def _draft_takes_whole_floats() -> None:
    """JSON Schema calls 0.0 an integer; the parser does not."""
    raise jsonschema.ValidationError("stricter here")


@pytest.mark.parametrize(
    ("rule", "make"),
    [
        ("B-KNOB", lambda: Knob("2", "1", State.APPLIED)),
        ("B-KNOB", lambda: Knob("2", None, State.UNOBSERVABLE)),
        ("B-STAGE", lambda: Stage("x", fallback=True)),
        ("B-STAGE", lambda: Stage("x", fallback_reason="for nothing")),
    ],
)
def test_nouns_that_contradict_themselves(rule: str, make: Any) -> None:
    with pytest.raises(BindingInvalid) as refused:
        make()

    assert refused.value.rule == rule


def test_owners_of_the_builder_are_told() -> None:
    assert dump(rank_file())["plans"][0]["expected_kv_ranges"] == [list(CONTIGUOUS[0][0])]
