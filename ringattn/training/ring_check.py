"""debug.check: every layer's ring attention on the first real batch, output and gradients, against fp64 arithmetic that knows no ring.

In a forward pass of the model, each layer's q, k, v go through the run's own attention, forward and backward. The upstream gradient is
random on a few sampled query rows of each rank and zero elsewhere. So the oracle needs the probabilities of those rows only: each rank
scores the sampled rows of all ranks against the keys that it holds, chunk by chunk, in fp64, and the partial sums of all ranks are
added up. Memory is that of one chunk, work is sampled rows x S, whatever the length; and dk and dv are compared on *every* key.

Shapes: B rows, r sampled rows a rank, R = P * r of all ranks, L positions a rank, G query heads a KV head, D head dim.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from einops import rearrange
from torch import Tensor

from ringattn.kernels.intervals import mask_intervals
from ringattn.model.transformer import Attend, Attention
from ringattn.ring.layout import Layout
from ringattn.ring.ring import Ring
from ringattn.training.parallelize import free_gathered, precision
from ringattn.training.run import Run

# Relative L2 errors that the dtype explains; a structural mistake is at least ten times as large.
BANDS = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 2e-2}
CHUNK = 2048  # keys at once
LEAST_SHARE = 0.05  # a rank whose part of a tensor is smaller than this share of a usual rank's is judged by that instead


class CheckFailed(RuntimeError):
    """Attention does not compute what it should; the message names layer, tensor, rank and error."""


@dataclass(frozen=True)
class Measure:
    """How far a tensor of one layer is off on one rank: norms of the difference and of the oracle's."""

    layer: int
    tensor: str
    difference: float
    norm: float


@dataclass(frozen=True)
class Rows:
    """The sampled query rows of all ranks: ``lo``, ``hi`` [B or 1, R] first and last visible position; ``own`` of this rank, int64 [r]."""

    own: Tensor
    lo: Tensor
    hi: Tensor


def check_ring(run: Run) -> str:
    """Check the first micro-batch of the next step; returns a line on what was found. Every rank calls this.

    Raises CheckFailed on all ranks if a tensor of some rank is off by more than its dtype explains.
    """
    placed = run.batches.first(run.step)
    micro, debug = run.batches.place(placed), run.config.debug
    attentions = [m for m in run.model.modules() if isinstance(m, Attention)]
    originals = [a.attend for a in attentions]
    found: list[Measure] = []
    for layer, attention in enumerate(attentions):
        window = run.model_config.layer_windows[layer]
        bounds = mask_intervals(placed.layout.seq_len, window=window or None, documents=placed.batch.documents)
        attention.attend = _probe(run, placed.layout, layer, originals[layer], bounds, debug.check_rows, debug.check_heads, found)
    try:
        with torch.no_grad():
            run.model(micro.tokens, micro.positions, micro.labels, micro.handles)
    finally:
        for attention, original in zip(attentions, originals, strict=True):
            attention.attend = original
        free_gathered(run.model)
    return judge(run, found)


def judge(run: Run, own: list[Measure]) -> str:
    """All ranks look at all measures."""
    everyone: list[list[Measure]] = [[]] * run.mesh.world_size
    dist.all_gather_object(everyone, own)
    band = BANDS[precision(run.config, run.mesh.device)[1]]
    errors = []
    for at, first in enumerate(everyone[0]):
        usual = math.sqrt(sum(part[at].norm ** 2 for part in everyone) / len(everyone))
        for rank, part in enumerate(everyone):
            scale = max(part[at].norm, LEAST_SHARE * usual)
            difference = part[at].difference
            errors.append((difference / scale if scale else math.inf if difference else 0.0, first.layer, first.tensor, rank))
    c, ring = run.config, run.mesh.ring
    path = f"kernel {run.kernel}, layout {c.parallel.layout}, exchange {c.parallel.exchange}, ring of {ring.processes} x {ring.virtual}"
    bad = [e for e in errors if not e[0] <= band]
    if bad:
        bad.sort(key=lambda e: (-math.inf if math.isnan(e[0]) else -e[0], *e[1:]))
        lines = [f"\n  - layer {layer}, {tensor}, rank {rank}: relative error {error:.1e}" for error, layer, tensor, rank in bad[:8]]
        more = f"\n  ... and {len(bad) - 8} more" if len(bad) > 8 else ""
        head = f"debug.check: attention is wrong, {len(bad)} of {len(errors)} tensors are off by more than {band:.0e} ({path}):"
        advice = "\n  See whether another kernel=, parallel.exchange= or parallel.layout= is right; scripts/check_ring.py looks closer."
        raise CheckFailed(f"{head}{''.join(lines)}{more}{advice}")
    error, layer, tensor, rank = max(errors)
    seen = f"{min(c.debug.check_heads, run.model_config.kv_heads)} KV heads, {c.debug.check_rows} rows a rank"
    return (f"check: attention of {run.model_config.layers} layers agrees with fp64 ({seen}): largest relative error {error:.1e} in layer "
            f"{layer}, {tensor}, rank {rank}; allowed {band:.0e} ({path})")  # fmt: skip


def _probe(
    run: Run, layout: Layout, layer: int, attend: Attend, bounds: tuple[Any, Any], rows: int, heads: int, found: list[Measure],
) -> Attend:
    """The layer's attention, which in passing is compared; puts its measures into ``found``."""
    ring, softcap = run.mesh.ring, run.model_config.softcap

    def probed(q: Tensor, k: Tensor, v: Tensor, handle: int, sinks: Tensor | None) -> Tensor:
        positions = layout.positions(ring).to(q.device)  # [L]
        sampled = _sample(rows, positions, bounds, ring, run.config.seed + 1000 * layer)
        shared = torch.Generator().manual_seed(run.config.seed + layer)  # the same heads on all ranks
        kv_heads = sorted(torch.randperm(k.shape[2], generator=shared)[:heads].tolist())
        with torch.enable_grad():
            leaves = [x.detach().requires_grad_() for x in (q, k, v, *(() if sinks is None else (sinks,)))]
            out = attend(leaves[0], leaves[1], leaves[2], handle, leaves[3] if sinks is not None else None)
            own = torch.Generator().manual_seed(run.config.seed + 7919 * (dist.get_rank() + 1) + layer)
            dout = torch.zeros_like(out)
            dout[:, sampled.own] = torch.randn(dout[:, sampled.own].shape, generator=own).to(dout)
            grads = torch.autograd.grad(out, leaves, dout)
        got = {"out": out.detach()[:, sampled.own], "dq": grads[0][:, sampled.own], "dk": grads[1], "dv": grads[2]}
        elsewhere = grads[0].clone()
        elsewhere[:, sampled.own] = 0
        measures: dict[str, list[float]] = {}
        for head in kv_heads:
            group = slice(head * (q.shape[2] // k.shape[2]), (head + 1) * (q.shape[2] // k.shape[2]))
            gold = oracle(
                q[:, sampled.own, group], k[:, :, head], v[:, :, head], dout[:, sampled.own, group], positions, sampled, ring,
                softcap=softcap, sinks=None if sinks is None else sinks[group],
            )
            parts = {n: got[n][:, :, group] if n in ("out", "dq") else got[n][:, :, head] for n in got}
            if sinks is not None:
                parts["dsinks"] = grads[3][group]
            for name, x in parts.items():
                _add(measures, name, x, gold[name])
            _add(measures, "dq of rows without a gradient", elsewhere[:, :, group], torch.zeros_like(elsewhere[:, :, group]))
            measures["dq of rows without a gradient"][1] += float(gold["dq"].square().sum())  # judged by the size of the others
        found.extend(Measure(layer, name, math.sqrt(d), math.sqrt(n)) for name, (d, n) in measures.items())
        return out.detach()

    return probed


def _add(measures: dict[str, list[float]], name: str, x: Tensor, gold: Tensor) -> None:
    sums = measures.setdefault(name, [0.0, 0.0])
    sums[0] += float((x.double() - gold).square().sum())
    sums[1] += float(gold.double().square().sum())


def _sample(rows: int, positions: Tensor, bounds: tuple[Any, Any], ring: Ring, seed: int) -> Rows:
    """``rows`` rows of each rank, with the bounds of all of them."""
    generator = torch.Generator().manual_seed(seed + 104_729 * (ring.rank + 1))
    length = len(positions)
    own = torch.randperm(length, generator=generator)[: min(rows, length)].sort().values.to(positions.device)
    at = _gather(positions[own].contiguous(), ring).flatten().cpu()  # [R]
    lo, hi = (torch.from_numpy(x.copy())[:, at].to(positions.device) for x in bounds)
    return Rows(own, lo, hi)


def oracle(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, positions: Tensor, rows: Rows, ring: Ring, *, softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> dict[str, Tensor]:
    """Attention of the sampled rows of all ranks in fp64, for the query heads of one KV head. Every rank of the ring calls this.

    ``q``, ``dout`` [B, r, G, D] of this rank's sampled rows; ``k``, ``v`` [B, L, D] and ``positions`` [L] of the keys that it holds;
    ``sinks`` [G]. Returns this rank's out, dq [B, r, G, D], dk, dv [B, L, D] and, with sinks, dsinks [G].
    """
    count, scale = q.shape[1], q.shape[-1] ** -0.5
    mine = slice(ring.rank * count, (ring.rank + 1) * count)
    q, dout = (rearrange(_gather(x.double().contiguous(), ring), "p b r g d -> b g (p r) d") for x in (q, dout))
    visible = (rows.lo[..., None] <= positions) & (positions <= rows.hi[..., None])  # [B or 1, R, L]

    def scores(part: slice) -> tuple[Tensor, Tensor]:
        """Masked scores [B, G, R, C] of a chunk of keys, and the derivative of the soft limit there."""
        s = torch.einsum("bgrd,bcd->bgrc", q, k[:, part].double()) * scale
        slope = torch.ones_like(s)
        if softcap:
            limited = torch.tanh(s / softcap)
            s, slope = softcap * limited, 1 - limited**2
        return s.masked_fill(~visible[:, None, :, part], -math.inf), slope

    chunks = [slice(c, min(c + CHUNK, k.shape[1])) for c in range(0, k.shape[1], CHUNK)]
    # The softmax's state over this rank's keys, then over all ranks' (and the sink, which is one more key without a value).
    lse, acc = q.new_full(q.shape[:-1], -math.inf), torch.zeros_like(q)
    for part in chunks:
        s, _ = scores(part)
        lse, acc = _merge(lse, acc, torch.logsumexp(s, -1), torch.einsum("bgrc,bcd->bgrd", _softmax(s), v[:, part].double()))
    all_lse, all_acc = _gather(lse, ring), _gather(acc, ring)
    lse, acc = all_lse[0], all_acc[0]
    for other_lse, other_acc in zip(all_lse[1:], all_acc[1:], strict=True):
        lse, acc = _merge(lse, acc, other_lse, other_acc)
    if sinks is not None:
        sink = sinks.double()[None, :, None].expand_as(lse)
        lse, acc = _merge(lse, acc, sink, torch.zeros_like(acc))
    delta = (acc * dout).sum(-1)

    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k, dtype=torch.float64), torch.zeros_like(v, dtype=torch.float64)
    for part in chunks:
        s, slope = scores(part)
        p = torch.exp(s - torch.where(lse.isinf(), math.inf, lse)[..., None])  # a row that sees nothing: 0
        ds = p * (torch.einsum("bgrd,bcd->bgrc", dout, v[:, part].double()) - delta[..., None]) * slope * scale
        dq += torch.einsum("bgrc,bcd->bgrd", ds, k[:, part].double())
        dk[:, part] = torch.einsum("bgrc,bgrd->bcd", ds, q)
        dv[:, part] = torch.einsum("bgrc,bgrd->bcd", p, dout)
    dq = _gather(dq, ring).sum(0)
    out, dq = (rearrange(x[:, :, mine], "b g r d -> b r g d") for x in (acc, dq))
    gold = {"out": out, "dq": dq, "dk": dk, "dv": dv}
    if sinks is not None:
        gold["dsinks"] = -(torch.exp(sink - lse) * delta)[:, :, mine].sum((0, 2))
    return gold


def _softmax(s: Tensor) -> Tensor:
    """Softmax over the last dim; zeros where nothing is visible."""
    top = s.amax(-1, keepdim=True)
    p = torch.exp(s - torch.where(top.isinf(), 0.0, top))
    return p / p.sum(-1, keepdim=True).clamp_min(1e-300)


def _merge(lse: Tensor, acc: Tensor, other_lse: Tensor, other_acc: Tensor) -> tuple[Tensor, Tensor]:
    """Two normalised partial results of the same rows."""
    both = torch.logaddexp(lse, other_lse)
    safe = torch.where(both.isinf(), 0.0, both)
    return both, acc * torch.exp(lse - safe)[..., None] + other_acc * torch.exp(other_lse - safe)[..., None]


def _gather(x: Tensor, ring: Ring) -> Tensor:
    """[P, ...]: the tensor of every rank of the ring."""
    if ring.processes == 1:
        return x[None]
    parts = [torch.empty_like(x) for _ in range(ring.processes)]
    dist.all_gather(parts, x.contiguous(), group=ring.group)
    return torch.stack(parts)
