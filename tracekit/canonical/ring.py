"""Ring buffers: row of position p lies in slot `base + p mod length`, until a later position takes the slot.

A ring says nothing about who wrote a slot last, so a row counts only where the engine's own bookkeeping says
that this position, of this owner, is what the slot holds now (the ring of DeepSeek-V4's recent rows in
ROCm/ATOM; ROCm/ATOM#1417 is what happens without the check).
"""

import numpy.typing as npt

from tracekit.canonical.refuse import Int64, first_true, integers, refuse


def ring_slots(
    positions: npt.ArrayLike,
    *,
    base: int,
    length: int,
    stored: npt.ArrayLike,
    owners: npt.ArrayLike | None = None,
    owner: int | None = None,
) -> Int64:
    """Return the slot of each position of one request, int64 `[n]`.

    Args:
        positions: `[n]`, absolute token positions.
        base: first slot of the ring of the request.
        length: slots of the ring.
        stored: `[slots]`, the position that each slot of the whole buffer holds; below 0 where it holds none.
        owners: `[slots]`, the request that wrote each slot, in any numbering, or None where not known.
        owner: the number of this request in `owners`.

    Raises:
        InvalidCall: `C-RING-SHAPE` a ring outside the buffer, or `owners` without `owner`;
            `C-RING-LENGTH` more positions than the ring holds; `C-RING-STALE` a slot that holds another
            position; `C-RING-OWNER` a slot that another request wrote.
    """
    wanted, held = integers(positions, "positions"), integers(stored, "stored positions")
    writers = None if owners is None else integers(owners, "owners")
    if length < 1 or base < 0 or base + length > held.size or (writers is None) != (owner is None):
        refuse(
            "C-RING-SHAPE",
            f"a ring of {length} slots from {base} does not fit a buffer of {held.size}, or one of "
            "owners and owner is missing.",
            base=base,
            length=length,
            slots=held.size,
        )
    if writers is not None and writers.shape != held.shape:
        refuse("C-RING-SHAPE", f"{writers.size} owners for {held.size} slots.", slots=held.size)
    if wanted.size and (wanted.min() < 0 or int(wanted.max() - wanted.min()) >= length):
        refuse(
            "C-RING-LENGTH",
            f"positions {int(wanted.min())} .. {int(wanted.max())} do not fit a ring of {length} at once.",
            length=length,
        )
    slots = base + wanted % length
    stale = first_true(held[slots] != wanted)
    if stale is not None:
        refuse(
            "C-RING-STALE",
            f"slot {int(slots[stale])} holds position {int(held[slots[stale]])}, not {int(wanted[stale])}.",
            slot=int(slots[stale]),
            position=int(wanted[stale]),
            stored=int(held[slots[stale]]),
        )
    foreign = None if writers is None else first_true(writers[slots] != owner)
    if foreign is not None and writers is not None:
        refuse(
            "C-RING-OWNER",
            f"slot {int(slots[foreign])} holds position {int(wanted[foreign])} of request "
            f"{int(writers[slots[foreign]])}, not of {owner}.",
            slot=int(slots[foreign]),
            position=int(wanted[foreign]),
        )
    return slots


def ring_fill(
    stored: npt.ArrayLike, positions: npt.ArrayLike, *, base: int, length: int
) -> tuple[Int64, Int64]:
    """Return the slots that positions are written to, and the bookkeeping after it.

    Args:
        stored: `[slots]`, before.
        positions: `[n]`, ascending; only the last `length` of them survive in a ring, so more are refused.
        base: first slot of the ring.
        length: slots of the ring.

    Returns:
        Slots int64 `[n]`, and stored positions int64 `[slots]` after the writes.

    Raises:
        InvalidCall: as `ring_slots`.
    """
    wanted, held = integers(positions, "positions"), integers(stored, "stored positions").copy()
    if base >= 0 and length >= 1 and base + length <= held.size:
        held[base + wanted % length] = wanted
    return ring_slots(wanted, base=base, length=length, stored=held), held
