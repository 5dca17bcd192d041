"""Kernels that break the protocol: each is a failure with a reason, and takes no other verdict with it."""

import pytest

from tracekit.replayer import replay
from tracekit.testing import MemoryTrace, dense_call
from tracekit.verdict import Exit, Status

TRACE = MemoryTrace((dense_call(lengths=(6, 4), seed=1),))


def run(kernel: str, claims):
    return replay([TRACE], providers=[f"tests.replayer.faulty:{kernel}"], claims=claims, timeout=60)


@pytest.mark.parametrize(
    ("kernel", "words"),
    [
        ("SaysItIsMisnamed", "no such tile."),
        ("SaysItIsMissing", "the device went away."),
        ("RaisesItsOwn", "lost with code 5."),
    ],
)
def test_what_a_running_kernel_raises_is_its_failure(kernel, words):
    report = run(kernel, ["solo", "rows"])

    assert report.find("solo").status is Status.INCONCLUSIVE
    assert report.find("solo").reason == f"call 0: {words}"
    assert report.find("rows").status is Status.HELD


@pytest.mark.parametrize(
    ("kernel", "words"),
    [
        ("RefusesWithTrue", "an object of type bool as its refusal"),
        ("RefusesWithList", "an object of type list as its refusal"),
        ("NumberedId", "an object of type int as its id"),
        ("AdvertisesNothing", "an object of type NoneType as the claims that it promises"),
        ("OwnCapabilities", "an object of type dict as its capabilities"),
        ("OddVersion", "an object of type tuple as its version of a library"),
    ],
)
def test_an_answer_of_another_type_is_named(kernel, words):
    report = run(kernel, ["rows"])

    assert report.find("rows").status is Status.INCONCLUSIVE
    assert f"the kernel gave {words}" in report.find("rows").reason
    assert report.exit_code == Exit.INCONCLUSIVE


def test_a_refusal_that_is_raised_is_a_refusal():
    report = run("RefusesByRaising", ["rows"])

    assert (report.find("rows").status, report.find("rows").reason) == (Status.NOT_RUN, "not this shape")


def test_texts_of_its_own_class_arrive_as_texts():
    report = run("OwnText", ["rows"])

    assert report.find("rows").status is Status.HELD
    assert report.find("rows").executed == {"kernel": "odd", "cuda": "12.4", "device": "cpu"}


def test_the_text_of_an_error_is_cut():
    assert len(run("TalksForEver", ["solo"]).find("solo").reason) < 400
