"""`ties`: among equal scores the choice is a function of scores and ids, and of nothing else.

After SGLang #31115, FlashInfer #2584, vLLM #56749 and hw-native-sys/pypto-lib #592: ReLU makes plateaus of
exact zeros, and then the layout of the launch decided which rows a layer read.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import ClassVar

import numpy as np

from tracekit.controls.indexers import UnstableTies
from tracekit.model import Bits, IndexerCall
from tracekit.providers.indexers import IndexerLaunch, IndexerProvider
from tracekit.relations.base import Expectation
from tracekit.relations.indexers import IndexerVariant, cut

_GROUP = 4
_MORE = 5


class Ties:
    """Equal scores are settled the same way wherever the row stands and however many keys lie behind."""

    id: ClassVar[str] = "ties"
    promise: ClassVar[str] = "among equal scores a row chooses the same keys in the same order in any launch"
    expects: ClassVar[Expectation] = Expectation.BASELINE

    def subjects(self, call: IndexerCall) -> Iterator[IndexerCall]:
        """Yield the call with equal scores planted: all of them zero, then four and four keys equal."""
        zero = Bits(np.zeros_like(call.query.data), call.query.dtype)
        yield replace(call, query=zero, scores=None)
        keys = {}
        for key, bits in call.keys.items():
            row = np.arange(bits.shape[0])
            keys[key] = bits.take(row - row % _GROUP)
        yield replace(call, keys=keys, scores=None)

    def applies(self, call: IndexerCall) -> str | None:
        """Needs a row that has to leave keys out: else every tie ends in the same set."""
        return None if (call.visible > call.k).any() else "no row has more keys than it may choose"

    def variants(self, call: IndexerCall, seed: int) -> Iterator[IndexerVariant]:
        """Yield the rows reversed, each row alone at its own offset, in chunks, and with keys behind."""
        yield IndexerVariant("reversed", IndexerLaunch((call.take(np.arange(call.num_rows)[::-1]),)))
        yield IndexerVariant("each row alone", cut(call, 1))
        yield IndexerVariant("chunks of 16", cut(call, 16))
        keys = {}
        for key, bits in call.keys.items():
            more = np.arange(bits.shape[0] + _MORE) % max(bits.shape[0], 1)
            keys[key] = bits.take(more)
        yield IndexerVariant("keys of the future behind", IndexerLaunch((replace(call, keys=keys),)))

    def broken(self) -> IndexerProvider:
        """Return an indexer whose rule for ties changes after its first launch."""
        return UnstableTies()
