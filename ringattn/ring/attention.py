"""Ring attention (arXiv 2310.01889): exact attention over a sequence that is sharded round a ring, forward and backward.

Forward, a hop: post the next KV shard into a spare buffer, run the kernel on the current one, wait, swap. The online softmax's
state is carried from hop to hop in fp32; the last hop of each shard writes out and lse.
Backward: KV turns again. A shard's own contribution to dK / dV (offset 0) stays home; the sum of the others travels in fp32 one
hop behind and comes home once. On the last hop dK / dV are computed before dQ, which hides the way home.

Both are registered ops that take the schedule as an integer handle, so torch.compile sees one node each.
Rows are this process's shards laid end to end: q [B, V * L, H, D], k and v [B, V * L, Hkv, D].
Travelling KV is packed rows first, [L, 2, B, Hkv, D]: one contiguous message for K and V, also when trimmed to fewer rows.
"""

from __future__ import annotations

import torch
from einops import rearrange
from torch import Tensor

from ringattn.kernels.checks import check_inputs
from ringattn.kernels.contract import Part, State, accumulate_dtype, sink_gradient
from ringattn.kernels.flash import NO_SOFTCAP
from ringattn.kernels.intervals import ArrayLike
from ringattn.kernels.select import check_hops, select_kernel
from ringattn.ring.gathered import gather_kv, reduce_dkv
from ringattn.ring.layout import Layout
from ringattn.ring.ring import Ring
from ringattn.ring.schedule import Schedule, find_schedule, make_schedule
from ringattn.ring.transport import Carousel, Note
from ringattn.ring.ulysses import check_heads, heads_to_rows, own_heads, rows_to_heads
from ringattn.ring.watch import agree_on


def ring_attention(
    q: Tensor, k: Tensor, v: Tensor, *, ring: Ring, layout: Layout, schedule: Schedule | None = None, causal: bool = True,
    scale: float | None = None, window: int | None = None, documents: ArrayLike | None = None,
    visible: tuple[ArrayLike, ArrayLike] | None = None, softcap: float | None = None, sinks: Tensor | None = None,
    exchange: str = "ring", return_lse: bool = False, kernel: str = "auto", deterministic: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention over the whole sequence from this process's rows of it. Every process of the ring calls it alike.

    Args:
        q: [B, S / P, H, D]; k, v: [B, S / P, Hkv, D]: this process's rows in ``layout`` order (``layout.shard``).
        ring: the processes and virtual shards; layout: who holds which positions.
        schedule: from :func:`make_schedule`, which then alone says what is visible; without one it is made here, from the masks
            (over the whole sequence; a host sync if they lie on a GPU) and ``exchange`` (ring | allgather), and cached by content.
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
            layout, ring, causal=causal, window=window, documents=documents, visible=visible, exchange=exchange,
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
    shards = [slice(j * length, (j + 1) * length) for j in range(ring.virtual)]
    states = [State.empty(q[:, s]) if last else None for s, last in zip(shards, schedule.last_hop, strict=True)]
    ring.passes += 1
    if schedule.exchange == "allgather":
        keys, values = unpack(gather_kv(pack(k, v), schedule, "forward"))
        for rows, bounds in zip(shards, schedule.bounds[0], strict=True):
            assert bounds is not None
            impl.forward(
                q[:, rows], keys, values, bounds, None, scale=scale, softcap=softcap or None, first=True, sinks=sinks,
                out=out[:, rows], lse=lse[:, :, rows],
            )
        return out, lse
    kv = _load_kv(k, v, schedule, shards)
    for hop, offset in enumerate(schedule.offsets):
        if hop < len(schedule.kv):
            kv.post(schedule.kv[hop], offset, Note(ring.passes, "forward", hop + 1, "kv"))
        for j, rows in enumerate(shards):
            bounds = schedule.bounds[hop][j]
            if bounds is None:
                continue
            k_now, v_now = (k[:, rows], v[:, rows]) if hop == 0 else unpack(kv.held[j])
            result = {"out": out[:, rows], "lse": lse[:, :, rows]} if hop == schedule.last_hop[j] else {}
            impl.forward(
                q[:, rows], k_now, v_now, bounds, states[j], scale=scale, softcap=softcap or None, first=hop == 0, sinks=sinks, **result
            )
        if hop < len(schedule.kv):
            kv.wait()
    kv.close()
    return out, lse


@torch.library.impl("ringattn::ring_backward", "default")
def _backward(dout, dlse, q, k, v, out, lse, sinks, handle, scale, softcap, kernel, deterministic):
    schedule = find_schedule(handle)
    ring, length = schedule.ring, schedule.layout.shard_len
    impl = select_kernel(kernel, q, k, softcap=softcap or None, sinks=sinks, deterministic=deterministic)
    shards = [slice(j * length, (j + 1) * length) for j in range(ring.virtual)]
    terms = [impl.prepare(out[:, s], dout[:, s], lse[:, :, s], None if dlse is None else dlse[:, :, s]) for s in shards]
    ring.passes += 1
    if schedule.exchange == "allgather":
        dq, dk, dv = _gathered_backward(impl, q, k, v, dout, terms, schedule, shards, scale, softcap or None)
    else:
        dq, dk, dv = _ring_backward(impl, q, k, v, dout, terms, schedule, shards, scale, softcap or None)
    delta = torch.cat([t.delta for t in terms], -1) if sinks is not None else None
    dsinks = sink_gradient(sinks, lse, delta) if delta is not None else q.new_empty(0)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), dsinks


def _gathered_backward(impl, q, k, v, dout, terms, schedule, shards, scale, softcap):
    """dq in q's dtype and dk, dv in the accumulate dtype, of one hop over the gathered KV."""
    keys, values = unpack(gather_kv(pack(k, v), schedule, "backward"))
    dq = torch.empty_like(q, memory_format=torch.contiguous_format)
    total: Tensor | None = None
    for rows, term, bounds in zip(shards, terms, schedule.bounds[0], strict=True):
        part = torch.empty(schedule.layout.seq_len, *_packed_shape(k, 1)[1:], dtype=accumulate_dtype(k.dtype), device=k.device)
        dk, dv = unpack(part)
        impl.backward(
            q[:, rows], keys, values, dout[:, rows], term, bounds, scale=scale, softcap=softcap, dq=dq[:, rows], dk=dk, dv=dv, add_dq=False
        )
        total = part if total is None else total.add_(part)
    assert total is not None
    return dq, *unpack(reduce_dkv(total, schedule))


def _ring_backward(impl, q, k, v, dout, terms, schedule, shards, scale, softcap):
    """dq, dk, dv in the accumulate dtype (in the inputs' for a single hop), of all hops of the ring."""
    ring, length, hops = schedule.ring, schedule.layout.shard_len, len(schedule.offsets)
    # a ring with one hop adds nothing up, so the kernel may round to the input's dtype itself
    total = q.dtype if hops == 1 else accumulate_dtype(q.dtype)
    dq, dk, dv = (torch.empty(x.shape, dtype=total, device=x.device) for x in (q, k, v))
    kv = _load_kv(k, v, schedule, shards)
    dkv = Carousel(ring, _packed_shape(k, length), accumulate_dtype(k.dtype), k.device)

    def run(hop: int, j: int, k_now: Tensor, v_now: Tensor, dk_now: Tensor, dv_now: Tensor, part: Part) -> None:
        bounds = schedule.bounds[hop][j]
        if bounds is None:
            if part != "q":
                dk_now.zero_()
                dv_now.zero_()
            return
        rows = shards[j]
        impl.backward(
            q[:, rows], k_now, v_now, dout[:, rows], terms[j], bounds, scale=scale, softcap=softcap, dq=dq[:, rows],
            dk=dk_now, dv=dv_now, add_dq=hop > 0, part=part,
        )

    for hop, offset in enumerate(schedule.offsets):
        if hop < len(schedule.kv):
            kv.post(schedule.kv[hop], offset, Note(ring.passes, "backward", hop + 1, "kv"))
        if hop == 0:
            for j, rows in enumerate(shards):
                run(0, j, k[:, rows], v[:, rows], dk[:, rows], dv[:, rows], "all")
        else:
            last = hop == hops - 1
            parts = [dkv.take() for _ in shards]
            for j, part in enumerate(parts):
                run(hop, j, *unpack(kv.held[j]), *unpack(part), "kv" if last else "all")
            if hop > 1:
                dkv.wait()
                _add_arrivals(parts, dkv, schedule.dkv[hop - 2].slice, [(w - offset) % ring.size for w in ring.shards])
            dkv.held = parts
            dkv.post(schedule.dkv[hop - 1], offset, Note(ring.passes, "backward", hop, "dkv"))
            if last:
                for j, part in enumerate(parts):
                    run(hop, j, *unpack(kv.held[j]), *unpack(part), "q")
        if hop < len(schedule.kv):
            kv.wait()
    if hops > 1:
        dkv.wait()
        for w, rows, home in zip(ring.shards, shards, dkv.held, strict=True):
            carried = schedule.dkv[-1].slice(w)
            for grad, arrived in zip((dk, dv), unpack(home), strict=True):
                grad[:, rows][:, carried] += arrived[:, carried]
    kv.close()
    dkv.close()
    return dq, dk, dv


def _add_arrivals(parts: list[Tensor], dkv: Carousel, rows_of, origins: list[int]) -> None:
    """Add the partial sums that have arrived to this hop's contributions, and free their buffers."""
    for part, arrived, origin in zip(parts, dkv.held, origins, strict=True):
        part[rows_of(origin)] += arrived[rows_of(origin)]
    dkv.give(dkv.held)


def _load_kv(k: Tensor, v: Tensor, schedule: Schedule, shards: list[slice]) -> Carousel:
    """The carousel that takes this process's KV round the ring; nothing is packed if nothing travels."""
    ring = schedule.ring
    carousel = Carousel(ring, _packed_shape(k, schedule.layout.shard_len), k.dtype, k.device)
    if schedule.kv:
        carousel.held = [pack(k[:, rows], v[:, rows], carousel.take()) for rows in shards]
    return carousel


def _packed_shape(k: Tensor, length: int) -> tuple[int, ...]:
    return (length, 2, k.shape[0], k.shape[2], k.shape[3])


def pack(k: Tensor, v: Tensor, buffer: Tensor | None = None) -> Tensor:
    """K and V [B, L, Hkv, D] copied into one packed buffer [L, 2, B, Hkv, D]."""
    if buffer is None:
        buffer = k.new_empty(_packed_shape(k, k.shape[1]))
    for i, x in enumerate((k, v)):
        buffer[:, i].copy_(rearrange(x, "b s h d -> s b h d"))
    return buffer


def unpack(buffer: Tensor) -> tuple[Tensor, Tensor]:
    """Views of K and V, [B, L, Hkv, D] each, of a packed buffer [L, 2, B, Hkv, D]."""
    first, second = buffer.permute(1, 2, 0, 3, 4).unbind(0)  # einops would cost 15 us a hop here
    return first, second


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
