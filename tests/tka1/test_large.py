"""Offsets past 2^31 elements, and row ids near their limit (S2, S3)."""

from dataclasses import replace

import numpy as np

from tests.tka1.cases import difference, gqa, lists
from tracekit.providers.tka1 import FamilyInput, Inputs, attention
from tracekit.providers.tka1.native import Library

FAR = 2**31 // 512 + 1000  # rows of 4 kv heads of 128, so that the last ones lie past 2^31 elements


def test_rows_past_two_to_the_31_elements(build: Library):
    """Almost all of the array is never touched, so it takes no memory."""
    near = gqa(np.random.default_rng(0), rows=3, heads=8, kv_heads=4, dims=(128, 128), length=300)
    family = near.families[0]
    keys, values = (np.zeros((FAR, 4, 128), np.uint16) for _ in range(2))
    shift = (FAR - 300) // 512 * 512  # whole aligned subtrees move, so the tree stays the same
    assert shift * 4 * 128 >= 2**31
    keys[shift : shift + 300], values[shift : shift + 300] = family.keys[0], family.values[0]
    rows = [np.arange(n) for n in (300, 7, 131)]

    want = replace(near, families=(replace(family, selection=lists(rows)),))
    far = FamilyInput((keys,), (values,), (0,), lists([r + shift for r in rows]))
    assert difference(build.run(replace(near, families=(far,)), 2), build.run(want, 2)) == ""


def test_row_ids_up_to_two_to_the_33():
    """They count from the start of the sequence; the rows given are a window of it."""
    near = gqa(np.random.default_rng(1), rows=2, length=256)
    family = near.families[0]
    first = 2**33 - 256
    moved: Inputs = replace(
        near,
        families=(
            replace(
                family,
                first=(first,),
                selection=replace(
                    family.selection, lo=family.selection.lo + first, hi=family.selection.hi + first
                ),
            ),
        ),
    )
    assert difference(attention(moved), attention(near)) == ""
