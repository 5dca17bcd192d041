"""Each twin is wrong through its own mechanism, and through no other that could be kept apart."""

import inspect
from dataclasses import replace
from pathlib import Path

import pytest

import tracekit.controls
from tracekit.compare import Roundings, compare_envelope, diagnose, envelope
from tracekit.controls.base import Correct, Twin
from tracekit.controls.base_two import BaseTwo
from tracekit.controls.company import LongCompany
from tracekit.controls.padding import PaddingForgotten
from tracekit.controls.requests import TableByBatchIndex
from tracekit.controls.sink_dropped import SinkDropped
from tracekit.controls.sink_twice import SinkTwice
from tracekit.errors import Unsupported
from tracekit.model import Conventions
from tracekit.providers.base import Launch
from tracekit.providers.placement import Padding
from tracekit.relations import claims, relation
from tracekit.relations.arrange import foreign, join
from tracekit.relations.base import on_kernel
from tracekit.testing import RelationSuite, dense_call, sparse_call

PLACES = ("page-ids", "page-size", "layout", "padding", "slack")
BITWISE = (
    "rerun",
    "threads",
    "requests",
    "rows",
    "solo",
    "subbatch",
    "chunks",
    "decode",
    *PLACES,
    "after",
    "schedule",
    "host-graph",
)

SPREADS = {
    "requests": {"rows"},  # reversing the rows reverses the requests
    "rows": {"requests"},
    "solo": {"subbatch", "chunks", "decode"},  # a last batch or chunk may hold one row
    "subbatch": {"solo", "chunks", "decode", "rerun", "after"},  # all of them change the size of a launch
    "chunks": {"solo", "subbatch", "decode"},  # all of them start later than the prefill
    "decode": {"solo", "subbatch", "chunks"},  # the last row of a prefill, alone, is a decode
    "rerun": set(BITWISE),  # every variant is a launch after the first
    "threads": {"schedule"},  # which asks for other numbers of threads too
    "schedule": set(),
    "page-ids": {"page-size", "layout", "padding", "slack"},  # each pages the KV, and none from page 0 on
    "page-size": {"page-ids", "layout", "padding", "slack"},
    "layout": {"page-ids", "slack"},
    "padding": {"slack"},  # its launches have empty slots too
    "slack": set(),
    "host-graph": set(),
    "after": {"rerun", "solo", "subbatch", "chunks", "decode"},  # all of them change the size of a launch
}
"""Claim -> further claims whose variants use the same mechanism."""


class Judge(RelationSuite):
    """The judgement of the suite, outside a test class."""


@pytest.mark.parametrize("claim", BITWISE)
@pytest.mark.parametrize("fault", BITWISE)
def test_a_twin_is_refuted_by_its_own_claim_and_by_no_unrelated_one(fault, claim):
    call = dense_call(lengths=(20, 11), seed=1)
    judge = Judge()
    judge.relation = relation(claim)
    if claim == "host-graph" != fault:  # the other twins have no static launch
        with pytest.raises(Unsupported):
            judge._judge(relation(fault).broken(), call)
        return

    refuted = judge._judge(relation(fault).broken(), call).first is not None

    if claim == fault:
        assert refuted
    elif claim not in SPREADS[fault]:
        assert not refuted


@pytest.mark.parametrize("claim", ["solo", "subbatch", "rows", "requests"])
def test_a_decode_beside_a_long_request_is_seen_by_subbatch_alone(claim):
    """vLLM #51902: nothing but a companion of another kind shows it."""
    judge = Judge()
    judge.relation = relation(claim)
    for call in (
        dense_call(lengths=(18, 7, 9), new=(1, 1, 1), seed=2),
        sparse_call(lengths=(40, 33), new=(1, 1), seed=4),
    ):
        refuted = judge._judge(LongCompany(), call).first is not None
        assert refuted == (claim == "subbatch")


@pytest.mark.parametrize("new", [(1,), None])
def test_requests_refutes_its_twin_on_equal_prompts(new):
    """Equal prompts hold equal KV: reading the KV of another request alone would change no bit."""
    call = dense_call(lengths=(9,), new=new, seed=3)
    equal = join([call, foreign(call)])
    judge = Judge()
    judge.relation = relation("requests")

    assert judge._judge(TableByBatchIndex(), equal).first is not None
    assert judge._judge(Correct(), equal).first is None


@pytest.mark.parametrize("kind", list(Padding))
@pytest.mark.parametrize(
    "call",
    [
        dense_call(lengths=(20, 11), seed=1),
        dense_call(lengths=(9,), new=(1,), heads=1, kv_heads=1, seed=2),
        dense_call(lengths=(9, 6), heads=4, kv_heads=1, sink=True, seed=3),
        sparse_call(lengths=(40, 33), new=(1, 1), seed=4),
    ],
    ids=["two requests", "one head", "one KV head", "sparse decode"],
)
def test_padding_refutes_its_twin_in_every_variant_of_every_kind(kind, call):
    """A kernel that takes one kind of padding is judged by that kind alone."""
    judge, one = Judge(), replace(Correct().capabilities(), padding=frozenset({kind}))
    claim = on_kernel(relation("padding"), one)
    for variant in claim.variants(call, seed=0):
        (part,) = variant.launch.calls
        where = variant.launch.execution
        wanted = Correct().run(Launch((call,))).tensors[0]
        right = Correct().run(Launch((part,), where)).tensors[0]
        wrong = PaddingForgotten().run(Launch((part,), where)).tensors[0]
        assert right.out.same(wanted.out), variant.name
        assert not wrong.out.same(wanted.out), variant.name
    judge.relation = claim
    assert judge._judge(PaddingForgotten(), call).first is not None


def test_every_claim_has_its_twin_with_a_fault_in_words():
    for claim in claims():
        twin = relation(claim).broken()
        assert isinstance(twin, Twin)
        assert twin.id == f"twin-{claim}"
        assert twin.fault


_CORRECT = {"", "right = self.right(call, execution)", "return self.right(call, execution)", "return right"}


def test_a_twin_departs_from_its_correct_form_in_at_most_five_lines():
    for path in Path(tracekit.controls.__path__[0]).glob("*.py"):
        for name, twin in _twins(path.stem):
            lines = {line.strip() for line in inspect.getsource(twin.answer).splitlines()[2:]}
            body = lines - _CORRECT
            assert len(body) <= 5, f"{name} departs in {len(body)} lines"


def _twins(module):
    for name, value in vars(__import__(f"tracekit.controls.{module}", fromlist=["_"])).items():
        if isinstance(value, type) and issubclass(value, Twin) and value is not Twin:
            yield name, value


@pytest.mark.parametrize(
    ("twin", "words"),
    [
        (BaseTwo, "the LSE fits base 2 (×1/ln 2), the sink not counted"),
        (SinkDropped, "O fits no sink in the denominator"),
        (SinkTwice, "O fits the sink twice in the denominator"),
    ],
)
def test_convention_twins_lie_outside_the_envelope_and_are_diagnosed(twin, words):
    call = sparse_call(lengths=(24,), seed=6)
    bound = envelope(call, Roundings())
    (answer,) = twin().run(Launch((call,))).tensors

    assert compare_envelope(call, bound, answer.out, answer.lse).outside.first is not None
    assert diagnose(bound, answer.out, answer.lse, Conventions(call.conventions.scale_bits)) == words


def test_the_correct_kernel_takes_what_tka1_does_not():
    wide = dense_call(lengths=(5,), head_dim=640)
    narrow = dense_call(lengths=(5,))
    assert Correct().run(Launch((wide,))).executed.kernel == "oracle"
    assert Correct().run(Launch((narrow,))).executed.kernel == "tka1"
