"""Which KV family stands in which key slots of a transformers launch.

An ordinary layer reads one family. A layer of DeepSeek-V4 reads its sliding window and, behind it in the
same tensor, the rows that its compressor made; both are keys and values at once.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tracekit.canonical.padded import PaddedBatch
from tracekit.engines.transformers_step import Forward
from tracekit.errors import Unsupported
from tracekit.model import KVFamily

_BY_RATIO = {family.ratio: family for family in (KVFamily.C4, KVFamily.C128)}


@dataclass(frozen=True, eq=False)
class Slots:
    """The key slots of one launch: first those of `batch`, then the compressed rows 0, 1, ...

    Args:
        batch: queries, and the key slots that hold one token each.
        family: what those slots are.
        compressed_family: the family of the slots behind them, None where the layer has no compressor.
        compressed: how many there are.
    """

    batch: PaddedBatch
    family: KVFamily
    compressed_family: KVFamily | None = None
    compressed: int = 0

    @property
    def keys(self) -> int:
        """T, the key slots in all."""
        return self.batch.keys + self.compressed

    @property
    def real_keys(self) -> npt.NDArray[np.bool_]:
        """Which key slots hold a row, bool `[B, T]`."""
        rows = np.ones((self.batch.real.shape[0], self.compressed), np.bool_)
        return np.concatenate([self.batch.real_keys, rows], axis=1)

    def everything(self) -> npt.NDArray[np.bool_]:
        """What a launch without a mask reads."""
        return np.ones((self.batch.real.shape[0], self.batch.queries, self.keys), np.bool_)


def compresses(module: Any) -> bool:
    """Whether an attention module is one of DeepSeek-V4, with a compressor or without."""
    return hasattr(module, "compressor")


def ratio_family(ratio: int) -> KVFamily:
    """Return the family of rows that stand for so many tokens.

    Raises:
        Unsupported: `T-RATIO`.
    """
    if ratio not in _BY_RATIO:
        raise Unsupported(
            f"a compressor makes one row of {ratio} tokens; traces know rows of "
            f"{' and '.join(map(str, _BY_RATIO))} tokens (c4, c128). Set compress_rates to these.",
            rule="T-RATIO",
            ratio=ratio,
        )
    return _BY_RATIO[ratio]


def key_slots(module: Any, keys: int, window: int | None, forward: Forward) -> Slots:
    """Return what the key slots of a launch hold.

    Args:
        module: the attention module.
        keys: T.
        window: the sliding window of the layer.
        forward: the forward that the launch belongs to.

    Raises:
        Unsupported: `T-PADDED`, `T-CACHE`, `T-RATIO`.
    """
    if not compresses(module):
        return Slots(forward.batch(keys), KVFamily.DENSE)
    if module.compressor is None:
        return Slots(forward.batch(keys), KVFamily.RECENT)
    refuse_padding(forward)
    family = ratio_family(int(module.compressor.compress_rate))
    compressed = (forward.past + forward.queries) // family.ratio
    held = forward.queries + min(forward.past, (window or forward.past + 1) - 1)
    if keys != held + compressed:
        raise Unsupported(
            f"the launch has {keys} key slots where a window of {window} and {compressed} rows of {family} "
            f"take {held + compressed}; its cache was cropped or filled elsewhere.",
            rule="T-CACHE",
            keys=keys,
        )
    return Slots(forward.batch(held), KVFamily.RECENT, family, compressed)


def refuse_padding(forward: Forward) -> None:
    """Refuse a padded batch where rows are compressed.

    The compressor cuts its windows by slot, so a padded sequence has other rows than it has alone.

    Raises:
        Unsupported: `T-PADDED`.
    """
    if not forward.real.all():
        raise Unsupported(
            "the batch is padded, and compressed rows then mix padding into their tokens; give prompts of "
            "one length, or one at a time.",
            rule="T-PADDED",
        )
