"""Token pools: every row has a slot of its own, without pages, and a table says which.

SGLang: `req_to_token_pool.req_to_token[request, row]` is the slot of a row in the flat buffers
`[slots, Hkv, D]`. Its sliding-window layers have a second, smaller pool behind a map from full slots.
"""

import numpy as np
import numpy.typing as npt

from tracekit.canonical.refuse import Int64, first_true, integers, refuse


def pool_slots(
    req_to_token: npt.ArrayLike,
    request: int,
    first: int,
    end: int,
    *,
    slots: int,
    null_slot: int | None = None,
    translate: npt.ArrayLike | None = None,
) -> Int64:
    """Return the slots of rows `first .. end - 1` of one request, int64 `[end - first]`.

    Args:
        req_to_token: `[R, L]`, a row of slots a request.
        request: the row of the request in it (SGLang's `req_pool_indices`).
        first: first logical row.
        end: the row after the last.
        slots: slots of the buffer that is read.
        null_slot: a slot that belongs to no row (slot 0 of SGLang takes the writes of padding), or None.
        translate: `[n]`, full slot -> slot of a smaller pool, for the layers that have one, or None.

    Raises:
        InvalidCall: `C-POOL-ROW` no such request or no range of rows; `C-POOL-LENGTH` rows past the table;
            `C-POOL-NULL`, `C-POOL-OUTSIDE`, `C-POOL-TWICE` slots that cannot be those of these rows.
    """
    table = integers(req_to_token, "req_to_token", ndim=2)
    if not (0 <= request < table.shape[0] and 0 <= first <= end):
        refuse(
            "C-POOL-ROW",
            f"request {request}, rows [{first}, {end}) of a table {list(table.shape)}.",
            request=request,
            first=first,
            end=end,
        )
    if end > table.shape[1]:
        refuse("C-POOL-LENGTH", f"row {end - 1} lies past a table of {table.shape[1]} rows.", row=end - 1)
    found = table[request, first:end]
    if translate is not None:
        renamed = integers(translate, "translate")
        _check(found, first, renamed.size, None)
        found = renamed[found]
    _check(found, first, slots, null_slot)
    return found


def _check(found: Int64, first: int, slots: int, null_slot: int | None) -> None:
    unique = np.zeros(found.size, np.bool_)
    unique[np.unique(found, return_index=True)[1]] = True
    checks = [
        ("C-POOL-OUTSIDE", (found < 0) | (found >= slots), f"outside the pool of {slots}"),
        ("C-POOL-TWICE", ~unique, "which an earlier row has too"),
    ]
    if null_slot is not None:
        checks.insert(0, ("C-POOL-NULL", found == null_slot, "which belongs to no row"))
    for rule, bad, why in checks:
        at = first_true(bad)
        if at is not None:
            slot = int(found[at])
            refuse(rule, f"row {first + at} has slot {slot}, {why}.", row=first + at, slot=slot, slots=slots)
