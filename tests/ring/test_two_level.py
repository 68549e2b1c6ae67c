"""The ring of two levels: exact, the same bits real and virtual, messages that carry what is needed, and hidden where they can be."""

from __future__ import annotations

import dataclasses
import itertools
import math
import time
from datetime import timedelta

import numpy as np
import pytest
import torch
import torch.distributed as dist
from oracle import F32_BAND, MASKS, assert_close, make_mask, make_qkv, oracle
from processes import run_ranks

import ringattn.ring.attention as ring_module
import ringattn.ring.schedule as schedule_module
from ringattn import Layout, Ring, make_schedule, ring_attention
from ringattn.kernels.contract import KEY_BLOCK
from ringattn.kernels.torch_tiled import TorchKernel
from ringattn.ring.alone import IdleKernel, lone_rank
from ringattn.ring.layout import LAYOUTS, choose_layout, next_length
from ringattn.ring.messages import Plan
from ringattn.ring.transport import Carousel, PointToPoint, outer_transport_of, use_transport
from ringattn.ring.turns import Turns
from ringattn.ring.watch import enable_checks

NAMES = ("out", "dq", "dk", "dv")
SIZES = [(4, 2), (6, 3), (6, 2), (8, 4), (9, 3), (3, 1), (4, 4)]  # (shards, shards a node)


def attention(ring, kind, mask, tensors, **kwargs):
    """out, dq, dk, dv in global order."""
    layout = Layout(kind, tensors[0].shape[1], ring.size)
    leaves = [layout.shard(x.detach(), ring).requires_grad_() for x in tensors[:3]]
    out = ring_attention(*leaves, ring=ring, layout=layout, **mask, **kwargs)
    grads = torch.autograd.grad(out, leaves, layout.shard(tensors[3].detach(), ring))
    return [layout.unshard(x, ring) for x in (out.detach(), *grads)]


@pytest.fixture
def poisoned(monkeypatch):
    """Every buffer that travels starts as NaN, so that rows read before they arrive show."""
    allocate = PointToPoint.allocate
    monkeypatch.setattr(PointToPoint, "allocate", lambda *a: allocate(*a).fill_(math.nan))


# --- the order of hops --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("w", "node"), SIZES)
def test_every_hop_is_a_permutation_and_turns_pass_nodes(w, node):
    turns = Turns(w, node)
    met = {q: set() for q in range(w)}
    for d in range(w):
        origins = [turns.origin(q, d) for q in range(w)]
        assert sorted(origins) == list(range(w)) and [turns.holder(o, d) for o in origins] == list(range(w))
        assert np.array_equal(turns.hop_indices()[1][d], origins)
        for q, o in enumerate(origins):
            met[q].add(o)
            assert (q // node - o // node) % (w // node) == d // node
    assert all(x == set(range(w)) for x in met.values())
    assert np.array_equal(Turns(w, w).hop_indices()[1], (np.arange(w) - np.arange(w)[:, None]) % w)


@pytest.mark.parametrize("kind", LAYOUTS)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(("w", "node"), [(4, 2), (6, 3), (9, 3), (3, 1)])
def test_messages_carry_what_is_needed_and_no_more(kind, mask, w, node, rng):
    s = next_length(kind, 150 * w, w)
    kwargs = make_mask(mask, s, 2, rng)
    ring, layout = Ring(virtual=w, inner=node), Layout(kind, s, w)
    schedule, turns = make_schedule(layout, ring, **kwargs), Turns(w, node)
    flat = make_schedule(layout, Ring(virtual=w), **kwargs)
    assert schedule.pairs == flat.pairs and schedule.work.sum() == flat.work.sum()
    live = {d for d in range(w) if flat_work(flat, turns, d)}
    assert set(schedule.offsets) == live | {0} | {d - d % node for d in live}
    # rows of shard o that are seen at each hop, rounded out to blocks
    length = layout.shard_len
    seen = np.zeros((len(schedule.offsets), w, length), bool)
    for hop, q in itertools.product(range(len(schedule.offsets)), range(w)):
        bounds = schedule.bounds[hop][q]
        if bounds is not None:
            rows = np.flatnonzero((bounds.q_hi > bounds.q_lo).any(0).numpy())
            if rows.size:
                seen[hop, schedule.origin(q, hop), rows[0] // KEY_BLOCK * KEY_BLOCK : -(-(rows[-1] + 1) // KEY_BLOCK) * KEY_BLOCK] = True
    hops_of = schedule.hops_of_turns
    last = len(schedule.offsets)
    assert len(schedule.kv) == len(schedule.dkv) == last - 1 and len(schedule.carry) == len(hops_of) - 1

    def check(transfer, hops, within, *, holds=None):
        """It carries what these hops see of each shard, not more than the longest needs, within what there is."""
        needed = [span(seen[list(hops), o].any(0)) for o in range(w)]
        assert transfer.rows == max(int(x.sum()) for x in needed)
        sent = np.zeros((w, length), bool)
        for o in range(w):
            sent[o, transfer.slice(o)] = True
        assert sent.sum(1).tolist() == [transfer.rows] * w and (sent | ~np.array(needed)).all() and (within | ~sent).all()
        assert holds is None or (sent | ~holds).all()
        return sent

    everything = outer = np.ones((w, length), bool)
    for k, turn in enumerate(hops_of):
        if k:
            before = schedule.kv[turn[0] - 1]
            assert (before.before, before.after) == (schedule.offsets[hops_of[k - 1][0]], schedule.offsets[turn[0]])
            outer = check(before, range(turn[0], last), outer)
        have = outer
        for hop in turn[1:]:
            t = schedule.kv[hop - 1]
            assert (t.before, t.after) == (schedule.offsets[hop - 1], schedule.offsets[hop])
            have = check(t, range(hop, turn[-1] + 1), have)
    carried = None
    for k, turn in enumerate(hops_of):
        held, start = None, turn[0] + (k == 0)
        for hop in turn[1 if k == 0 else 0 :]:
            t = schedule.dkv[hop - 1]
            assert t.before == schedule.offsets[hop]
            assert t.after == (schedule.offsets[hop + 1] if hop < turn[-1] else schedule.offsets[turn[0]])
            held = check(t, range(start, hop + 1), everything, holds=held)
        if k:
            t = schedule.carry[k - 1]
            assert (t.before, t.after) == (schedule.offsets[turn[0]], schedule.offsets[hops_of[k + 1][0]] if k + 1 < len(hops_of) else 0)
            carried = check(t, range(hops_of[1][0], turn[-1] + 1), everything, holds=held if carried is None else held | carried)


def flat_work(flat, turns, offset):
    """Whether some shard has work at an offset of ``turns``, by the schedule of a ring of one level."""
    w = turns.size
    work = dict(zip(flat.offsets, flat.work, strict=True))
    return any((q - turns.origin(q, offset)) % w in work and work[(q - turns.origin(q, offset)) % w][q] > 0 for q in range(w))


def span(rows):
    """The least range of rows around some, as a mask."""
    result, where = np.zeros(len(rows), bool), np.flatnonzero(rows)
    if where.size:
        result[where[0] : where[-1] + 1] = True
    return result


# --- numbers ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(("w", "node"), SIZES)
def test_fp32_matches_the_oracle(mask, w, node, rng, poisoned):
    kind = "contiguous" if (w, node) == (6, 2) else "zigzag"
    s = next_length(kind, 29 * w, w)
    tensors, kwargs = make_qkv(2, s, 4, 2, 16, torch.float32), make_mask(mask, s, 2, rng)
    gold = oracle(*tensors, kwargs)
    got = attention(Ring(virtual=w, inner=node), kind, kwargs, tensors)
    assert_close(dict(zip(NAMES, got, strict=True)), dict(zip(NAMES, (gold.out, *gold.grads), strict=True)), F32_BAND)
    if node == w:
        flat = attention(Ring(virtual=w), kind, kwargs, tensors)
        assert all(torch.equal(a, b) for a, b in zip(got, flat, strict=True))


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(("w", "node"), [(4, 2), (6, 3), (9, 3)])
def test_trimmed_messages_and_whole_shards_give_the_same_bits(mask, w, node, rng, monkeypatch):
    s = next_length("contiguous", 150 * w, w)
    tensors, kwargs = make_qkv(2, s, 4, 2, 8, torch.float32), make_mask(mask, s, 2, rng)
    trimmed = attention(Ring(virtual=w, inner=node), "contiguous", kwargs, tensors)
    plan = schedule_module.plan_transfers

    def untrimmed(offsets, hulls, shard_len, turns):
        whole = {"rows": shard_len, "starts": (0,) * w}
        return Plan(*(tuple(dataclasses.replace(t, **whole) for t in some) for some in plan(offsets, hulls, shard_len, turns)))

    monkeypatch.setattr(schedule_module, "plan_transfers", untrimmed)
    whole = attention(Ring(virtual=w, inner=node), "contiguous", kwargs, tensors)
    assert all(torch.equal(a, b) for a, b in zip(trimmed, whole, strict=True))


def test_gradients_that_travel_in_16_bit(rng):
    tensors = make_qkv(1, 8 * 32, 4, 2, 16, torch.float32)
    exact, narrow = (attention(Ring(virtual=8, inner=4), "zigzag", {}, tensors, wire=wire) for wire in ("exact", "bf16"))
    assert torch.equal(exact[0], narrow[0]) and torch.equal(exact[1], narrow[1])
    for a, b in zip(exact[2:], narrow[2:], strict=True):
        assert 1e-4 < ((a - b).norm() / a.norm()).item() < 8e-3


def test_planned_layouts_know_the_turns(rng):
    documents = torch.from_numpy(np.repeat(np.arange(8), [900, 100, 40, 500, 20, 300, 60, 128]))
    chosen = choose_layout(2048, 4, documents=documents, inner=2)
    assert chosen.turns == Turns(4, 2)
    planned = Layout("balanced", 2048, 4, documents=documents, inner=2)
    assert planned.predict(documents=documents).lock_step <= Layout("zigzag", 2048, 4, inner=2).predict(documents=documents).lock_step
    wide = Layout("contiguous", 1 << 16, 8, inner=4).predict(causal=False)
    sent = wide.transfers
    assert sent[3] == 6 * sent[0] and len(sent) == 7  # the fifth hop's keys come from another node
    assert wide.time == sum(wide.hops.max(1))  # both hidden


# --- real rings ---------------------------------------------------------------------------------------------------------


class Slow(PointToPoint):
    """Poisons what it allocates and delays one rank's sends."""

    def allocate(self, shape, dtype, device):
        buffer = super().allocate(shape, dtype, device)
        return buffer.fill_(math.nan) if dtype.is_floating_point else buffer

    def post(self, sends, receives, note):
        if self.ring.rank == 1:
            time.sleep(0.003)
        return super().post(sends, receives, note)


RINGS = [(4, 1, 2), (6, 1, 3), (6, 1, 2), (2, 2, 2), (4, 2, 4)]  # processes, virtual, shards a node


def two_level_ring(p, virtual, inner, *, slow=True):
    """Every rank of the default group calls it; None on those that are not of the ring."""
    near, far = (dist.new_group(list(range(p)), timeout=timedelta(seconds=60)) for _ in range(2))
    if dist.get_rank() >= p:
        return None
    ring = Ring(near, virtual, inner=inner, outer_group=far)
    if slow:
        ring.transport, ring.outer_transport = Slow(ring), Slow(ring, far)
    return ring


def ring_body(problems):
    results = {}
    for shape in RINGS:
        ring = two_level_ring(*shape)
        for name, (kind, mask, tensors) in problems[shape[0] * shape[1]].items():
            if ring is not None:
                first, again = (attention(ring, kind, mask, tensors) for _ in range(2))
                assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
                results[*shape, name] = first
        if ring is not None and shape[1] == 1:
            enable_checks(ring)
            kind, mask, tensors = problems[shape[0]]["zigzag causal"]
            checked = attention(ring, kind, mask, tensors)
            assert all(torch.equal(a, b) for a, b in zip(checked, results[*shape, "zigzag causal"], strict=True))
    return results


@pytest.mark.ring
def test_real_rings_equal_virtual_rings_bit_for_bit(rng):
    cases = [("zigzag", "causal"), ("striped", "documents and window"), ("contiguous", "window"), ("contiguous", "full")]
    problems = {
        w: {
            f"{kind} {mask}": (kind, make_mask(mask, 24 * w, 2, rng), [x.detach() for x in make_qkv(2, 24 * w, 4, 2, 16, torch.float32)])
            for kind, mask in cases
        }
        for w in (4, 6, 8)
    }
    ranks = run_ranks(6, ring_body, problems)
    for p, virtual, inner in RINGS:
        for name, (kind, mask, tensors) in problems[p * virtual].items():
            gold = attention(Ring(virtual=p * virtual, inner=inner), kind, mask, tensors)
            for rank in range(p):
                for what, x, y in zip(NAMES, ranks[rank][p, virtual, inner, name], gold, strict=True):
                    assert torch.equal(x, y), f"{p} x {virtual}, {inner} a node, {name}: {what} of rank {rank}"


def disagreeing_body():
    near, far = (dist.new_group(list(range(4)), timeout=timedelta(seconds=20)) for _ in range(2))
    ring = Ring(near, inner=4 if dist.get_rank() == 3 else 2, outer_group=far)
    x = torch.zeros(1, 16, 2, 8)
    try:
        ring_attention(x, x, x, ring=ring, layout=Layout("zigzag", 64, 4))
    except RuntimeError as error:
        return str(error)
    return "nothing was said"


@pytest.mark.ring
def test_ranks_that_disagree_on_the_nodes_are_named():
    for said in run_ranks(4, disagreeing_body, limit_s=60):
        assert "inner: 4 on rank 3, but 2 on ranks 0, 1, 2" in said


# --- what it costs ------------------------------------------------------------------------------------------------------


def test_messages_between_nodes_travel_under_the_whole_turn(monkeypatch):
    events = []
    post, wait, forward = Carousel.post, Carousel.wait, TorchKernel.forward

    def posting(self, route, note):
        self.note = note.what
        events.append(f"post {note.what}")
        return post(self, route, note)

    def waiting(self):
        events.append(f"wait {self.note}")
        return wait(self)

    monkeypatch.setattr(Carousel, "post", posting)
    monkeypatch.setattr(Carousel, "wait", waiting)
    monkeypatch.setattr(TorchKernel, "forward", lambda self, *a, **k: events.append("kernel") or forward(self, *a, **k))
    ring, layout = Ring(virtual=4, inner=2), Layout("contiguous", 64, 4)
    x = torch.randn(1, 64, 2, 8)
    ring_attention(x, x, x, ring=ring, layout=layout, causal=False, kernel="torch")
    shard = ["kernel"] * 4
    assert events == ["post outer kv", "post kv", *shard, "wait kv", *shard, "wait outer kv", "post kv", *shard, "wait kv", *shard]


def test_memory_of_a_rank_does_not_depend_on_the_ring(monkeypatch):
    from test_hops import peak_bytes

    monkeypatch.setattr(ring_module, "select_kernel", lambda *args, **kwargs: IdleKernel())

    def one_pass(w, inner):
        ring, layout = lone_rank(w, 1, inner), Layout("zigzag", 256 * w, w)
        schedule = make_schedule(layout, ring)
        q, k = torch.randn(1, 256, 4, 16), torch.randn(1, 256, 2, 16)

        def forward_and_backward():
            out = torch.empty_like(q)
            lse = torch.zeros(1, 4, 256)
            ring_module.forward_hops(IdleKernel(), q, k, k, None, schedule, 1.0, None, out, lse)
            return ring_module.backward_hops(IdleKernel(), q, k, k, out, out, lse, None, schedule, 1.0, None, with_delta=False)

        return peak_bytes(forward_and_backward)

    flat, peaks = one_pass(8, None), {(w, inner): one_pass(w, inner) for w, inner in ((9, 3), (12, 4), (16, 4), (32, 4))}
    assert len(set(peaks.values())) == 1, peaks
    kv, dkv = 2 * 256 * 2 * 16 * 4, 2 * 256 * 2 * 16 * 4
    assert next(iter(peaks.values())) == flat + 2 * kv + 2 * dkv  # a turn's first keys stay, and others arrive; gradients likewise


def test_refusals():
    for inner in (3, 0, True, 8):
        with pytest.raises(ValueError, match=r"inner=.*must divide the 4 shards of the ring: one of 1, 2, 4"):
            Ring(virtual=4, inner=inner)
    ring = Ring(virtual=4, inner=2)
    with pytest.raises(ValueError, match="exchange='allgather' has no turns: not on a ring with inner=2"):
        make_schedule(Layout("zigzag", 64, 4), ring, exchange="allgather")
    with pytest.raises(ValueError, match=r"transport='push' is not possible"):
        use_transport(ring, "push", torch.device("cpu"))
    assert use_transport(ring, "auto", torch.device("cpu")) == "p2p" and isinstance(outer_transport_of(ring), PointToPoint)
