"""FlashAttention-2 in plain PyTorch: tiled online softmax with carry and index bounds, never [Sq, Sk].

The kernel of CPU runs, and the readable form of what the Triton kernels do (arXiv 2307.08691, algorithms 1 and 2).
It meets the kernel contract in ``contract``; arithmetic is fp32 (fp64 for fp64 inputs) whatever the input's dtype.

The query heads that share a KV head are folded into the rows of a tile, so that one matmul serves the group:
a tile is [B, Hkv, G * rows, D] against [B, Hkv, keys, D]. Key tiles start at the first visible key of their query tile, so
nothing outside the visible hull is ever read.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from einops import rearrange, repeat
from torch import Tensor

from ringattn.kernels.contract import LOG2_E, Bounds, Part, State, accumulate_dtype

QUERY_TILE = 256  # rows of a tile, the group's heads counted
KEY_TILE = 256
FOLD = "b s (h g) d -> b h (g s) d"  # G query heads of one KV head become rows


@dataclass
class _Rows:
    delta: Tensor  # [B, H, Sq]
    lse2: Tensor  # [B, H, Sq], base 2, +inf for dead rows


@dataclass(frozen=True)
class _Tile:
    """Query rows [r0, r1) of batch rows ``batch`` and one run of keys [k0, k1) they may see; ``mask`` None where all do."""

    batch: slice
    r0: int
    r1: int
    k0: int
    k1: int
    mask: Tensor | None  # bool [r1 - r0, k1 - k0], True is hidden


class TorchKernel:
    """Tiled attention on any device PyTorch has."""

    name = "torch"

    def refusal(self, q: Tensor, k: Tensor, *, softcap: float | None, sinks: Tensor | None) -> str | None:
        return None

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, bounds: Bounds, state: State | None, *, scale: float, softcap: float | None = None,
        first: bool, out: Tensor | None = None, lse: Tensor | None = None, sinks: Tensor | None = None,
    ) -> None:
        kv_heads, group = k.shape[2], q.shape[2] // k.shape[2]
        factor = scale * LOG2_E if softcap is None else scale
        k, v = (_head_major(x, q.dtype) for x in (k, v))
        for (batch, r0, r1), keys in _walk(bounds, group, k.shape[2]):
            qt = rearrange(q[batch, r0:r1], FOLD, h=kv_heads).to(k.dtype) * factor
            if first:
                acc, m, l = _start(qt, sinks, r1 - r0)
            else:
                assert state is not None
                acc = rearrange(state.acc[batch, r0:r1], FOLD, h=kv_heads)
                m, l = (rearrange(x[batch, :, r0:r1], "b (h g) s -> b h (g s) 1", h=kv_heads) for x in (state.m, state.l))
            for t in keys:
                s = qt @ k[batch, :, t.k0 : t.k1].mT
                if softcap is not None:
                    s.div_(softcap).tanh_().mul_(softcap * LOG2_E)
                if t.mask is not None:
                    _by_row(s, group).masked_fill_(t.mask, -math.inf)
                top = torch.maximum(m, s.amax(-1, keepdim=True))
                # rows that have seen nothing yet have top = -inf; any finite base gives them p = 0
                base = top.masked_fill(top == -math.inf, 0.0) if t.mask is not None else top
                p = s.sub_(base).exp2_()
                alpha = torch.exp2(m - base)
                l = l * alpha + p.sum(-1, keepdim=True)
                acc = (acc * alpha).add_(p @ v[batch, :, t.k0 : t.k1])
                m = top
            if out is not None and lse is not None:
                acc = acc / l.masked_fill(l == 0, 1.0)
                out[batch, r0:r1] = rearrange(acc, "b h (g s) d -> b s (h g) d", g=group)
                lse[batch, :, r0:r1] = rearrange(m / LOG2_E + l.log(), "b h (g s) 1 -> b (h g) s", g=group)
            else:
                assert state is not None
                state.acc[batch, r0:r1] = rearrange(acc, "b h (g s) d -> b s (h g) d", g=group)
                state.m[batch, :, r0:r1] = rearrange(m, "b h (g s) 1 -> b (h g) s", g=group)
                state.l[batch, :, r0:r1] = rearrange(l, "b h (g s) 1 -> b (h g) s", g=group)

    def prepare(self, out: Tensor, dout: Tensor, lse: Tensor, dlse: Tensor | None) -> _Rows:
        delta = rearrange((out.to(lse.dtype) * dout.to(lse.dtype)).sum(-1), "b s h -> b h s")
        if dlse is not None:
            delta = delta - dlse
        return _Rows(delta, (lse * LOG2_E).masked_fill(lse == -math.inf, math.inf))

    def backward(
        self, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, rows: _Rows, bounds: Bounds, *, scale: float,
        softcap: float | None = None, dq: Tensor, dk: Tensor, dv: Tensor, add_dq: bool, part: Part = "all",
    ) -> None:
        kv_heads, group = k.shape[2], q.shape[2] // k.shape[2]
        want_q, want_kv = part in ("all", "q"), part in ("all", "kv")
        factor = scale * LOG2_E if softcap is None else scale
        k, v = (_head_major(x, q.dtype) for x in (k, v))
        dk_sum, dv_sum = (torch.zeros_like(k), torch.zeros_like(v)) if want_kv else (k, v)
        for (batch, r0, r1), keys in _walk(bounds, group, k.shape[2]):
            qt, dot = (rearrange(x[batch, r0:r1], FOLD, h=kv_heads).to(k.dtype) for x in (q, dout))
            q_scaled = qt * factor
            lse2, delta = (rearrange(x[batch, :, r0:r1], "b (h g) s -> b h (g s) 1", h=kv_heads) for x in (rows.lse2, rows.delta))
            dqt = torch.zeros_like(qt)
            for t in keys:
                kt, vt = k[batch, :, t.k0 : t.k1], v[batch, :, t.k0 : t.k1]
                p = q_scaled @ kt.mT
                slope = None
                if softcap is not None:
                    p.div_(softcap).tanh_()
                    slope = 1 - p * p
                    p.mul_(softcap * LOG2_E)
                p.sub_(lse2).exp2_()
                if t.mask is not None:
                    _by_row(p, group).masked_fill_(t.mask, 0.0)
                if want_kv:
                    dv_sum[batch, :, t.k0 : t.k1].add_(p.mT @ dot)
                ds = p.mul_((dot @ vt.mT).sub_(delta))
                if slope is not None:
                    ds.mul_(slope)
                if want_kv:
                    dk_sum[batch, :, t.k0 : t.k1].add_(ds.mT @ qt)
                if want_q:
                    dqt.add_(ds @ kt)
            if want_q:
                dqt = rearrange(dqt.mul_(scale), "b h (g s) d -> b s (h g) d", g=group)
                dq[batch, r0:r1] = dq[batch, r0:r1] + dqt if add_dq else dqt
        if want_kv:
            dk.copy_(rearrange(dk_sum.mul_(scale), "b h s d -> b s h d"))
            dv.copy_(rearrange(dv_sum, "b h s d -> b s h d"))


def _head_major(x: Tensor, dtype: torch.dtype) -> Tensor:
    """[B, S, Hkv, D] -> contiguous [B, Hkv, S, D] in the accumulate dtype (a fresh, aligned buffer: same bits for any strides)."""
    target = accumulate_dtype(dtype)
    return rearrange(x, "b s h d -> b h s d").to(target, memory_format=torch.contiguous_format, copy=True).contiguous()


def _by_row(scores: Tensor, group: int) -> Tensor:
    """[B, Hkv, G * rows, keys] -> view [B, Hkv, G, rows, keys], so that a [rows, keys] mask broadcasts."""
    return scores.unflatten(2, (group, scores.shape[2] // group))


def _start(qt: Tensor, sinks: Tensor | None, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """The empty state for a folded query tile [B, Hkv, G * rows, D]; a sink is one key with value 0 seen by every row."""
    acc = torch.zeros_like(qt)
    m = qt.new_full((*qt.shape[:3], 1), -math.inf)
    if sinks is None:
        return acc, m, torch.zeros_like(m)
    by_head = rearrange(sinks.to(qt.dtype) * LOG2_E, "(h g) -> h g", h=qt.shape[1])
    m.copy_(repeat(by_head, "h g -> h (g s) 1", s=rows))
    return acc, m, torch.ones_like(m)


def _walk(bounds: Bounds, group: int, keys: int) -> Iterator[tuple[tuple[slice, int, int], list[_Tile]]]:
    """Query tiles, each with its list of key tiles. Keys outside the hull of what the tile's *live* rows see are not visited: a row
    that sees nothing has bounds too, and they may point to keys that never came. Keys inside [lo[last], hi[first]) need no mask."""
    batches, length = bounds.lo.shape
    step = max(1, QUERY_TILE // group)
    for b in range(batches):
        batch = slice(None) if batches == 1 else slice(b, b + 1)
        starts = list(range(0, length, step))
        ends = [min(r + step, length) for r in starts]
        first, last = torch.tensor(starts, device=bounds.lo.device), torch.tensor(ends, device=bounds.lo.device) - 1
        live, padding = bounds.lo[b] < bounds.hi[b], (0, -length % step)
        lowest = F.pad(torch.where(live, bounds.lo[b], keys), padding, value=keys).view(-1, step).amin(1)
        highest = F.pad(torch.where(live, bounds.hi[b], 0), padding).view(-1, step).amax(1)
        edges = torch.stack([lowest, bounds.lo[b, last], bounds.hi[b, first], highest]).tolist()
        for r0, r1, lo0, lo1, hi0, hi1 in zip(starts, ends, *edges, strict=True):
            tiles = []
            for k0 in range(lo0, hi1, KEY_TILE):
                k1 = min(k0 + KEY_TILE, hi1)
                mask = None
                if k0 < lo1 or k1 > hi0:
                    key = torch.arange(k0, k1, device=bounds.lo.device)
                    lo, hi = bounds.lo[b, r0:r1, None], bounds.hi[b, r0:r1, None]
                    mask = (key < lo) | (key >= hi)
                tiles.append(_Tile(batch, r0, r1, k0, k1, mask))
            yield (batch, r0, r1), tiles
