import numpy as np
import pytest

from tracekit.canonical.kv_axis import split_kv
from tracekit.errors import ConventionAmbiguous


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_the_only_possible_axis_is_taken(axis):
    keys, values = np.zeros((7, 3, 4)), np.ones((7, 3, 4))
    got = split_kv(np.stack([keys, values], axis), 3)

    assert np.array_equal(got[0], keys)
    assert np.array_equal(got[1], values)


def test_two_local_kv_heads_are_refused():
    """RL-Kernel#388: with 2 KV heads the head axis looks like the K/V axis."""
    with pytest.raises(ConventionAmbiguous, match="axes 1 and 2 could each be the K/V axis; say which"):
        split_kv(np.zeros((7, 2, 2, 4)), 2)


@pytest.mark.parametrize("axis", [1, 2])
def test_naming_the_axis_resolves_it(axis):
    packed = np.arange(7 * 2 * 2 * 4).reshape(7, 2, 2, 4)
    keys, values = split_kv(packed, 2, kv_axis=axis)

    assert np.array_equal(keys, packed.take(0, axis))
    assert np.array_equal(values, packed.take(1, axis))


@pytest.mark.parametrize(
    ("shape", "heads", "axis"), [((7, 3, 4), 3, None), ((3, 7, 3, 4), 3, None), ((7, 2, 3, 4), 3, 0)]
)
def test_no_possible_axis(shape, heads, axis):
    with pytest.raises(ConventionAmbiguous, match="no K/V axis"):
        split_kv(np.zeros(shape), heads, axis)
