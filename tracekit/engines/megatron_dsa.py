"""Sparse attention of Megatron-core, `DSAttention`, on its fallback in plain torch.

The module projects, chooses keys and attends in one forward, so its arguments do not show what was read. The
recorder stands before three functions of its file: the two fallbacks of the attention, and the one that
scores keys and chooses. The absorbed form attends over latents `[.., 1, 576]` whose first part is the value;
its O is the latent one, before the projection to values.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tracekit.engines.megatron_call import kv_rows, rows
from tracekit.engines.megatron_points import Core
from tracekit.engines.megatron_step import Forward
from tracekit.engines.patch import Entry
from tracekit.errors import Unsupported
from tracekit.model import (
    Array,
    Bits,
    Conventions,
    DType,
    KVFamily,
    KVSource,
    Lists,
    Origin,
    Output,
    Provenance,
    Selection,
    scale_to_bits,
)
from tracekit.providers.megatron_identity import engine_name, executed
from tracekit.recorder.observation import IndexerObservation, Observation, SeenKV

ABSORBED, EXPANDED, CHOICE = "_unfused_absorbed_dsa_fn", "unfused_dsa_fn", "fused_qk_topk_naive"
_KERNELS = {ABSORBED: "megatron.dsa_absorbed", EXPANDED: "megatron.dsa"}


@dataclass(frozen=True, eq=False)
class Ran:
    """One run of a function of the file: its name, its arguments, and what it gave."""

    name: str
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any

    @cached_property
    def given(self) -> dict[str, Any]:
        """The arguments by name. Read after the function has run: one that changed breaks the hook alone."""
        bound = inspect.signature(self.function).bind(*self.args, **self.kwargs)
        bound.apply_defaults()
        return dict(bound.arguments)


@dataclass(eq=False)
class SparseWatch:
    """Looks on while one `DSAttention` runs; `attention` and `choice` are None where they did not run."""

    attention: Ran | None = None
    choice: Ran | None = None

    def clear(self) -> None:
        """Forget the launch before."""
        self.attention = self.choice = None

    def entries(self) -> list[Entry]:
        """The functions of Megatron's file that are wrapped.

        Raises:
            Unsupported: `M-HOOK` when one is gone.
        """
        from megatron.core.transformer.experimental_attention_variant import dsa

        missing = [name for name in (ABSORBED, EXPANDED, CHOICE) if not hasattr(dsa, name)]
        if missing:
            raise Unsupported(
                f"Megatron's dsa.py has no {', '.join(missing)} any more: this version is too new for the "
                "recorder (docs/engines.md).",
                rule="M-HOOK",
                hook=missing,
            )
        names = (ABSORBED, EXPANDED, CHOICE)
        return [Entry(f"dsa.{name}", vars(dsa), name, self._wrapper(name)) for name in names]

    def _wrapper(self, name: str) -> Callable[[Any], Any]:
        def make(original: Any) -> Any:
            def watched(*args: Any, **kwargs: Any) -> Any:
                result = original(*args, **kwargs)
                ran = Ran(name, original, args, kwargs, result)
                if name == CHOICE:
                    self.choice = ran
                else:
                    self.attention = ran
                return result

            return watched

        return make


def observe_sparse(core: Core, ran: Ran | None, forward: Forward) -> Observation:
    """Return the logical side of one sparse launch.

    Raises:
        Unsupported: `M-DSA` when the fallback did not run; `M-ROWS`, `M-MASK-ACROSS`.
    """
    if ran is None:
        raise Unsupported(
            f"{core.name} did not run its fallback in plain torch (a fused kernel ran in its place), so what "
            "it read was not seen.",
            rule="M-DSA",
        )
    given, absorbed = ran.given, ran.name == ABSORBED
    query, key = given["query"], given["key"]
    if forward.packed or tuple(query.shape[:2]) != (forward.length, forward.batch):
        raise Unsupported(
            f"{core.name} attended over queries of {list(query.shape)} in a forward of {forward.batch} x "
            f"{forward.length} tokens; packed and sharded sequences are not recorded.",
            rule="M-ROWS",
        )
    value = key[..., : given["v_channels"]] if absorbed else given["value"]
    q = rows(query, forward, "query")
    kernel = _KERNELS[ran.name]
    return Observation(
        layer=core.layer,
        requests=forward.handles,
        request=forward.request,
        positions=forward.positions,
        q=q,
        kv={
            handle: {
                KVFamily.DENSE: SeenKV(
                    kv_rows(key, forward, index, "keys"),
                    kv_rows(value, forward, index, "values"),
                    0,
                    forward.recomputed,
                )
            }
            for index, handle in enumerate(forward.handles)
        },
        sink=None,
        selection=Selection({KVFamily.DENSE: _selection(ran, forward)}),
        out=Output(rows(ran.result, forward, "output", q.shape[1]), Origin.EXECUTED),
        lse=None,
        conventions=Conventions(
            scale_to_bits(float(given["softmax_scale"])),
            output_boundary="latent, before the value projection" if absorbed else "attention core",
            # Both forms score in FP32; the absorbed one casts P to the dtype of the values.
            probability_dtype=q.dtype if absorbed else DType.FLOAT32,
            kv_source=KVSource.CONSUMED,
        ),
        provenance=Provenance(
            engine_name(),
            type(core.module).__name__,
            executed(kernel, query.device.type),
            torch.get_num_threads(),
            {"module": core.name},
        ),
    )


def observe_choice(core: Core, ran: Ran, forward: Forward) -> IndexerObservation:
    """Return the logical side of the launch of an indexer.

    Raises:
        Unsupported: `M-DSA` for scores without ReLU, which a trace has no word for.
    """
    given, (scores, chosen) = ran.given, ran.result
    if not given["use_relu"]:
        raise Unsupported(f"the indexer of {core.name} scores without ReLU.", rule="M-DSA")
    keys = given["k"].unsqueeze(2)
    slots = chosen.flatten(0, 1).detach().cpu().numpy()[forward.row_slots]
    values = scores.detach().gather(-1, chosen.clamp(min=0)).float().flatten(0, 1).cpu().numpy()
    taken = slots >= 0
    ids = _places(slots, taken, forward)
    offsets = np.concatenate([[0], np.cumsum(taken.sum(1))]).astype(np.int64)
    kernel = "megatron.dsa_indexer"
    return IndexerObservation(
        layer=core.layer,
        requests=forward.handles,
        request=forward.request,
        positions=forward.positions,
        query=rows(given["q"], forward, "index query"),
        weights=rows(given["weights"].float(), forward, "index weights"),
        keys={
            handle: SeenKV(kv_rows(keys, forward, index, "index keys"), None, 0, forward.recomputed)
            for index, handle in enumerate(forward.handles)
        },
        top_k=Lists(ids[taken], offsets),
        scores=Bits.from_float32(values[forward.row_slots][taken], DType.FLOAT32),
        k=int(given["index_topk"]),
        family=KVFamily.DENSE,
        scale_bits=scale_to_bits(1.0),
        provenance=Provenance(
            engine_name(),
            kernel,
            executed(kernel, given["q"].device.type),
            torch.get_num_threads(),
            {"module": core.name},
        ),
    )


def _selection(ran: Ran, forward: Forward) -> Lists:
    """What each row read: its chosen keys that the mask leaves.

    The absorbed form multiplies with every key and hides the others, so it reads in the order of the rows;
    the expanded form gathers keys in the order in which they were chosen.
    """
    chosen = ran.given["topk_indices"].detach()
    visible = _visible(ran, chosen)[forward.row_slots]
    if ran.name == ABSORBED:
        slots: Array = np.broadcast_to(np.arange(visible.shape[1]), visible.shape)
        taken = visible
    else:
        slots = chosen.flatten(0, 1).cpu().numpy()[forward.row_slots]
        taken = (slots >= 0) & np.take_along_axis(visible, np.maximum(slots, 0), 1)
    ids = _places(slots, taken, forward)
    return Lists(ids[taken], np.concatenate([[0], np.cumsum(taken.sum(1))]).astype(np.int64))


def _visible(ran: Ran, chosen: torch.Tensor) -> npt.NDArray[np.bool_]:
    """Which keys are chosen and left by the mask, bool `[B * S, T]`; by Megatron's own functions."""
    from megatron.core.transformer.experimental_attention_variant import dsa_masking

    query, key = ran.given["query"], ran.given["key"]
    bounds = {name: ran.given[name] for name in ("mask", "varlen_starts", "varlen_ends", "key_positions")}
    size = {"sq": query.shape[0], "sk": key.shape[0], "b": query.shape[1]}
    row_mask, starts, ends, positions = dsa_masking.prepare_sparse_mask_context(
        **bounds, **size, device=query.device
    )
    scores = torch.full((size["b"], size["sq"], size["sk"]), -torch.inf, device=query.device)
    dsa_masking.scatter_topk_into_index_mask(scores, chosen, seq_chunk_size=256)
    scores = dsa_masking.apply_sparse_validity_to_index_mask(
        scores, row_mask=row_mask, varlen_starts=starts, varlen_ends=ends, key_positions=positions
    )
    visible: npt.NDArray[np.bool_] = torch.isfinite(scores).flatten(0, 1).cpu().numpy()
    return visible


def _places(slots: Array, taken: npt.NDArray[np.bool_], forward: Forward) -> npt.NDArray[np.int64]:
    """The logical rows in key slots `[T, n]`; says nothing where `taken` is False.

    Raises:
        Unsupported: `M-MASK-ACROSS`.
    """
    b, s = np.divmod(forward.row_slots, forward.length)
    held = np.maximum(slots, 0)
    across = taken & (forward.segment[b[:, None], held] != forward.segment[b, s][:, None])
    if across.any():
        t = int(np.argmax(across.any(1)))
        raise Unsupported(
            f"batch place {int(b[t])}, slot {int(s[t])}: sparse attention chose a key of padding or of "
            "another document; give sequences of one length, or one a batch place.",
            rule="M-MASK-ACROSS",
        )
    return forward.place[b[:, None], held]
