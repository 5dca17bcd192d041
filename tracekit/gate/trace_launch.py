"""What a history needs to know of the calls of its trace: rows, where they lay, and by which scales."""

from collections.abc import Mapping
from dataclasses import dataclass

from tracekit.model import Array, AttentionCall, KVFamily, LaunchPlan, Rows
from tracekit.model.events import Pages

Scale = tuple[object, ...]
"""The factors on stored keys and values, as the kernel was given them."""

_UNSCALED = (None, "auto")


@dataclass(frozen=True)
class Held:
    """KV rows `first .. end - 1` that a call read, their write epoch, and their pages where it had any."""

    first: int
    end: int
    cache_version: int
    pages: Pages | None = None


@dataclass(frozen=True, eq=False)
class Launch:
    """What a history needs to know of a call: no tensor of it.

    Args:
        step: of the trace.
        layer: of the launch.
        rows: which rows it computed.
        held: by request and family.
        window: of the layer, in tokens.
        kernel: that ran.
        scale: of a quantised cache, whose scales are no part of its rows; else None.
    """

    step: int
    layer: int
    rows: Rows
    held: Mapping[str, Mapping[KVFamily, Held]]
    window: int | None
    kernel: str = ""
    scale: Scale | None = None

    @classmethod
    def of(cls, call: AttentionCall) -> "Launch":
        """Return what is known of a call."""
        tables = _tables(call)
        held = {
            str(key): {
                family: Held(rows.first, rows.end, rows.generation, tables.get((number, family)))
                for family, rows in call.kv[key].items()
            }
            for number, key in enumerate(call.rows.requests)
        }
        kernel, window = call.provenance.executed.kernel, call.conventions.window
        return cls(call.step, call.layer, call.rows, held, window, kernel, _scale(call.launch))

    @property
    def placed(self) -> bool:
        """Whether the pages of all its rows are known."""
        return all(held.pages is not None for families in self.held.values() for held in families.values())


def _tables(call: AttentionCall) -> dict[tuple[int, KVFamily], Pages]:
    """The pages of each request, by its number and family, where the launch was over pages."""
    plan = call.launch
    if plan is None or plan.page_size is None:
        return {}
    found = {}
    for family in call.selection.families:
        size, tables = plan.page_size, plan.block_tables
        if family.ratio > 1:  # DeepSeek-V4: the plan's own tables are those of the window
            size, tables = _compressed(plan)
        found.update({(n, family): Pages(size, tuple(table.tolist())) for n, table in enumerate(tables)})
    return found


def _compressed(plan: LaunchPlan) -> tuple[int, tuple[Array, ...]]:
    size, tables = plan.scalars.get("compressed_page"), plan.arrays.get("compressed_tables")
    if not isinstance(size, int) or tables is None:
        return 1, ()
    return size, tuple(table[table >= 0] for table in tables)


def _scale(plan: LaunchPlan | None) -> Scale | None:
    if plan is None or plan.scalars.get("kv_dtype") in _UNSCALED:
        return None
    return plan.scalars.get("k_scale"), plan.scalars.get("v_scale")
