"""Launch plans: scalars as a text, arrays in the pools."""

from collections.abc import Callable
from typing import Any

import numpy as np

from tracekit.errors import InvalidCall, Unsupported
from tracekit.model import Array, LaunchPlan
from tracekit.model.launch_plan import Scalar
from tracekit.store.canonical import parse_object
from tracekit.store.limits import MAX_ARRAY_RANK
from tracekit.store.rules import corrupt

_NONE = type(None)
_LAUNCH = {
    "kernel": (str,),
    "slots": (int,),
    "head_padding": (int,),
    "page_size": (int, _NONE),
    "row_slots": (dict,),
    "block_tables": (list,),
    "cu_seqlens": (dict, _NONE),
    "scalars": (dict,),
    "arrays": (dict,),
}
_REF = {"array": (int,), "dtype": (str,), "shape": (list,)}
DTYPES = frozenset(["|b1", "|i1", "|u1", *(f"<{kind}{w}" for kind in "iuf" for w in (2, 4, 8))])


def launch_to_json(plan: LaunchPlan, store: Callable[[Array], int]) -> dict[str, Any]:
    """Return the text of a launch plan.

    Args:
        plan: the plan.
        store: puts an array into the pools and returns its number.

    Raises:
        Unsupported: S-ARRAY, S-SCALAR: something that is no number, bool, text or None.
    """

    def ref(array: Any) -> dict[str, Any]:
        values = np.asarray(array)
        values = values.astype(values.dtype.newbyteorder("<"), copy=False)
        if values.ndim > MAX_ARRAY_RANK or values.dtype.str not in DTYPES:
            raise Unsupported(
                f"A launch-plan array of {values.dtype} with {values.ndim} dimensions cannot be stored; "
                f"pass numbers in at most {MAX_ARRAY_RANK} dimensions.",
                rule="S-ARRAY",
            )
        return {"array": store(values), "dtype": values.dtype.str, "shape": list(values.shape)}

    return {
        "kernel": plan.kernel,
        "slots": int(plan.slots),
        "head_padding": int(plan.head_padding),
        "page_size": None if plan.page_size is None else int(plan.page_size),
        "row_slots": ref(plan.row_slots),
        "block_tables": [ref(table) for table in plan.block_tables],
        "cu_seqlens": None if plan.cu_seqlens is None else ref(plan.cu_seqlens),
        "scalars": {name: _scalar_to_json(name, value) for name, value in plan.scalars.items()},
        "arrays": {name: ref(array) for name, array in plan.arrays.items()},
    }


def parse_launch(value: Any, load: Callable[[int, np.dtype[Any], tuple[int, ...]], Array]) -> LaunchPlan:
    """Parse what `launch_to_json` returns.

    Args:
        value: the parsed text.
        load: returns array number `n` in a dtype and shape, or refuses.

    Raises:
        TraceCorrupt: E-15, E-16, E-28, or E-21 when the noun refuses.
    """
    fields = parse_object(value, _LAUNCH, "launch plan")

    def array(ref: Any) -> Array:
        named = parse_object(ref, _REF, "array reference")
        shape = named["shape"]
        if named["dtype"] not in DTYPES or len(shape) > MAX_ARRAY_RANK:
            raise corrupt("E-15", f"An array reference names dtype {named['dtype']!r}, shape {shape}.")
        if any(type(n) is not int or n < 0 for n in shape):
            raise corrupt("E-15", f"An array reference has the shape {shape}.")
        return load(named["array"], np.dtype(named["dtype"]), tuple(shape))

    cu_seqlens = fields["cu_seqlens"]
    try:
        return LaunchPlan(
            kernel=fields["kernel"],
            row_slots=array(fields["row_slots"]),
            slots=fields["slots"],
            head_padding=fields["head_padding"],
            page_size=fields["page_size"],
            block_tables=tuple(array(ref) for ref in fields["block_tables"]),
            cu_seqlens=None if cu_seqlens is None else array(cu_seqlens),
            scalars={name: _parse_scalar(name, item) for name, item in fields["scalars"].items()},
            arrays={name: array(ref) for name, ref in fields["arrays"].items()},
        )
    except InvalidCall as error:
        raise corrupt("E-21", f"launch plan: {error}", noun_rule=error.rule) from None


def _scalar_to_json(name: str, value: Any) -> Any:
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float):
        return {"float": float(value).hex()}
    if value is None or type(value) in (bool, int, str):
        return value
    raise Unsupported(
        f"Scalar {name} of a launch plan is a {type(value).__name__}; pass a number, bool, text or None.",
        rule="S-SCALAR",
        name=name,
    )


def _parse_scalar(name: str, value: Any) -> Scalar:
    if value is None or type(value) in (bool, int, str):
        return value  # type: ignore[no-any-return]
    text = parse_object(value, {"float": (str,)}, f"scalar {name}")["float"]
    try:
        return float.fromhex(text)
    except (ValueError, OverflowError):
        raise corrupt("E-15", f"Scalar {name} is no hexadecimal float: {text[:40]!r}.") from None
