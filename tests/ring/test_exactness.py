"""Ring attention over virtual rings against the fp64 dense oracle: every layout, mask and ring size, fp32 to 16 bit.

CASES RM-01, RM-07, RM-09, RB-01, RB-02, RB-04, RB-07, FK-13, PK-01, PK-08, CM-12, CM-14.
"""

import math

import numpy as np
import pytest
import torch
from oracle import BF_BAND, F32_BAND, MASKS, assert_close, make_mask, make_qkv, oracle, rel

import ringattn.ring.attention as ring_module
from ringattn import Layout, Ring, flash_attention, make_schedule, ring_attention
from ringattn.ring.layout import LAYOUTS, next_length
from ringattn.ring.transport import PointToPoint

NAMES = ("out", "dq", "dk", "dv")


def run(kind, w, tensors, mask, **kwargs):
    """Ring attention over a virtual ring of w, in global order: {out, lse, dq, dk, dv, [dsinks]}."""
    q, k, v, dout = tensors
    ring, layout = Ring(virtual=w), Layout(kind, q.shape[1], w)
    back = torch.argsort(layout.positions(ring))
    dlse = kwargs.pop("dlse", None)
    sinks = kwargs.get("sinks")
    out, lse = ring_attention(
        *(layout.shard(x, ring) for x in (q, k, v)), ring=ring, layout=layout, return_lse=True, **mask, **kwargs
    )
    out, lse = out[:, back], lse[..., back]
    objective = (out * dout).sum()
    if dlse is not None:
        objective = objective + torch.where(lse.isinf(), 0.0, lse * dlse).sum()
    leaves = [q, k, v, *((sinks,) if sinks is not None else ())]
    grads = torch.autograd.grad(objective, leaves)
    return dict(zip(("out", "lse", "dq", "dk", "dv", "dsinks"), (out.detach(), lse.detach(), *grads), strict=False))


def gold_dict(gold):
    return dict(zip(("out", "dq", "dk", "dv", "dsinks"), (gold.out, *gold.grads), strict=False))


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """Every buffer that travels starts as NaN, so that rows read before they arrive show."""
    allocate = PointToPoint.allocate
    monkeypatch.setattr(PointToPoint, "allocate", lambda *a: allocate(*a).fill_(math.nan))


@pytest.mark.parametrize("kind", LAYOUTS)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("w", [1, 2, 3, 5, 7, 8])
def test_fp32_matches_the_oracle(kind, mask, w, rng):
    s = next_length(kind, 29 * w, w)  # odd shards but for zigzag
    tensors = make_qkv(2, s, 4, 2, 16, torch.float32)
    kwargs = make_mask(mask, s, 2, rng)
    got, gold = run(kind, w, tensors, kwargs), oracle(*tensors, kwargs)
    assert_close(got, gold_dict(gold), F32_BAND)
    dead = gold.lse.isinf()
    assert torch.equal(got["lse"].isinf(), dead) and (got["out"].transpose(1, 2)[dead] == 0).all()
    assert torch.where(dead, 0.0, got["lse"] - gold.lse).abs().max() < 1e-5


@pytest.mark.parametrize("w", [2, 4])
def test_grouped_heads_sinks_softcap_and_lse_gradient(w):
    tensors = make_qkv(1, 96, 8, 2, 32, torch.float32)
    with torch.no_grad():  # a distinct constant for each KV head: repeat in the place of repeat_interleave must fail
        tensors[2] += torch.arange(2.0)[:, None]
    sinks, dlse = torch.randn(8, requires_grad=True), torch.randn(1, 8, 96)
    for options in ({"sinks": sinks}, {"softcap": 2.0}, {"dlse": dlse}, {"sinks": sinks, "softcap": 4.0, "dlse": dlse, "scale": 0.3}):
        assert_close(run("zigzag", w, tensors, {}, **options), gold_dict(oracle(*tensors, {}, **options)), F32_BAND)


def test_fp64_matches_to_1e_12():
    tensors = make_qkv(1, 72, 2, 1, 16, torch.float64)
    assert_close(run("zigzag", 4, tensors, {}), gold_dict(oracle(*tensors, {})), 1e-12)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bit_error_does_not_grow_with_the_ring(dtype):
    tensors = make_qkv(1, 1024, 2, 1, 64, dtype)
    gold = oracle(*tensors, {"causal": False})
    errors = {}
    for w in (1, 4, 16, 64):
        got = run("contiguous", w, tensors, {"causal": False})
        errors[w] = {n: rel(got[n], x) for n, x in gold_dict(gold).items()}
        assert all(got[n].dtype == dtype for n in NAMES)
    for name in NAMES:
        assert errors[1][name] <= BF_BAND
        assert all(errors[w][name] <= 1.1 * errors[1][name] for w in errors), (name, errors)


@pytest.mark.parametrize("kind", LAYOUTS)
@pytest.mark.parametrize("w", [1, 2, 4, 8])
def test_one_hot_values_show_every_mask_error(kind, w):
    v = torch.eye(16)[None, :, None]
    zero = torch.zeros(1, 16, 1, 16)
    ring, layout = Ring(virtual=w), Layout(kind, 16, w)
    out = ring_attention(layout.shard(zero, ring), layout.shard(zero, ring), layout.shard(v, ring), ring=ring, layout=layout)
    whole = out[0, torch.argsort(layout.positions(ring)), 0]
    assert (whole - torch.tril(torch.ones(16, 16)) / torch.arange(1, 17)[:, None]).abs().max() < 1e-6


@pytest.mark.parametrize("w", [1, 2, 4])
def test_documents_do_not_see_each_other(w):
    documents = torch.tensor([0] * 5 + [1] * 27 + [2] * 32)
    tensors = make_qkv(1, 64, 2, 2, 16, torch.float32)
    before = run("zigzag", w, tensors, {"documents": documents})
    with torch.no_grad():
        tensors[1][:, 3] += 1.0
        tensors[2][:, 3] += 1.0
    after = run("zigzag", w, tensors, {"documents": documents})
    assert torch.equal(before["out"][:, 5:], after["out"][:, 5:])
    assert not torch.equal(before["out"][:, :5], after["out"][:, :5])
    for start, stop in ((0, 5), (5, 32), (32, 64)):
        alone = oracle(*(x[:, start:stop] for x in tensors), {})
        assert rel(after["out"][:, start:stop], alone.out) <= F32_BAND


@pytest.mark.parametrize("kind", LAYOUTS)
def test_shards_of_padding_only(kind):
    documents = torch.full((64,), -1)
    documents[:10] = 0
    tensors = make_qkv(1, 64, 2, 1, 16, torch.float32)
    got = run(kind, 4, tensors, {"documents": documents})
    gold = oracle(*(x[:, :10] for x in tensors), {})
    assert rel(got["out"][:, :10], gold.out) <= F32_BAND
    for name in NAMES:
        assert got[name].isfinite().all() and (got[name][:, 10:] == 0).all()


def test_a_ring_of_one_is_the_local_kernel_bit_for_bit():
    tensors = make_qkv(2, 61, 4, 2, 16, torch.float32)
    got = run("contiguous", 1, tensors, {"window": 20})
    out = flash_attention(*tensors[:3], window=20)
    for name, x in zip(NAMES, (out, *torch.autograd.grad(out, tensors[:3], tensors[3])), strict=True):
        assert torch.equal(got[name], x)


@pytest.mark.parametrize(
    ("kind", "mask"), [("contiguous", "window"), ("striped", "window"), ("zigzag", "documents"), ("chunk-striped", "documents and window")]
)
def test_trimmed_and_pruned_equals_full_bit_for_bit(kind, mask, monkeypatch, rng):
    """Taking every step with whole shards gives the same bits as the live steps with trimmed messages."""
    import ringattn.ring.schedule as schedules

    tensors = make_qkv(1, 8 * 300, 2, 1, 16, torch.float32)
    kwargs = make_mask(mask, 8 * 300, 1, rng)
    trimmed = run(kind, 8, tensors, kwargs)
    rows = make_schedule(Layout(kind, 8 * 300, 8), Ring(virtual=8), **kwargs).kv
    assert kind == "striped" or sum(t.rows for t in rows) < 7 * 300  # there is something to trim or to prune
    monkeypatch.setattr(schedules, "key_hulls", lambda rows: [[(0, 300)] * 8 for _ in range(8)])
    full = run(kind, 8, tensors, kwargs)
    assert all(torch.equal(trimmed[n], full[n]) for n in NAMES)


@pytest.mark.parametrize("w", [2, 4, 8])
def test_buffers_do_not_grow_with_the_ring(w, monkeypatch):
    """At most two travelling KV buffers a shard, and three of dK / dV (one in flight, one arriving, one being written)."""
    made = []
    allocate = PointToPoint.allocate
    monkeypatch.setattr(PointToPoint, "allocate", lambda self, shape, dtype, device: made.append(1) or allocate(self, shape, dtype, device))
    tensors = make_qkv(1, 16 * w, 2, 1, 16, torch.float32)
    run("zigzag", w, tensors, {})
    assert len(made) <= (2 + 2 + 3) * w  # forward KV, backward KV, dKV


def test_double_use_in_one_graph_and_two_layers_in_flight():
    ring, layout = Ring(virtual=2), Layout("zigzag", 32, 2)
    q, k, v, dout = make_qkv(1, 32, 2, 2, 16, torch.float32)
    windowed, full = make_schedule(layout, ring, window=5), make_schedule(layout, ring)
    positions = layout.positions(ring)

    def two_layers(q, k, v, attention):
        first = attention(q, k, v, True)
        return attention(first, first + k, v, False)

    local = [layout.shard(x, ring) for x in (q, k, v)]
    out = two_layers(*local, lambda *a: ring_attention(*a[:3], ring=ring, layout=layout, schedule=windowed if a[3] else full))
    gold_leaves = [x.detach().double().requires_grad_() for x in (q, k, v)]
    gold = two_layers(*gold_leaves, lambda *a: flash_attention(*a[:3], window=5 if a[3] else None, kernel="reference"))
    got = torch.autograd.grad(out, [q, k, v], dout[:, positions])
    for x, y in zip(got, torch.autograd.grad(gold, gold_leaves, dout.double()), strict=True):
        assert rel(x, y) <= F32_BAND


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"q": torch.zeros(1, 9, 4, 16)}, "hold 9 and 8 rows"),
        ({"k": torch.zeros(1, 8, 3, 16), "v": torch.zeros(1, 8, 3, 16)}, "4 heads, not a multiple of the 3"),
        ({"v": torch.zeros(1, 8, 1, 16)}, "they must be the same"),
        ({"k": torch.zeros(1, 8, 2, 16, dtype=torch.float64)}, "k is torch.float64"),
        ({"q": torch.zeros(8, 4, 16)}, r"expected \[batch"),
        ({"scale": -1.0}, "scale=-1.0"),
        ({"softcap": 0.0}, "softcap=0.0"),
        ({"sinks": torch.zeros(2)}, r"expected \[4\]"),
        ({"kernel": "fastest"}, "kernel='fastest' is unknown"),
        ({"documents": torch.zeros(3, 8, dtype=torch.int64)}, "hold 3 rows, expected 1 or the batch size 1"),
        ({"layout": Layout("zigzag", 16, 4)}, "ring of 4 shards|hold 8 and 8 rows"),
    ],
)
def test_bad_arguments_are_refused_by_name(change, words):
    ring = Ring(virtual=2)
    args = {
        "q": torch.zeros(1, 8, 4, 16), "k": torch.zeros(1, 8, 2, 16), "v": torch.zeros(1, 8, 2, 16), "ring": ring,
        "layout": Layout("zigzag", 8, 2),
    } | change
    with pytest.raises(ValueError, match=words):
        ring_attention(args.pop("q"), args.pop("k"), args.pop("v"), **args)


def test_a_schedule_with_masks_beside_it_is_refused():
    ring, layout = Ring(virtual=2), Layout("zigzag", 8, 2)
    x = torch.zeros(1, 8, 2, 16)
    schedule = make_schedule(layout, ring)
    with pytest.raises(ValueError, match="already says what is visible"):
        ring_attention(x, x, x, ring=ring, layout=layout, schedule=schedule, window=3)
    with pytest.raises(ValueError, match="schedule was made for"):
        ring_attention(x, x, x, ring=ring, layout=Layout("contiguous", 8, 2), schedule=schedule)
    handle = schedule.handle
    ring_module.find_schedule(handle)
    for i in range(100):
        make_schedule(layout, ring, documents=torch.from_numpy(np.repeat([0, i + 1], 4)))
    with pytest.raises(KeyError, match="expired"):
        ring_module.find_schedule(handle)


@pytest.mark.parametrize("kind", LAYOUTS)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("w", [1, 2, 3])
def test_the_allgather_exchange_matches_the_oracle(kind, mask, w, rng):
    s = next_length(kind, 31 * w, w)
    tensors = make_qkv(2, s, 4, 2, 16, torch.float32)
    kwargs, sinks = make_mask(mask, s, 2, rng), torch.randn(4, requires_grad=True)
    got = run(kind, w, tensors, kwargs, exchange="allgather", sinks=sinks)
    assert_close(got, gold_dict(oracle(*tensors, kwargs, sinks=sinks)), F32_BAND)
