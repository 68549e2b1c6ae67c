"""Real rings over gloo: bit-equal to virtual rings, equal transfers, no races, no deadlock (CASES CM-01, 03, 05, 06, 07, 14)."""

import math
import time
from collections import Counter

import pytest
import torch
import torch.distributed as dist
from oracle import make_mask, make_qkv
from processes import run_ranks

from ringattn import Layout, Ring, ring_attention
from ringattn.ring.transport import PointToPoint

pytestmark = pytest.mark.ring
CASES = [
    ("zigzag", "causal"), ("striped", "documents and window"), ("contiguous", "window"), ("contiguous", "full"),
    ("zigzag", "documents per row"),
]


class Slow(PointToPoint):
    """Poisons what it allocates, delays one rank's sends, counts messages."""

    counts: Counter = Counter()

    def allocate(self, shape, dtype, device):
        return super().allocate(shape, dtype, device).fill_(math.nan)

    def post(self, sends, receives, note):
        if self.ring.rank == 1:
            time.sleep(0.01)
        self.counts.update(sends=len(sends), receives=len(receives), rows=sum(m.payload.shape[0] for m in sends))
        return super().post(sends, receives, note)


def attention(ring, kind, mask, tensors, **kwargs):
    """out, dq, dk, dv of this process's rows."""
    layout = Layout(kind, tensors[0].shape[1], ring.size)
    q, k, v, dout = (layout.shard(x.detach(), ring) for x in tensors)
    # k and v as views of a wider tensor: the wire must not see their strides
    wide = torch.cat([k, v], -1)
    k, v = wide[..., : k.shape[-1]].requires_grad_(), wide[..., k.shape[-1] :].requires_grad_()
    q.requires_grad_()
    out = ring_attention(q, k, v, ring=ring, layout=layout, **mask, **kwargs)
    grads = torch.autograd.grad(out, (q, k, v), dout)
    return [layout.unshard(x, ring) for x in (out.detach(), *grads)]


def ring_body(problems):
    """Every problem over rings of 2, 3 and 4 of the 4 ranks, and 2 x virtual 2; twice, to show that no message is left over."""
    results = {}
    rank = dist.get_rank()
    groups = {p: dist.new_group(list(range(p))) for p in (2, 3, 4)}  # built by every rank, in one order
    for p, virtual in ((2, 1), (3, 1), (4, 1), (2, 2)):
        if rank >= p:
            continue
        ring = Ring(groups[p], virtual)
        ring.transport = Slow(ring)
        for name, (kind, mask, tensors) in problems[ring.size].items():
            Slow.counts.clear()
            first = attention(ring, kind, mask, tensors)
            counts = dict(Slow.counts)
            again = attention(ring, kind, mask, tensors)
            assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
            results[p, virtual, name] = (first, counts)
    one = Ring(dist.new_group([rank], use_local_synchronization=True))
    one.transport = Slow(one)
    Slow.counts.clear()
    kind, mask, tensors = problems[1]["zigzag causal"]
    results["one"] = (attention(one, kind, mask, tensors), dict(Slow.counts))
    return results


def test_real_rings_equal_virtual_rings_bit_for_bit(rng):
    problems = {
        w: {
            f"{kind} {mask}": (kind, make_mask(mask, 42 * w, 2, rng), make_qkv(2, 42 * w, 4, 2, 16, torch.float32))
            for kind, mask in (CASES if w > 1 else CASES[:1])
        }
        for w in (1, 2, 3, 4)
    }
    problems[2]["zigzag bf16"] = ("zigzag", {}, make_qkv(1, 84, 4, 2, 16, torch.bfloat16))
    detached = {w: {n: (k, m, [x.detach() for x in t]) for n, (k, m, t) in p.items()} for w, p in problems.items()}
    ranks = run_ranks(4, ring_body, detached)
    for p, virtual in ((2, 1), (3, 1), (4, 1), (2, 2)):
        for name, (kind, mask, tensors) in problems[p * virtual].items():
            gold = attention(Ring(virtual=p * virtual), kind, mask, tensors)
            counts = [ranks[r][p, virtual, name][1] for r in range(p)]
            assert all(c == counts[0] for c in counts), f"ranks made different transfers: {counts}"
            assert counts[0].get("sends", 0) == counts[0].get("receives", 0)
            for r in range(p):
                for what, x, y in zip(("out", "dq", "dk", "dv"), ranks[r][p, virtual, name][0], gold, strict=True):
                    assert torch.equal(x, y), f"P={p} V={virtual} {name}: {what} of rank {r} differs from the virtual ring"
    # k KV forward, k KV and k dKV backward for k live non-zero offsets
    assert ranks[0][4, 1, "zigzag causal"][1]["sends"] == 3 * 3
    assert ranks[0][4, 1, "contiguous window"][1]["sends"] == 3 * 1
    out, counts = ranks[2]["one"]
    assert counts == {} and torch.equal(out[0], attention(Ring(), *problems[1]["zigzag causal"])[0])


def big_body():
    """4M floats a message and 10 floats a message, forward and backward: blocking sends would deadlock."""
    ring = Ring()
    for rows, d in ((5 * ring.size, 1), (8192 * ring.size, 256)):
        layout = Layout("contiguous", rows, ring.size)
        tensors = [torch.randn(1, rows // ring.size, 1, d).requires_grad_() for _ in range(3)]
        out = ring_attention(*tensors, ring=ring, layout=layout, window=3)
        out.sum().backward()
    return True


@pytest.mark.parametrize("w", [2, 3])
def test_no_order_of_sends_deadlocks(w):
    assert run_ranks(w, big_body, limit_s=60) == [True] * w
