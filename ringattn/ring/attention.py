"""Ring attention (arXiv 2310.01889): exact attention over a sequence that is sharded round a ring, forward and backward.

Forward, a hop: post the next KV shard into a spare buffer, run the kernel on the current one, wait, swap. The online softmax's
state is carried from hop to hop in fp32; the last hop of each shard writes out and lse.
Backward: KV turns again. A shard's own contribution to dK / dV (offset 0) stays home; the sum of the others travels in fp32 one
hop behind and comes home once, hidden behind dQ of the last hop where a kernel computes that apart. The loops are in ringattn.ring.hops.

Both are registered ops that take the schedule as an integer handle, so torch.compile sees one node each.
Rows are this process's shards laid end to end: q [B, V * L, H, D], k and v [B, V * L, Hkv, D].
Travelling KV is packed rows first, [L, 2, B, Hkv, D]: one contiguous message for K and V, also when trimmed to fewer rows.
"""

from __future__ import annotations

import torch
from einops import rearrange
from torch import Tensor

from ringattn.kernels.checks import check_inputs
from ringattn.kernels.contract import accumulate_dtype, sink_gradient
from ringattn.kernels.flash import NO_SOFTCAP
from ringattn.kernels.intervals import ArrayLike
from ringattn.kernels.select import check_hops, select_kernel
from ringattn.ring.hops import backward_hops, forward_hops
from ringattn.ring.layout import Layout
from ringattn.ring.ring import Ring
from ringattn.ring.schedule import Schedule, find_schedule, make_schedule
from ringattn.ring.ulysses import check_heads, heads_to_rows, own_heads, rows_to_heads
from ringattn.ring.watch import agree_on


def ring_attention(
    q: Tensor, k: Tensor, v: Tensor, *, ring: Ring, layout: Layout, schedule: Schedule | None = None, causal: bool = True,
    scale: float | None = None, window: int | None = None, documents: ArrayLike | None = None,
    visible: tuple[ArrayLike, ArrayLike] | None = None, softcap: float | None = None, sinks: Tensor | None = None,
    exchange: str = "ring", wire: str = "exact", return_lse: bool = False, kernel: str = "auto", deterministic: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention over the whole sequence from this process's rows of it. Every process of the ring calls it alike.

    Args:
        q: [B, S / P, H, D]; k, v: [B, S / P, Hkv, D]: this process's rows in ``layout`` order (``layout.shard``).
        ring: the processes and virtual shards; layout: who holds which positions.
        schedule: from :func:`make_schedule`, which then alone says what is visible; without one it is made here, from the masks
            (over the whole sequence; a host sync if they lie on a GPU), ``exchange`` (ring | allgather) and ``wire`` (exact | bf16, the
            dtype of travelling gradients), and cached by content.
        The other arguments are those of ``flash_attention``. The gradient of ``sinks`` is that of this process's rows: sum it over
        the ring like any replicated parameter's.

    Returns:
        out [B, S / P, H, D] in q's dtype and, if asked for, lse [B, H, S / P] (natural logarithm, fp32).

    Raises:
        ValueError: for arguments that do not fit, naming the argument, its value and what is allowed.
    """
    scale = check_inputs(q, k, v, scale=scale, softcap=softcap, sinks=sinks)
    processes = ring.processes * ring.ulysses
    rows = layout.seq_len // processes
    if q.shape[1] != rows or k.shape[1] != rows:
        raise ValueError(f"q and k hold {q.shape[1]} and {k.shape[1]} rows, but {layout} gives each of {processes} processes {rows}")
    if schedule is None:
        schedule = make_schedule(
            layout, ring, causal=causal, window=window, documents=documents, visible=visible, exchange=exchange, wire=wire,
            device=q.device,
        )
    else:
        if not causal or any(x is not None for x in (window, documents, visible)):
            raise ValueError("a schedule already says what is visible: give causal, window, documents or visible to make_schedule instead")
        if schedule.layout.key != layout.key or schedule.ring is not ring:
            raise ValueError(f"the schedule was made for {schedule.layout} on {schedule.ring}, not for {layout} on {ring}")
    if schedule.batch_rows not in (1, q.shape[0]):
        raise ValueError(f"documents or visible hold {schedule.batch_rows} rows, expected 1 or the batch size {q.shape[0]}")
    out, lse = _attend(q, k, v, schedule.handle, ring, scale, softcap, sinks, kernel, deterministic)
    return (out, lse) if return_lse else out


def attend(
    q: Tensor, k: Tensor, v: Tensor, handle: int, *, ring: Ring | None = None, scale: float | None = None,
    softcap: float | None = None, sinks: Tensor | None = None, kernel: str = "auto", deterministic: bool = False,
) -> Tensor:
    """``ring_attention`` for a model: the schedule is given by its handle, an integer that compiles to a graph input.

    ``ring`` is needed where it has a Ulysses axis.
    """
    scale = check_inputs(q, k, v, scale=scale, softcap=softcap, sinks=sinks)
    return _attend(q, k, v, handle, ring, scale, softcap, sinks, kernel, deterministic)[0]


def _attend(q, k, v, handle, ring, scale, softcap, sinks, kernel, deterministic) -> tuple[Tensor, Tensor]:
    """The op, between the head exchanges if there are any."""
    if ring is None or ring.ulysses == 1:
        out, lse = torch.ops.ringattn.ring_forward(q, k, v, sinks, handle, scale, softcap or NO_SOFTCAP, kernel, deterministic)
        return out, lse
    check_heads(q.shape[2], k.shape[2], ring.ulysses)
    whole = (rows_to_heads(x, ring) for x in (q, k, v))
    own = None if sinks is None else own_heads(sinks, ring)
    out, lse = torch.ops.ringattn.ring_forward(*whole, own, handle, scale, softcap or NO_SOFTCAP, kernel, deterministic)
    lse = rearrange(heads_to_rows(rearrange(lse, "b h s -> b s h 1"), ring), "b s h 1 -> b h s")
    return heads_to_rows(out, ring), lse


torch.library.define(
    "ringattn::ring_forward",
    "(Tensor q, Tensor k, Tensor v, Tensor? sinks, SymInt handle, float scale, float softcap, str kernel, bool deterministic)"
    " -> (Tensor, Tensor)",
    tags=(torch.Tag.cudagraph_unsafe,),
)
torch.library.define(
    "ringattn::ring_backward",
    "(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor? sinks, SymInt handle, float scale, "
    "float softcap, str kernel, bool deterministic) -> (Tensor, Tensor, Tensor, Tensor)",
    tags=(torch.Tag.cudagraph_unsafe,),
)


@torch.library.impl("ringattn::ring_forward", "default")
def _forward(q, k, v, sinks, handle, scale, softcap, kernel, deterministic):
    schedule = find_schedule(handle)
    ring, length = schedule.ring, schedule.layout.shard_len
    if q.shape[1] != ring.virtual * length:
        raise ValueError(f"q holds {q.shape[1]} rows, but in attention {schedule.layout} on {ring} has {ring.virtual * length} a process")
    impl = select_kernel(kernel, q, k, softcap=softcap or None, sinks=sinks, deterministic=deterministic)
    check_hops(impl, ring.size)
    agree_on(schedule, q, k, sinks, scale, softcap, impl.name, deterministic)
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    lse = q.new_empty(q.shape[0], q.shape[2], q.shape[1], dtype=accumulate_dtype(q.dtype))
    ring.passes += 1
    forward_hops(impl, q, k, v, sinks, schedule, scale, softcap or None, out, lse)
    return out, lse


@torch.library.impl("ringattn::ring_backward", "default")
def _backward(dout, dlse, q, k, v, out, lse, sinks, handle, scale, softcap, kernel, deterministic):
    schedule = find_schedule(handle)
    impl = select_kernel(kernel, q, k, softcap=softcap or None, sinks=sinks, deterministic=deterministic)
    schedule.ring.passes += 1
    wanted = sinks is not None
    dq, dk, dv, delta = backward_hops(impl, q, k, v, out, dout, lse, dlse, schedule, scale, softcap or None, with_delta=wanted)
    dsinks = q.new_empty(0) if delta is None else sink_gradient(sinks, lse, delta)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), dsinks


@torch.library.register_fake("ringattn::ring_forward")
def _(q, k, v, sinks, handle, scale, softcap, kernel, deterministic):
    lse = q.new_empty(q.shape[0], q.shape[2], q.shape[1], dtype=accumulate_dtype(q.dtype))
    return torch.empty_like(q, memory_format=torch.contiguous_format), lse


@torch.library.register_fake("ringattn::ring_backward")
def _(dout, dlse, q, k, v, out, lse, sinks, handle, scale, softcap, kernel, deterministic):
    dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    return dq, dk, dv, torch.empty_like(sinks) if sinks is not None else q.new_empty(0)


def _save(ctx, inputs, output):
    q, k, v, sinks, *rest = inputs
    ctx.save_for_backward(q, k, v, *output, sinks)
    ctx.rest = rest
    ctx.set_materialize_grads(False)


def _derivative(ctx, dout, dlse):
    q, k, v, out, lse, sinks = ctx.saved_tensors
    dout = torch.zeros_like(out) if dout is None else dout
    dq, dk, dv, dsinks = torch.ops.ringattn.ring_backward(dout, dlse, q, k, v, out, lse, sinks, *ctx.rest)
    return dq, dk, dv, dsinks if sinks is not None else None, None, None, None, None, None


torch.library.register_autograd("ringattn::ring_forward", _derivative, setup_context=_save)
