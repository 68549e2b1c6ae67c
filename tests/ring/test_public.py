"""Every public function under shapes, documents, windows and options that hypothesis makes up, against the fp64 dense oracle.

(make_schedule and Layout are in test_schedule.py and test_layout.py.)
"""

from __future__ import annotations

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import make_qkv, oracle, rel
from test_schedule import build, masks

from ringattn import Ring, flash_attention, make_schedule, merge, ring_attention
from ringattn.kernels.intervals import dense_mask, mask_intervals
from ringattn.kernels.reference import dense_attention
from ringattn.ring.layout import ALL_LAYOUTS, next_length

quick = settings(max_examples=40, deadline=None)
NAMES = ("out", "dq", "dk", "dv", "dsinks")
shapes = st.tuples(st.integers(1, 2), st.integers(1, 2), st.integers(1, 3), st.sampled_from([8, 16, 24]))  # B, Hkv, G, D


@st.composite
def options(draw, heads):
    """Keyword arguments that are no mask."""
    chosen = {"scale": draw(st.none() | st.floats(0.05, 2.0)), "softcap": draw(st.none() | st.floats(0.5, 20.0))}
    if draw(st.booleans()):
        sinks = draw(st.lists(st.floats(-3.0, 3.0), min_size=heads, max_size=heads))
        chosen["sinks"] = torch.tensor(sinks, dtype=torch.float64).requires_grad_()
    return chosen


def rows_of(mask, batch):
    """Masks of as many rows as the batch has, or of one."""
    documents = mask.get("documents")
    return mask if documents is None or documents.ndim == 1 or len(documents) == batch else mask | {"documents": documents[0]}


def compare(out, leaves, dout, gold):
    """In fp64, and beside the largest of the results: gradients that cancel to nearly nothing have no relative error of their own."""
    got = (out.detach(), *torch.autograd.grad(out, leaves, dout))
    wanted = (gold.out, *gold.grads)
    size = max(float(x.norm()) for x in wanted)
    errors = {n: float((x - y).norm()) for n, x, y in zip(NAMES, got, wanted, strict=False)}
    assert all(e <= 1e-11 * size for e in errors.values()), (errors, size)


@quick
@given(
    kind=st.sampled_from(ALL_LAYOUTS), w=st.integers(1, 7), length=st.integers(1, 7), shape=shapes,
    exchange=st.sampled_from(["ring", "allgather"]), data=st.data(),
)
def test_ring_attention(kind, w, length, shape, exchange, data):
    batch, kv_heads, group, dim = shape
    s = next_length(kind, w * length, w)
    mask, chosen = rows_of(data.draw(masks(s)), batch), data.draw(options(kv_heads * group))
    layout, ring = build(kind, s, w, mask), Ring(virtual=w)
    q, k, v, dout = make_qkv(batch, s, kv_heads * group, kv_heads, dim, torch.float64)
    local = [layout.shard(x, ring) for x in (q, k, v)]
    given_schedule = data.draw(st.booleans())
    how = {"schedule": make_schedule(layout, ring, exchange=exchange, **mask)} if given_schedule else mask | {"exchange": exchange}
    out, lse = ring_attention(*local, ring=ring, layout=layout, return_lse=True, **how, **chosen)
    order = torch.argsort(layout.positions(ring))
    gold = oracle(q, k, v, dout, mask, **chosen)
    leaves = [q, k, v, *([chosen["sinks"]] if "sinks" in chosen else [])]
    compare(out[:, order], leaves, dout, gold)
    lse = lse[..., order].detach()
    assert torch.equal(lse.isinf(), gold.lse.isinf())
    assert torch.where(lse.isinf(), 0.0, lse - gold.lse).abs().max() < 1e-10


@quick
@given(s=st.integers(1, 40), shape=shapes, kernel=st.sampled_from(["torch", "reference"]), data=st.data())
def test_flash_attention(s, shape, kernel, data):
    batch, kv_heads, group, dim = shape
    mask, chosen = rows_of(data.draw(masks(s)), batch), data.draw(options(kv_heads * group))
    tensors = make_qkv(batch, s, kv_heads * group, kv_heads, dim, torch.float64)
    out = flash_attention(*tensors[:3], kernel=kernel, **mask, **chosen)
    compare(out, [*tensors[:3], *([chosen["sinks"]] if "sinks" in chosen else [])], tensors[3], oracle(*tensors, mask, **chosen))


@quick
@given(queries=st.integers(1, 12), keys=st.integers(1, 30), causal=st.booleans(), data=st.data())
def test_flash_attention_with_fewer_or_more_keys(queries, keys, causal, data):
    mask = {"causal": causal, "window": data.draw(st.none() | st.integers(1, 20)) if causal else None}
    tensors = make_qkv(1, queries, 2, 1, 8, torch.float64, keys=keys)
    compare(flash_attention(*tensors[:3], **mask), list(tensors[:3]), tensors[3], oracle(*tensors, mask))


@quick
@given(s=st.integers(1, 24), cuts=st.lists(st.integers(0, 24), max_size=4), data=st.data())
def test_merge(s, cuts, data):
    """Partials over any parts of the keys, in any order, give the whole; an empty one changes no bit."""
    mask = data.draw(masks(s))
    q, k, v, _ = (x.detach() for x in make_qkv(1, s, 2, 2, 8, torch.float64))
    visible = dense_mask(*mask_intervals(s, **mask), s)[:1]
    edges = sorted({0, s, *(min(c, s) for c in cuts)})
    parts = []
    for a, b in zip(edges, edges[1:], strict=False):
        seen = visible.clone()
        seen[..., :a], seen[..., b:] = False, False
        parts.append(dense_attention(q, k, v, seen))
    parts = data.draw(st.permutations(parts))
    out, lse = torch.zeros_like(q), torch.full((1, 2, s), -math.inf, dtype=torch.float64)
    for i, part in enumerate(parts):
        out, lse = merge(out, lse, *part)
        assert i or (torch.equal(out, part[0]) and torch.equal(lse, part[1]))
    whole, whole_lse = dense_attention(q, k, v, visible)
    assert rel(out, whole) <= 1e-12 or not whole.any()
    assert torch.equal(lse.isinf(), whole_lse.isinf()) and torch.where(lse.isinf(), 0.0, lse - whole_lse).abs().max() <= 1e-12
