"""Recording an attention function of one's own, through a file and back."""

import numpy as np
import pytest

from tracekit.errors import ConventionAmbiguous, InvalidCall, Unsupported, UsageError
from tracekit.model import KVSource, Mode, Origin
from tracekit.recorder.api import CaptureIncomplete, record
from tracekit.store import open_trace


def arrays(rows, held, heads=4, kv_heads=2, seed=0):
    rng = np.random.default_rng(seed)
    return (
        rng.standard_normal((rows, heads, 8), np.float32),
        rng.standard_normal((held, kv_heads, 8), np.float32),
        rng.standard_normal((held, kv_heads, 8), np.float32),
    )


def test_prefill_and_decode_of_two_requests(tmp_path):
    qa, ka, va = arrays(3, 4, seed=1)
    qb, kb, vb = arrays(2, 2, seed=2)
    qd, _, _ = arrays(1, 1, seed=3)
    with record(tmp_path / "x.h5") as session:
        with session.step({"a": [5, 6, 7], "b": [8, 9]}, calls=1):
            session.attention(
                layer=0,
                q=np.concatenate([qa, qb]),
                keys={"a": ka[:3], "b": kb},
                values={"a": va[:3], "b": vb},
                scale=0.5,
            )
        with session.step({"a": [10]}, calls=1):
            session.attention(layer=0, q=qd, keys=ka, values=va, scale=0.5)

    with open_trace(tmp_path / "x.h5") as trace:
        prefill, decode = trace
        requests = trace.recording.requests
    assert [(r.alias, r.token_ids.tolist(), r.prompt_length) for r in requests] == [
        ("a", [5, 6, 7, 10], 3),
        ("b", [8, 9], 2),
    ]
    assert (prefill.mode, decode.mode) == (Mode.PREFILL, Mode.DECODE)
    assert decode.rows.positions.tolist() == [3]
    assert np.array_equal(prefill.q.to_float32(), np.concatenate([qa, qb]))
    assert prefill.lse.origin is Origin.DERIVED
    scores = np.einsum("hd,nhd->hn", qd[0].astype(float), np.repeat(ka, 2, axis=1).astype(float)) * 0.5
    assert np.array_equal(decode.lse.bits.to_float32()[0], np.log(np.exp(scores).sum(1)).astype(np.float32))


def test_packed_kv_of_two_heads_is_refused_until_the_axis_is_named():
    q, k, v = arrays(3, 3)
    calls = []
    with (
        record("unused.h5", write=lambda p, r, c: calls.extend(c)) as session,
        session.step({"a": [1, 2, 3]}),
    ):
        packed = np.stack([k, v], 1)
        with pytest.raises(ConventionAmbiguous, match="kv_axis="):
            session.attention(layer=0, q=q, kv=packed, num_kv_heads=2, scale=1.0)
        session.attention(layer=0, q=q, kv=packed, num_kv_heads=2, kv_axis=1, scale=1.0)

    rows = next(iter(next(iter(calls[0].kv.values())).values()))
    assert np.array_equal(rows.keys.to_float32(), k)
    assert np.array_equal(rows.values.to_float32(), v)


@pytest.mark.parametrize(
    ("wrong", "shape"),
    [
        ({"q": (2, 4, 8)}, r"q is \[T, H, D\] with T = 3 rows, .* not \[2, 4, 8\]"),
        ({"q": (3, 32)}, r"q is .* not \[3, 32\]"),
        ({"keys": (3, 16)}, r"keys of request 'a' are \[N, Hkv, D\] with N = 3 rows .* not \[3, 16\]"),
        ({"values": (2, 2, 8)}, r"values of request 'a' are .* not \[2, 2, 8\]"),
    ],
)
def test_a_wrong_shape_is_named_where_it_is_passed(wrong, shape):
    q, k, v = arrays(3, 3)
    tensors = {"q": q, "keys": k, "values": v} | {n: np.zeros(s, np.float32) for n, s in wrong.items()}
    with (
        pytest.raises(InvalidCall, match=shape) as refused,
        record("unused.h5", write=lambda *_: None) as session,
        session.step({"a": [1, 2, 3]}),
    ):
        session.attention(layer=0, **tensors, scale=1.0)
    assert refused.value.rule == "R-SHAPE"


@pytest.mark.parametrize(
    ("given", "source"), [({}, KVSource.WRITTEN), ({"kv_source": "consumed"}, KVSource.CONSUMED)]
)
def test_kv_is_what_was_written_unless_it_was_read_back(given, source):
    q, k, v = arrays(3, 3)
    calls = []
    with (
        record("unused.h5", write=lambda p, r, c: calls.extend(c)) as session,
        session.step({"a": [1, 2, 3]}),
    ):
        with pytest.raises(UsageError, match="kv_source is consumed or written, not 'read'"):
            session.attention(layer=0, q=q, keys=k, values=v, scale=1.0, kv_source="read")
        session.attention(layer=0, q=q, keys=k, values=v, scale=1.0, **given)
    assert [call.conventions.kv_source for call in calls] == [source]


def of_two_layers(good, bad, failure=None):
    """A step whose calls of layers `good` are sound, and of layers `bad` have an O of another width."""
    q, k, v = arrays(3, 3)
    kept = []
    with (
        record("unused.h5", write=lambda _, recording, calls: kept.extend([recording, calls])) as session,
        session.step({"a": [1, 2, 3]}),
    ):
        for layer in (*good, *bad):
            out = None if layer in good else np.zeros((3, 4, 9), np.float32)
            session.attention(layer=layer, q=q, keys=k, values=v, out=out, scale=1.0)
        if failure is not None:
            raise failure
    return kept


def test_a_call_that_breaks_a_rule_is_in_the_ledger():
    with pytest.warns(CaptureIncomplete, match="out is"):
        recording, calls = of_two_layers(good=[0], bad=[1])
    assert [call.layer for call in calls] == [0]
    assert "out is float32 [3, 4, 8], not" in recording.ledger[0].cut
    assert recording.ledger[0].recorded == 1


def test_when_no_call_could_be_kept_the_first_problem_is_the_error():
    with pytest.raises(
        Unsupported, match=r"none of 2 calls .* first problem: step 0, layer 0: out is"
    ) as error:
        of_two_layers(good=[], bad=[0, 1])
    assert error.value.rule == "R-NOTHING"


def test_an_error_of_the_user_is_not_hidden_by_a_trace_that_could_not_be_written():
    with pytest.raises(RuntimeError, match="mine") as error:
        of_two_layers(good=[], bad=[0], failure=RuntimeError("mine"))
    assert "out is" in error.value.__notes__[0]


def test_kv_must_be_given():
    q, k, _ = arrays(3, 3)
    with (
        pytest.raises(UsageError, match="has no KV"),
        record("unused.h5", write=lambda *_: None) as session,
        session.step({"a": [1, 2, 3]}),
    ):
        session.attention(layer=0, q=q, keys=k, scale=1.0)


def test_double_precision_is_refused():
    q, k, v = arrays(3, 3)
    with (
        pytest.raises(InvalidCall, match="q is float64; pass bfloat16, float16 or float32"),
        record("unused.h5", write=lambda *_: None) as session,
        session.step({"a": [1, 2, 3]}),
    ):
        session.attention(layer=0, q=q.astype(np.float64), keys=k, values=v, scale=1.0)


def overwritten(write, **second):
    """Four steps of a request; before the second one its row 1 is written over, and stays so."""
    _, k, v = arrays(5, 5)
    changed = k.copy()
    changed[1] += 1
    with record("unused.h5", write=write) as session:
        with session.step({"a": [1, 2]}):
            session.attention(layer=0, q=arrays(2, 1)[0], keys=k[:2], values=v[:2], scale=1.0)
        for n in (3, 4, 5):
            with session.step({"a": [n]}):
                session.attention(
                    layer=0, q=arrays(1, 1)[0], keys=changed[:n], values=v[:n], scale=1.0, **second
                )


def test_kv_that_changed_under_a_request_cuts_the_step_and_those_after():
    kept = []
    with pytest.warns(CaptureIncomplete, match="KV row 1 of request a changed since it was last read"):
        overwritten(lambda _, recording, calls: kept.extend([recording, calls]))

    recording, calls = kept
    assert [call.step for call in calls] == [0]
    assert [(line.fired, line.recorded, line.complete) for line in recording.ledger] == [
        (1, 1, True),
        (1, 0, False),
        (1, 0, False),
        (1, 0, False),
    ]
    assert "not followed any more, as its KV changed at step 1" in recording.ledger[3].cut
    assert recording.requests[0].token_ids.tolist() == [1, 2]


def test_kv_that_changed_in_a_new_generation_is_recorded():
    kept = []
    overwritten(lambda _, recording, calls: kept.extend([recording, calls]), generation=1)

    recording, calls = kept
    assert all(line.complete for line in recording.ledger)
    assert [next(iter(next(iter(c.kv.values())).values())).generation for c in calls] == [0, 1, 1, 1]
    assert recording.requests[0].token_ids.tolist() == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("bad", [[], [-1]])
def test_filters_are_checked(bad):
    with pytest.raises(UsageError, match="layers is a list of numbers from 0"), record("x.h5", layers=bad):
        pass
