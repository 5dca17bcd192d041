"""The conformance suite of a provider: subclass it in a test file and say how to make the provider."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from tracekit.compare import Roundings, compare_envelope, envelope
from tracekit.errors import Unsupported
from tracekit.model import AttentionCall, DType, Ranges, Selection
from tracekit.providers.base import Execution, Launch, Provider, Tensors, roundings
from tracekit.providers.placement import Fill, Placement
from tracekit.testing.build import dense_call, sparse_call


class ProviderSuite:
    """What every provider must do, whatever it promises.

    ```python
    class TestMine(ProviderSuite):
        def provider(self) -> Provider:
            return MyKernel()
    ```
    """

    def provider(self) -> Provider:
        """Make the provider under test; called once a test."""
        raise NotImplementedError("a provider suite says how to make its provider")

    def calls(self) -> Sequence[AttentionCall]:
        """Return the calls to try; the provider must take at least one and may refuse the others."""
        dense = [
            dense_call(dtype=dtype, lengths=(7, 4), seed=1)
            for dtype in (DType.BFLOAT16, DType.FLOAT16, DType.FLOAT32)
        ]
        return [
            *dense,
            dense_call(lengths=(9, 5, 20), new=(1, 1, 1), seed=2),
            dense_call(lengths=(12,), window=4, seed=3),
            dense_call(lengths=(6,), heads=2, kv_heads=2, sink=True, seed=4),
            sparse_call(lengths=(30, 17), seed=5),
        ]

    def taken(self, provider: Provider) -> list[AttentionCall]:
        """Return the calls that the provider takes."""
        return [call for call in self.calls() if provider.refuses(call) is None]

    def test_it_takes_a_call(self) -> None:
        provider = self.provider()
        assert isinstance(provider, Provider)
        assert provider.id
        assert self.taken(provider), f"{provider.id} refuses every call of the suite"

    def test_it_refuses_in_words_and_runs_nothing(self) -> None:
        provider = self.provider()
        for call in self.calls():
            reason = provider.refuses(call)
            if reason is None:
                continue
            assert reason.strip(), f"{provider.id} refuses without a reason"
            try:
                provider.run(Launch((call,)))
            except Unsupported:
                continue
            raise AssertionError(f"{provider.id} refuses a call ({reason}) and runs it all the same")

    def test_capabilities_agree_with_refusals(self) -> None:
        provider = self.provider()
        capabilities = provider.capabilities()
        for call in self.taken(provider):
            assert call.dtype in capabilities.dtypes
            assert set(call.selection.families) <= capabilities.families
            assert call.sink is None or capabilities.sink

    def test_answers_have_the_shape_of_their_call(self) -> None:
        provider = self.provider()
        for call in self.taken(provider):
            tensors = self._answer(provider, call)
            shape = (call.num_rows, call.num_heads, call.value_dim)
            assert tensors.out.shape == shape
            assert tensors.out.dtype is call.dtype
            if provider.capabilities().lse:
                assert tensors.lse is not None
                assert tensors.lse.shape == shape[:2]
                assert tensors.lse.dtype is DType.FLOAT32

    def test_answers_come_in_the_order_of_the_calls(self) -> None:
        provider = self.provider()
        call = self.taken(provider)[0]
        last = call.take(np.arange(call.num_rows - 1, call.num_rows))
        first, second = provider.run(Launch((call, last))).tensors
        assert first.out.shape[0] == call.num_rows
        assert second.out.shape[0] == 1
        again, whole = provider.run(Launch((last, call))).tensors
        assert again.out.same(second.out)
        assert whole.out.same(first.out)

    def test_the_same_call_gives_the_same_bits(self) -> None:
        provider = self.provider()
        for call in self.taken(provider):
            one, two = self._answer(provider, call), self._answer(provider, call)
            assert one.out.same(two.out)
            assert one.lse is None or (two.lse is not None and one.lse.same(two.lse))

    def test_it_leaves_its_inputs_alone(self) -> None:
        provider = self.provider()
        for call in self.taken(provider):
            before = _digest(call)
            self._answer(provider, call)
            assert _digest(call) == before, f"{provider.id} writes to its inputs"

    def test_the_identity_is_stable_and_comes_with_the_answer(self) -> None:
        provider = self.provider()
        call = self.taken(provider)[0]
        assert provider.identity() == provider.identity()
        executed = provider.run(Launch((call,))).executed
        assert executed.kernel
        assert executed == provider.run(Launch((call,))).executed

    def test_a_row_without_keys_gives_zero(self) -> None:
        provider = self.provider()
        for call in self.taken(provider):
            parts = call.selection.families
            if not all(isinstance(part, Ranges) for part in parts.values()):
                continue
            empty = {
                family: Ranges(part.lo, np.concatenate([part.lo[:1], part.hi[1:]]))
                for family, part in parts.items()
                if isinstance(part, Ranges)
            }
            blind = replace(call, selection=Selection(empty))
            if provider.refuses(blind):
                continue
            tensors = self._answer(provider, blind)
            assert not tensors.out.to_float32()[0].any()
            assert tensors.lse is None or np.isneginf(tensors.lse.to_float32()[0]).all()

    def test_answers_lie_in_the_envelope(self) -> None:
        provider = self.provider()
        for call in self.taken(provider):
            where = Roundings(*roundings(provider, call))
            tensors = self._answer(provider, call)
            bounded = compare_envelope(call, envelope(call, where), tensors.out, tensors.lse)
            assert bounded.inside.compared.elements
            assert bounded.outside.first is None, f"{provider.id}: {bounded.outside.first}"

    def test_answers_in_every_place_that_it_takes_lie_in_the_envelope(self) -> None:
        provider = self.provider()
        where, call = self._places(provider), self.taken(provider)[0]
        bound = envelope(call, Roundings(*roundings(provider, call)))
        for placement in where:
            launch = Launch((call,), Execution(placement=placement))
            (tensors,) = provider.run(launch).tensors
            assert tensors.out.shape == (call.num_rows, call.num_heads, call.value_dim)
            outside = compare_envelope(call, bound, tensors.out, tensors.lse).outside
            assert outside.first is None, f"{provider.id}, {placement}: {outside.first}"

    def _places(self, provider: Provider) -> list[Placement]:
        """One placement for each page size, layout and kind of padding that the provider says it takes."""
        takes = provider.capabilities()
        assert list(takes.page_sizes) == sorted(set(takes.page_sizes))
        assert bool(takes.page_sizes) == bool(takes.layouts)
        sizes = [Placement(page_size=size, shuffle=size, gaps=1) for size in takes.page_sizes]
        layouts = [Placement(layout=layout) for layout in takes.layouts]
        padding = [Placement(padding={kind: 3}) for kind in sorted(takes.padding)]
        promised = takes.fills and "slack" in provider.advertised()
        fills = [Placement(gaps=1, fill=fill) for fill in Fill] if promised else []
        return sizes + layouts + padding + fills

    def _answer(self, provider: Provider, call: AttentionCall) -> Tensors:
        (tensors,) = provider.run(Launch((call,))).tensors
        return tensors


def _digest(call: AttentionCall) -> bytes:
    kv = [rows for families in call.kv.values() for rows in families.values()]
    parts = [call.q, *(rows.keys for rows in kv), *(rows.value_bits for rows in kv)]
    return b"".join(part.data.tobytes() for part in parts)
