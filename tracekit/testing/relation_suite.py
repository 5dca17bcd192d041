"""The conformance suite of a relation: subclass it in a test file and name the relation."""

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

import numpy as np

from tracekit.compare import Comparison, Roundings, compare_envelope, envelope
from tracekit.controls.base import Correct
from tracekit.model import AttentionCall, Origin, Output
from tracekit.providers.base import Provider
from tracekit.providers.perform import perform
from tracekit.relations.base import Expectation, Relation, Variant, base_of, on_kernel, subject_of
from tracekit.replayer.answers import compare_answer
from tracekit.replayer.gradients import compare_gradients
from tracekit.replayer.messages import Answered, gather
from tracekit.testing.build import dense_call, sparse_call


class RelationSuite:
    """What every relation must do.

    ```python
    class TestMine(RelationSuite):
        relation = MyRelation()
    ```
    """

    relation: ClassVar[Relation]

    @property
    def bound(self) -> Relation:
        """The relation, asking for what the correct kernel takes."""
        return on_kernel(self.relation, self.correct().capabilities())

    def calls(self) -> Sequence[AttentionCall]:
        """Return the calls to try; the relation must apply to at least one."""
        return [
            dense_call(lengths=(20, 11), seed=1),
            dense_call(lengths=(18, 7, 9), new=(1, 1, 1), sink=True, seed=2),
            sparse_call(lengths=(40, 25), seed=3),
            sparse_call(lengths=(40, 33), new=(1, 1), seed=4),
        ]

    def correct(self) -> Provider:
        """Return a kernel that keeps the promise."""
        return Correct()

    def applicable(self) -> list[AttentionCall]:
        """Return the calls that the relation applies to, as it judges them."""
        return [subject_of(self.bound, call) for call in self.calls() if self.bound.applies(call) is None]

    def test_it_says_what_it_is(self) -> None:
        assert self.bound.id
        assert self.bound.promise
        assert self.applicable(), f"{self.bound.id} applies to no call of the suite"

    def test_variants_hold_every_row(self) -> None:
        for call in self.applicable():
            seen = {
                row
                for variant in self._variants(call)
                for part in variant.launch.calls
                for row in part.rows.ids
            }
            assert set(call.rows.ids) <= seen

    def test_variants_move_rows_and_change_no_number(self) -> None:
        for call in self.applicable():
            numbers = {row: t for t, row in enumerate(call.rows.ids)}
            for variant in self._variants(call):
                for part in variant.launch.calls:
                    for t, row in enumerate(part.rows.ids):
                        if row in numbers:
                            _same_row(call, numbers[row], part, t)

    def test_the_same_seed_gives_the_same_variants(self) -> None:
        for call in self.applicable():
            one, two = self._variants(call), self._variants(call)
            assert [_shape(variant) for variant in one] == [_shape(variant) for variant in two]

    def test_a_correct_kernel_keeps_the_promise(self) -> None:
        for call in self.applicable():
            found = self._judge(self.correct(), call)
            assert found.compared.elements
            assert found.first is None, found.first

    def test_the_twin_is_right_on_the_baseline(self) -> None:
        for call in self.applicable():
            if self.bound.expects is not Expectation.BASELINE:
                # Such a twin is wrong on the call as it stands: that is its fault.
                assert self._judge(self.bound.broken(), call).first is not None
                continue
            right, wrong = self._run(self.correct(), call), self._run(self.bound.broken(), call)
            # Of O and the LSE; the gradients of a twin may be wrong anywhere, as long as they vary.
            assert right.out.same(wrong.out)
            assert right.lse is not None
            assert wrong.lse is not None
            assert right.lse.same(wrong.lse)

    def test_the_twin_is_refuted(self) -> None:
        for call in self.applicable():
            assert self._judge(self.bound.broken(), call).first is not None

    def _variants(self, call: AttentionCall) -> list[Variant]:
        return list(self.bound.variants(call, seed=7))

    def _run(self, provider: Provider, call: AttentionCall) -> Answered:
        launch = base_of(self.bound, call)
        return gather(launch, provider.run(launch))

    def _judge(self, provider: Provider, call: AttentionCall) -> Comparison:
        """Run the baseline and all variants on one kernel, and compare as a replay does."""
        if self.bound.expects is Expectation.ENVELOPE:
            answer = self._run(provider, call)
            return compare_envelope(call, envelope(call, Roundings()), answer.out, answer.lse).outside
        kernel = self.correct() if self.bound.expects is Expectation.TRACE else provider
        baseline = self._run(kernel, call)
        if self.bound.expects is Expectation.TRACE:
            # What such a twin spoils is the answer that was judged.
            call = _answered(call, baseline)
        found = Comparison()
        for variant in self._variants(call):
            answer = gather(variant.launch, perform(provider, variant.launch))
            answer = replace(answer, free=variant.free)
            found += compare_answer(call, {"out": baseline.out, "lse": baseline.lse}, answer)[0]
            gradients, absent = compare_gradients(call, baseline, answer)
            assert absent is None, absent
            found += gradients
        return found


def _answered(call: AttentionCall, answer: Answered) -> AttentionCall:
    lse = None if answer.lse is None else Output(answer.lse, Origin.EXECUTED)
    return replace(call, out=Output(answer.out, Origin.EXECUTED), lse=lse)


def _same_row(left: AttentionCall, t: int, right: AttentionCall, u: int) -> None:
    """Refuse a variant whose row has other numbers: such a variant would prove nothing."""
    assert np.array_equal(left.q.data[t], right.q.data[u])
    request = left.rows.ids[t].request
    for (family, ids), (other, others) in zip(left.selection.row(t), right.selection.row(u), strict=True):
        assert family is other
        assert np.array_equal(ids, others)
        one, two = left.kv[request][family], right.kv[request][family]
        assert np.array_equal(one.keys.data[ids - one.first], two.keys.data[ids - two.first])
        assert np.array_equal(one.value_bits.data[ids - one.first], two.value_bits.data[ids - two.first])


def _shape(variant: Variant) -> object:
    return variant.name, variant.launch.execution, [part.rows.ids for part in variant.launch.calls]
