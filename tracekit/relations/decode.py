"""`decode`: a row of a prefill gives the same bits as a one-token decode at its position."""

from collections.abc import Iterator
from dataclasses import replace
from typing import ClassVar

import numpy as np

from tracekit.controls.decode import LengthOffByOne
from tracekit.model import AttentionCall, Mode
from tracekit.providers.base import Launch, Provider
from tracekit.relations.base import Expectation, Variant


class Decode:
    """Prefill and decode are one kernel."""

    id: ClassVar[str] = "decode"
    promise: ClassVar[str] = "a row gives the same bits as a one-token decode over its own visible KV"
    expects: ClassVar[Expectation] = Expectation.BASELINE

    def applies(self, call: AttentionCall) -> str | None:
        """Needs a causal call that is not itself a decode of one row."""
        if not call.conventions.causal:
            return "the call is not causal: a decode would miss rows that it reads"
        if call.num_rows == 1 and not _longer(call):
            return "the call is a one-token decode itself"
        return None

    def variants(self, call: AttentionCall, seed: int) -> Iterator[Variant]:
        """Yield every row as a launch of one token, over only the KV rows that exist at its position."""
        steps = replace(call, mode=Mode.DECODE, launch=None, grads=None)
        rows = np.arange(call.num_rows)
        launches = tuple(steps.take(rows[t : t + 1]).visible_kv() for t in rows)
        yield Variant("one-token decode", Launch(launches))

    def broken(self) -> Provider:
        """Return a kernel whose decode misses the newest key."""
        return LengthOffByOne()


def _longer(call: AttentionCall) -> bool:
    """Whether some KV lies past what the only row may see."""
    position = int(call.rows.positions[0])
    families = call.kv[call.rows.requests[0]].items()
    return any(rows.end > family.visible(position) for family, rows in families)
