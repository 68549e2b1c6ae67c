"""All-gather and Ulysses exchanges over real gloo processes, against the fp64 oracle (CASES RB-08, FK-13)."""

import pytest
import torch
import torch.distributed as dist
from oracle import F32_BAND, assert_close, make_mask, make_qkv, oracle
from processes import run_ranks

from ringattn import Layout, Ring, ring_attention
from ringattn.ring.ulysses import check_heads

pytestmark = pytest.mark.ring
# ulysses, ring processes, virtual, exchange, query heads, KV heads
SPLITS = [
    (2, 2, 1, "ring", 8, 4), (4, 1, 1, "ring", 8, 4), (1, 4, 1, "allgather", 8, 2), (2, 2, 1, "allgather", 8, 1),
    (4, 1, 2, "ring", 8, 2), (2, 1, 1, "ring", 4, 4),
]


def body(tensors_by_heads, masks):
    results = {}
    for split in SPLITS:
        u, p, virtual, exchange, heads, kv_heads = split
        ranks = torch.arange(u * p).view(p, u)  # the processes of one ring shard are neighbours
        groups = {}
        for axis, rows in (("ulysses", ranks), ("ring", ranks.T)):
            for row in rows.tolist():
                group = dist.new_group(row)
                if dist.get_rank() in row:
                    groups[axis] = group
        if dist.get_rank() >= u * p:
            continue
        ring = Ring(groups["ring"], virtual, groups["ulysses"] if u > 1 else None)
        q, k, v, dout, sinks = tensors_by_heads[heads, kv_heads]
        layout = Layout("zigzag", q.shape[1], ring.size, ulysses=u)
        local = [layout.shard(x, ring).requires_grad_() for x in (q, k, v)]
        sinks = sinks.clone().requires_grad_()
        for name, mask in masks.items():
            out, lse = ring_attention(*local, ring=ring, layout=layout, exchange=exchange, sinks=sinks, return_lse=True, **mask)
            grads = torch.autograd.grad(out, (*local, sinks), layout.shard(dout, ring))
            dist.all_reduce(grads[3], group=groups["ring"])
            if u > 1:
                dist.all_reduce(grads[3], group=groups["ulysses"])
            whole = [layout.unshard(x, ring) for x in (out.detach(), *grads[:3])]
            results[split, name] = (*whole, grads[3], layout.unshard(lse.detach(), ring, dim=2))
    return results


def test_every_split_matches_the_oracle(rng):
    shapes = {(s[4], s[5]) for s in SPLITS}
    tensors = {hk: (*(x.detach() for x in make_qkv(2, 48, *hk, 16, torch.float32)), torch.randn(hk[0])) for hk in shapes}
    masks = {"causal": {}, "documents": make_mask("documents and window", 48, 2, rng)}
    ranks = run_ranks(4, body, tensors, masks)
    for split in SPLITS:
        for name, mask in masks.items():
            q, k, v, dout, sinks = tensors[split[4], split[5]]
            gold = oracle(q, k, v, dout, mask, sinks=sinks)
            for r in range(split[0] * split[1]):
                got = dict(zip(("out", "dq", "dk", "dv", "dsinks", "lse"), ranks[r][split, name], strict=True))
                assert_close(got, dict(zip(got, (gold.out, *gold.grads, gold.lse), strict=True)), F32_BAND)


def test_heads_that_do_not_split_are_refused():
    for heads, kv_heads, u, words in ((6, 6, 4, "6 query heads"), (12, 3, 4, "3 KV heads"), (12, 6, 4, "6 KV heads")):
        with pytest.raises(ValueError, match=words):
            check_heads(heads, kv_heads, u)
