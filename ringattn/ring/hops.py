"""The hop loops of ring attention, forward and backward, on one process: what happens between two transfers, and in which order.

What travels is the business of ringattn.ring.travel. Everything that depends on the schedule alone is worked out once a schedule, what
depends on the tensors once a pass; inside a loop there is no allocation, no host sync, and little else than launches and transfers.

Backward: a shard's own contribution to dK / dV (offset 0) stays home; the sum of the others travels one hop behind the keys and comes
home once. The way home after the last hop must be hidden too. A kernel that computes dK / dV and dQ apart does so with the last hop's dQ.
A fused one (``fused_backward``) leaves nothing for later; of hop 0 some KV heads can be held back (:func:`held_back`, switched off by
:data:`HOLD_BACK_ROWS` for now), to be worked on while the last message travels. This choice depends on the kernel and on shapes alone:
real and virtual rings have the same bits.

V shards a process of L rows. Heads are sliced in groups: KV head h with its query heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ringattn.kernels.contract import Kernel, Part, State, accumulate_dtype
from ringattn.ring.gathered import gather_kv, reduce_dkv
from ringattn.ring.schedule import Schedule
from ringattn.ring.transport import Slot
from ringattn.ring.travel import Gradients, Keys, pack, packed_shape

# Shards of at least so many rows hold back heads (below, another launch costs more than what it hides). Exact on CPUs, where the tests
# set it to 1; it stays off until a ring of GPUs has been measured with it: 4096 is the value to begin with.
HOLD_BACK_ROWS = 2**62


def forward_hops(
    impl: Kernel, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, schedule: Schedule, scale: float, softcap: float | None,
    out: Tensor, lse: Tensor,
) -> None:
    """Write ``out`` and ``lse`` of this process's rows."""
    length = schedule.layout.shard_len
    queries, outs, logs = _shards(q, length), _shards(out, length), _shards(lse, length, 2)
    options: dict[str, Any] = {"scale": scale, "softcap": softcap, "sinks": sinks}
    if schedule.exchange == "allgather":
        all_k, all_v = Slot(gather_kv(pack(k, v), schedule, "forward")).halves
        for j, bounds in enumerate(schedule.bounds[0]):
            assert bounds is not None
            impl.forward(queries[j], all_k, all_v, bounds, None, first=True, out=outs[j], lse=logs[j], **options)
        return
    states = [State.empty(queries[j]) if last else None for j, last in enumerate(schedule.last_hop)]
    keys = Keys(schedule, list(zip(_shards(k, length), _shards(v, length), strict=True)), k, "forward")
    last_hop = schedule.last_hop
    for hop, bounds_of in enumerate(schedule.bounds):
        keys.leave(hop)
        for j, bounds in enumerate(bounds_of):
            if bounds is not None:
                k_now, v_now = keys.at(hop, j)
                result: dict[str, Any] = {"out": outs[j], "lse": logs[j]} if hop == last_hop[j] else {}
                impl.forward(queries[j], k_now, v_now, bounds, states[j], first=hop == 0, **options, **result)
        keys.arrive(hop)
    keys.close()


def backward_hops(
    impl: Kernel, q: Tensor, k: Tensor, v: Tensor, out: Tensor, dout: Tensor, lse: Tensor, dlse: Tensor | None, schedule: Schedule,
    scale: float, softcap: float | None, *, with_delta: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """dq, dk, dv in the accumulate dtype or in the inputs' (where nothing is added up), and delta [B, H, V * L] if asked for."""
    length, fused = schedule.layout.shard_len, getattr(impl, "fused_backward", False)
    options = {"scale": scale, "softcap": softcap}
    if schedule.exchange == "allgather":
        rows = _Rows(impl, q, out, dout, lse, dlse, length, options)
        return *_gathered_backward(rows, q, k, v, schedule), rows.delta if with_delta else None
    # (in a ring of two levels what comes home after turn 0 is added at once, to gradients that must be whole by then)
    later = held_back(k.shape[2], length, len(schedule.offsets)) if fused and not schedule.carry else 0
    if not later:
        rows = _Rows(impl, q, out, dout, lse, dlse, length, options)
        return *_ring_backward(rows, rows, None, q, k, v, schedule), rows.delta if with_delta else None
    group = q.shape[2] // k.shape[2]
    first = slice(0, (k.shape[2] - later) * group), slice(0, k.shape[2] - later)
    second = slice(first[0].stop, q.shape[2]), slice(first[1].stop, k.shape[2])

    def of_heads(heads: tuple[slice, slice]) -> _Rows:
        h = heads[0]
        return _Rows(
            impl, q[:, :, h], out[:, :, h], dout[:, :, h], lse[:, h], None if dlse is None else dlse[:, h], length, options, heads,
        )  # fmt: skip

    whole = _Rows(impl, q, out, dout, lse, dlse, length, options)
    return *_ring_backward(of_heads(first), whole, of_heads(second), q, k, v, schedule), whole.delta if with_delta else None


def held_back(kv_heads: int, length: int, hops: int) -> int:
    """How many KV heads of hop 0 a fused kernel works on last, while dK / dV are on their way home; 0 for none."""
    return max(1, kv_heads // 4) if kv_heads > 1 and hops > 1 and length >= HOLD_BACK_ROWS else 0


class _Rows:
    """The query side of the backward pass, of all heads or some: tensors split by shard, and the kernel's per-row terms, which exist
    from :meth:`prepare` to :meth:`drop`. ``heads``: which query heads, and which KV heads with them."""

    def __init__(
        self, impl: Kernel, q: Tensor, out: Tensor, dout: Tensor, lse: Tensor, dlse: Tensor | None, length: int, options: dict[str, Any],
        heads: tuple[slice, slice] | None = None,
    ) -> None:  # fmt: skip
        self.impl, self.options, self.heads = impl, options, heads
        self.q, self.dout, self._out, self._lse = _shards(q, length), _shards(dout, length), _shards(out, length), _shards(lse, length, 2)
        self._dlse: Sequence[Tensor | None] = [None] * len(self.q) if dlse is None else _shards(dlse, length, 2)
        self._terms: list[Any] = []
        self._deltas: list[Tensor] = []

    def prepare(self) -> None:
        """Work out the terms."""
        inputs = zip(self._out, self.dout, self._lse, self._dlse, strict=True)
        self._terms = [self.impl.prepare(*x) for x in inputs]

    def drop(self) -> None:
        """Free the terms, all but delta."""
        self._deltas, self._terms = [t.delta for t in self._terms], []

    @property
    def delta(self) -> Tensor:
        """[B, H, V * L]."""
        return torch.cat(self._deltas or [t.delta for t in self._terms], -1)

    def own(self, x: Tensor) -> Tensor:
        """Of a tensor with all KV heads, those."""
        return x if self.heads is None else x[:, :, self.heads[1]]

    def run(self, j: int, k: Tensor, v: Tensor, bounds: Any, dq: Tensor, dk: Tensor, dv: Tensor, add_dq: bool, part: Part = "all") -> None:
        """One hop of shard j; the tensors hold the heads of this object."""
        self.impl.backward(
            self.q[j], k, v, self.dout[j], self._terms[j], bounds, dq=dq, dk=dk, dv=dv, add_dq=add_dq, part=part, **self.options
        )


def _gathered_backward(rows: _Rows, q: Tensor, k: Tensor, v: Tensor, schedule: Schedule) -> tuple[Tensor, Tensor, Tensor]:
    """dq in q's dtype and dk, dv in the accumulate dtype, of one hop over the gathered KV. Two buffers for dK / dV, whatever V."""
    keys, values = Slot(gather_kv(pack(k, v), schedule, "backward")).halves
    dq = torch.empty_like(q, memory_format=torch.contiguous_format)
    parts = _shards(dq, schedule.layout.shard_len)
    shape = (schedule.layout.seq_len, *packed_shape(k, 1)[1:])
    made = [Slot(torch.empty(shape, dtype=accumulate_dtype(k.dtype), device=k.device)) for _ in parts[:2]]
    rows.prepare()
    for j, bounds in enumerate(schedule.bounds[0]):
        target = made[min(j, 1)]
        rows.run(j, keys, values, bounds, parts[j], *target.halves, False)
        if j:
            made[0].buffer.add_(target.buffer)
    return dq, *Slot(reduce_dkv(made[0].buffer, schedule)).halves


def _ring_backward(
    early: _Rows, rows: _Rows, late: _Rows | None, q: Tensor, k: Tensor, v: Tensor, schedule: Schedule,
) -> tuple[Tensor, Tensor, Tensor]:
    """All hops of the ring. ``early``: the heads of hop 0; ``rows``: those of later hops, all; ``late``: what is left of hop 0."""
    length, hops, wide = schedule.layout.shard_len, len(schedule.offsets), accumulate_dtype(k.dtype)
    # a ring with one hop adds nothing up, so the kernel may round to the input's dtype itself
    dq, dk, dv = (torch.empty(x.shape, dtype=q.dtype if hops == 1 else wide, device=x.device) for x in (q, k, v))
    queries, grads = _shards(dq, length), list(zip(_shards(dk, length), _shards(dv, length), strict=True))
    home, own_bounds = list(zip(_shards(k, length), _shards(v, length), strict=True)), schedule.bounds[0]
    keys, sums = Keys(schedule, home, k, "backward"), Gradients(schedule, grads, k, wide)

    def hop_zero(part: _Rows, add_dq: bool) -> None:
        part.prepare()
        for j, bounds in enumerate(own_bounds):
            k_own, v_own, dk_own, dv_own = (part.own(x) for x in (*home[j], *grads[j]))
            dq_own = queries[j] if part.heads is None else queries[j][:, :, part.heads[0]]
            part.run(j, k_own, v_own, bounds, dq_own, dk_own, dv_own, add_dq)
        if part is not rows:
            part.drop()

    for hop, bounds_of in enumerate(schedule.bounds):
        keys.leave(hop)
        if hop:
            _later_hop(rows, hop, bounds_of, queries, keys, sums)
        else:
            hop_zero(early, False)
            if late is not None:
                assert late.heads is not None
                dq[:, :, late.heads[0]].zero_()
                rows.prepare()
        keys.arrive(hop)
    if late is not None:
        rows.drop()
        hop_zero(late, True)
    sums.wait()
    keys.close()
    sums.close()
    return dq, dk, dv


def _later_hop(rows: _Rows, hop: int, bounds_of: tuple[Any, ...], queries: Sequence[Tensor], keys: Keys, sums: Gradients) -> None:
    """Hop 1 and on: compute, and pass the gradients on; the last hop's dQ hides their way, where the kernel makes it apart."""
    part: Part = "kv" if hop == len(keys.moves) - 1 else "all"
    written = sums.begin()
    for j, bounds in enumerate(bounds_of):
        if bounds is None:
            written[j].buffer[sums.routes[hop - 1].carried[j]].zero_()
        else:
            rows.run(j, *keys.at(hop, j), bounds, queries[j], *written[j].halves, True, part)
    sums.pass_on(hop, written)
    if part == "kv":
        for j, bounds in enumerate(bounds_of):
            if bounds is not None:
                rows.run(j, *keys.at(hop, j), bounds, queries[j], *written[j].halves, True, "q")


def _shards(x: Tensor, length: int, dim: int = 1) -> Sequence[Tensor]:
    """Views of each shard's rows."""
    return (x,) if x.shape[dim] == length else x.split(length, dim)
