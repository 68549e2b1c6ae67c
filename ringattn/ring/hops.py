"""The hop loops of ring attention, forward and backward, on one process: what happens between two transfers, and in which order.

Everything that depends on the schedule alone is worked out once a schedule (:class:`ringattn.ring.messages.Route`), what depends on
the tensors once a pass; inside a loop there is no allocation, no host sync, and little else than launches and transfers.

Backward: a shard's own contribution to dK / dV (offset 0) stays home; the sum of the others travels one hop behind the keys and comes
home once. The way home after the last hop must be hidden too. A kernel that computes dK / dV and dQ apart does so with the last hop's dQ.
A fused one (``fused_backward``) leaves nothing for later; of hop 0 some KV heads can be held back (:func:`held_back`, switched off by
:data:`HOLD_BACK_ROWS` for now), to be worked on while the last message travels. This choice depends on the kernel and on shapes alone:
real and virtual rings have the same bits.

V shards a process of L rows; packed KV is [L, 2, B, Hkv, D]. Heads are sliced in groups: KV head h with its query heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from einops import rearrange
from torch import Tensor

from ringattn.kernels.contract import Kernel, Part, State, accumulate_dtype
from ringattn.ring.gathered import gather_kv, reduce_dkv
from ringattn.ring.messages import Route
from ringattn.ring.schedule import Schedule
from ringattn.ring.transport import Carousel, Note, Slot

# Shards of at least so many rows hold back heads (below, another launch costs more than what it hides). Exact on CPUs, where the tests
# set it to 1; it stays off until a ring of GPUs has been measured with it: 4096 is the value to begin with.
HOLD_BACK_ROWS = 2**62


def forward_hops(
    impl: Kernel, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, schedule: Schedule, scale: float, softcap: float | None,
    out: Tensor, lse: Tensor,
) -> None:
    """Write ``out`` and ``lse`` of this process's rows."""
    ring, length = schedule.ring, schedule.layout.shard_len
    queries, outs, logs = _shards(q, length), _shards(out, length), _shards(lse, length, 2)
    options: dict[str, Any] = {"scale": scale, "softcap": softcap, "sinks": sinks}
    if schedule.exchange == "allgather":
        keys, values = Slot(gather_kv(pack(k, v), schedule, "forward")).halves
        for j, bounds in enumerate(schedule.bounds[0]):
            assert bounds is not None
            impl.forward(queries[j], keys, values, bounds, None, first=True, out=outs[j], lse=logs[j], **options)
        return
    states = [State.empty(queries[j]) if last else None for j, last in enumerate(schedule.last_hop)]
    home = list(zip(_shards(k, length), _shards(v, length), strict=True))
    kv, routes, last_hop = _load_kv(home, schedule, k), schedule.kv_routes, schedule.last_hop
    for hop, bounds_of in enumerate(schedule.bounds):
        turning = hop < len(schedule.kv)
        if turning:
            kv.post(routes[hop], Note(ring.passes, "forward", hop + 1, "kv"))
        for j, bounds in enumerate(bounds_of):
            if bounds is not None:
                k_now, v_now = kv.held[j].halves if hop else home[j]
                result: dict[str, Any] = {"out": outs[j], "lse": logs[j]} if hop == last_hop[j] else {}
                impl.forward(queries[j], k_now, v_now, bounds, states[j], first=hop == 0, **options, **result)
        if turning:
            kv.wait()
    kv.close()


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
    later = held_back(k.shape[2], length, len(schedule.offsets)) if fused else 0
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
    shape = (schedule.layout.seq_len, *_packed_shape(k, 1)[1:])
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
    ring, length, hops = schedule.ring, schedule.layout.shard_len, len(schedule.offsets)
    wide, wire = accumulate_dtype(k.dtype), schedule.wire_dtype(k.dtype)
    # a ring with one hop adds nothing up, so the kernel may round to the input's dtype itself
    dq, dk, dv = (torch.empty(x.shape, dtype=q.dtype if hops == 1 else wide, device=x.device) for x in (q, k, v))
    queries, grads = _shards(dq, length), list(zip(_shards(dk, length), _shards(dv, length), strict=True))
    home, own_bounds = list(zip(_shards(k, length), _shards(v, length), strict=True)), schedule.bounds[0]
    kv, routes, shape = _load_kv(home, schedule, k), schedule.kv_routes, _packed_shape(k, length)
    # a shard's dK / dV on its way, on an exact wire another that is being written meanwhile, and what arrives from other processes
    count = min(hops - 1, 2 if wire == wide else 1) * ring.virtual
    dkv = Carousel(ring, shape, wire, k.device, count + _arrivals(schedule.dkv_routes))
    sums = [] if wire == wide else [Slot(torch.empty(shape, dtype=wide, device=k.device)) for _ in home if hops > 1]

    def hop_zero(part: _Rows, add_dq: bool) -> None:
        part.prepare()
        for j, bounds in enumerate(own_bounds):
            k_own, v_own, dk_own, dv_own = (part.own(x) for x in (*home[j], *grads[j]))
            dq_own = queries[j] if part.heads is None else queries[j][:, :, part.heads[0]]
            part.run(j, k_own, v_own, bounds, dq_own, dk_own, dv_own, add_dq)
        if part is not rows:
            part.drop()

    for hop, bounds_of in enumerate(schedule.bounds):
        turning = hop < len(schedule.kv)
        if turning:
            kv.post(routes[hop], Note(ring.passes, "backward", hop + 1, "kv"))
        if hop == 0:
            hop_zero(early, False)
            if late is not None:
                assert late.heads is not None
                dq[:, :, late.heads[0]].zero_()
                rows.prepare()
        else:
            _later_hop(rows, hop, bounds_of, queries, kv, dkv, sums, schedule)
        if turning:
            kv.wait()
    if hops > 1:
        if late is not None:
            rows.drop()
            hop_zero(late, True)
        dkv.wait()
        for grad, rows_of, arrived in zip(grads, schedule.dkv_routes[-1].arrived, dkv.held, strict=True):
            for x, y in zip(grad, arrived.halves, strict=True):
                x[:, rows_of] += y[:, rows_of]
    kv.close()
    dkv.close()
    return dq, dk, dv


def _later_hop(
    rows: _Rows, hop: int, bounds_of: tuple[Any, ...], queries: Sequence[Tensor], kv: Carousel, dkv: Carousel, sums: list[Slot],
    schedule: Schedule,
) -> None:
    """Hop 1 and on: compute, add the partial sums that have arrived, send the result on.

    ``sums``: where shards' contributions are added up if the wire has another dtype; empty on an exact wire, where that is the buffer
    which travels.
    """
    last, route = hop == len(schedule.bounds) - 1, schedule.dkv_routes[hop - 1]
    written = sums or [dkv.take() for _ in bounds_of]
    for j, bounds in enumerate(bounds_of):
        if bounds is None:
            written[j].buffer[route.carried[j]].zero_()
        else:
            rows.run(j, *kv.held[j].halves, bounds, queries[j], *written[j].halves, True, "kv" if last else "all")
    if hop > 1:
        dkv.wait()
        for total, slot, some in zip(written, dkv.held, schedule.dkv_routes[hop - 2].arrived, strict=True):
            total.buffer[some] += slot.buffer[some]
        dkv.give(dkv.held)
    dkv.held = written
    if sums:
        dkv.held = [dkv.take() for _ in sums]
        for total, slot, some in zip(sums, dkv.held, route.carried, strict=True):
            slot.buffer[some] = total.buffer[some]
    dkv.post(route, Note(schedule.ring.passes, "backward", hop, "dkv"))
    if last:
        for j, bounds in enumerate(bounds_of):
            if bounds is not None:
                rows.run(j, *kv.held[j].halves, bounds, queries[j], *written[j].halves, True, "q")


def _arrivals(routes: Sequence[Route]) -> int:
    """Buffers that messages of one transfer go into, at most."""
    return max((len(route.receives) for route in routes), default=0)


def _load_kv(home: list[tuple[Tensor, Tensor]], schedule: Schedule, like: Tensor) -> Carousel:
    """The carousel that takes this process's KV round the ring; nothing is packed if nothing travels."""
    count = len(home) + _arrivals(schedule.kv_routes) if schedule.kv else 0
    carousel = Carousel(schedule.ring, _packed_shape(like, schedule.layout.shard_len), like.dtype, like.device, count)
    if schedule.kv:
        carousel.held = [carousel.take() for _ in home]
        for slot, (k, v) in zip(carousel.held, home, strict=True):
            for half, x in zip(slot.halves, (k, v), strict=True):
                half.copy_(x)
    return carousel


def _shards(x: Tensor, length: int, dim: int = 1) -> Sequence[Tensor]:
    """Views of each shard's rows."""
    return (x,) if x.shape[dim] == length else x.split(length, dim)


def _packed_shape(k: Tensor, length: int) -> tuple[int, ...]:
    return (length, 2, k.shape[0], k.shape[2], k.shape[3])


def pack(k: Tensor, v: Tensor) -> Tensor:
    """K and V [B, L, Hkv, D] copied into one packed buffer [L, 2, B, Hkv, D]."""
    buffer = k.new_empty(_packed_shape(k, k.shape[1]))
    for i, x in enumerate((k, v)):
        buffer[:, i].copy_(rearrange(x, "b s h d -> s b h d"))
    return buffer
