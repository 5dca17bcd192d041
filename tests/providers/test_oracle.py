"""The oracle against a sum written out by hand."""

import numpy as np

from tracekit.model import KVFamily
from tracekit.providers.oracle import reference
from tracekit.testing import sparse_call


def test_one_row_written_out():
    call = sparse_call(lengths=(20, 9), seed=4)
    t, h = 15, 2
    kv = call.kv[call.rows.requests[0]]
    ids = [(family, int(i)) for family, part in call.selection.row(t) for i in part]
    keys = [kv[family].keys.to_float64()[i, 0] for family, i in ids]
    x = np.array([call.conventions.scale * (call.q.to_float64()[t, h] @ key) for key in keys])
    sink = call.sink.to_float64()[h]
    total = np.exp(x).sum() + np.exp(sink)

    exact = reference(call)

    assert {family for family, _ in ids} == {KVFamily.C4, KVFamily.RECENT}
    np.testing.assert_allclose(exact.out[t, h], np.exp(x) @ keys / total, rtol=1e-12)
    np.testing.assert_allclose(exact.weight[t, h], np.exp(x) @ np.abs(keys) / total, rtol=1e-12)
    np.testing.assert_allclose(exact.lse[t, h], np.log(np.exp(x).sum()), rtol=1e-12)
    np.testing.assert_allclose(exact.lse_with_sink[t, h], np.log(total), rtol=1e-12)
