"""The all-gather exchange: one hop over the whole KV, gathered and sorted by position (as in Llama 3, arXiv 2407.21783).

For short shards, where a ring's hops are too small to hide their transfers. KV memory grows with S instead of S / P.
Backward: each process makes fp32 contributions to dK / dV of the whole sequence, which are summed over the processes and
scattered back. The sum is taken in rank order, so its bits do not depend on the library's reduction.

Packed KV is rows first, [rows, 2, B, Hkv, D]; P processes.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from einops import rearrange
from torch import Tensor

from ringattn.ring.hang import complete
from ringattn.ring.schedule import Schedule
from ringattn.ring.transport import Note


def gather_kv(packed: Tensor, schedule: Schedule, direction: str) -> Tensor:
    """This process's packed rows [S / P, 2, B, Hkv, D] -> the whole sequence's, sorted by position [S, 2, B, Hkv, D]."""
    ring, whole = schedule.ring, packed
    if ring.processes > 1:
        whole = packed.new_empty(schedule.layout.seq_len, *packed.shape[1:])
        parts, note = list(whole.chunk(ring.processes)), Note(ring.passes, direction, 1, "gathered kv")
        complete(ring, note, lambda: dist.all_gather(parts, packed, group=ring.group, async_op=True), packed.device)
    assert schedule.permutation is not None
    return whole.index_select(0, schedule.permutation[1])


def reduce_dkv(whole: Tensor, schedule: Schedule) -> Tensor:
    """Contributions to all rows by position [S, 2, B, Hkv, D] -> the sum for this process's rows [S / P, 2, B, Hkv, D]."""
    assert schedule.permutation is not None
    by_shard, ring = whole.index_select(0, schedule.permutation[0]), schedule.ring
    if ring.processes == 1:
        return by_shard
    by_shard = by_shard.to(schedule.wire_dtype(by_shard.dtype))
    arrived = torch.empty_like(by_shard)
    note = Note(ring.passes, "backward", 1, "gathered dkv")
    complete(ring, note, lambda: dist.all_to_all_single(arrived, by_shard, group=ring.group, async_op=True), by_shard.device)
    return rearrange(arrived, "(p s) ... -> p s ...", p=ring.processes).sum(0, dtype=whole.dtype)
