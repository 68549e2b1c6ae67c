"""The oracle: dense attention in fp64, written for clarity and trusted for being short.

``dense_attention`` works from a boolean mask over global positions and knows nothing of hops or index bounds, so it can judge
them. ``ReferenceKernel`` meets the kernel contract (see ``contract``) with dense fp64 arithmetic a hop: the same ring, schedule
and bounds with a kernel that has no tiles. Both materialise [Sq, Sk] scores.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from einops import rearrange, repeat
from torch import Tensor

from ringattn.kernels.contract import LOG2_E, Bounds, Part, State


def dense_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, *, scale: float | None = None, softcap: float | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Dense attention, differentiable, in the dtype of its inputs (give fp64 for an oracle).

    q [B, Sq, H, D]; k, v [B, Sk, Hkv, D]; mask bool [Bb, Sq, Sk] (True is visible); sinks [H].
    Returns out [B, Sq, H, D] and lse [B, H, Sq] (natural logarithm). A row that sees nothing: out 0, lse -inf, zero gradients.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    group = q.shape[2] // k.shape[2]
    k, v = (repeat(x, "b s h d -> b s (h g) d", g=group) for x in (k, v))
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    # a finite stand-in for -inf keeps NaN out of the gradients of rows that see nothing
    scores = torch.where(mask[:, None], scores, torch.finfo(scores.dtype).min / 4)
    if sinks is not None:
        column = rearrange(sinks.to(scores.dtype), "h -> 1 h 1 1").expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, column], -1)
        mask = torch.cat([mask, mask.new_ones(*mask.shape[:2], 1)], -1)
    lse = torch.logsumexp(scores, -1)
    weights = torch.exp(scores - lse[..., None]) * mask[:, None]
    out = torch.einsum("bhij,bjhd->bihd", weights[..., : k.shape[1]], v)
    return out, torch.where(mask.any(-1)[:, None], lse, -math.inf)


@dataclass
class _Rows:
    delta: Tensor  # [B, H, Sq]
    lse: Tensor  # [B, H, Sq], +inf for dead rows


class ReferenceKernel:
    """Dense fp64 hops on any device. Slow and exact; for tests and for judging the other kernels."""

    name = "reference"

    def refusal(self, q: Tensor, k: Tensor, *, softcap: float | None, sinks: Tensor | None) -> str | None:
        return None

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, bounds: Bounds, state: State | None, *, scale: float, softcap: float | None = None,
        first: bool, out: Tensor | None = None, lse: Tensor | None = None, sinks: Tensor | None = None,
    ) -> None:
        scores, _, mask = _scores(q, k, bounds, scale, softcap)
        scores = scores.masked_fill(~mask, -math.inf) * LOG2_E
        if first:
            m = scores.new_full(scores.shape[:3], -math.inf)
            l = torch.zeros_like(m)
            if sinks is not None:
                m, l = m.copy_(rearrange(sinks.double() * LOG2_E, "h -> 1 h 1")), l + 1
            acc = q.new_zeros(q.shape, dtype=torch.float64)
        else:
            assert state is not None
            acc, m, l = state.acc.double(), state.m.double(), state.l.double()
        top = torch.maximum(m, scores.amax(-1)) if k.shape[1] else m
        base = top.masked_fill(top == -math.inf, 0.0)
        p = torch.exp2(scores - base[..., None])
        alpha = torch.exp2(m - base)
        l = l * alpha + p.sum(-1)
        acc = acc * rearrange(alpha, "b h s -> b s h 1") + torch.einsum("bhij,bjhd->bihd", p, _expand(_clean(v, bounds), q))
        if out is not None and lse is not None:
            out.copy_(acc / rearrange(l.masked_fill(l == 0, 1.0), "b h s -> b s h 1"))
            lse.copy_(top / LOG2_E + torch.log(l))
        else:
            assert state is not None
            state.acc.copy_(acc)
            state.m.copy_(top)
            state.l.copy_(l)

    def prepare(self, out: Tensor, dout: Tensor, lse: Tensor, dlse: Tensor | None) -> _Rows:
        delta = rearrange((out.double() * dout.double()).sum(-1), "b s h -> b h s")
        if dlse is not None:
            delta = delta - dlse.double()
        return _Rows(delta, lse.double().masked_fill(lse == -math.inf, math.inf))

    def backward(
        self, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, rows: _Rows, bounds: Bounds, *, scale: float,
        softcap: float | None = None, dq: Tensor, dk: Tensor, dv: Tensor, add_dq: bool, part: Part = "all",
    ) -> None:
        scores, slope, mask = _scores(q, k, bounds, scale, softcap)
        p = torch.exp(scores - rows.lse[..., None]) * mask
        do = dout.double()
        dp = torch.einsum("bihd,bjhd->bhij", do, _expand(_clean(v, bounds), q))
        ds = p * (dp - rows.delta[..., None]) * slope * scale
        if part in ("all", "q"):
            grad = torch.einsum("bhij,bjhd->bihd", ds, _expand(_clean(k, bounds), q))
            dq.add_(grad) if add_dq else dq.copy_(grad)
        if part in ("all", "kv"):
            kv_heads = k.shape[2]
            fold = "b j (h g) d -> b j h g d"
            dk.copy_(rearrange(torch.einsum("bhij,bihd->bjhd", ds, q.double()), fold, h=kv_heads).sum(3))
            dv.copy_(rearrange(torch.einsum("bhij,bihd->bjhd", p, do), fold, h=kv_heads).sum(3))


def _expand(kv: Tensor, q: Tensor) -> Tensor:
    """KV heads repeated to the query's heads, fp64: [B, Sk, Hkv, D] -> [B, Sk, H, D]."""
    return repeat(kv.double(), "b s h d -> b s (h g) d", g=q.shape[2] // kv.shape[2])


def _clean(kv: Tensor, bounds: Bounds) -> Tensor:
    """``kv`` with key rows that nobody sees set to 0, since they may hold anything and 0 * NaN is NaN."""
    dead = (bounds.q_lo >= bounds.q_hi)[:, :, None, None]
    return kv.masked_fill(dead, 0.0)


def _scores(q: Tensor, k: Tensor, bounds: Bounds, scale: float, softcap: float | None) -> tuple[Tensor, Tensor, Tensor]:
    """Scores [B, H, Sq, Sk] in fp64 (not masked), their slope under softcap, and the visibility [Bb, 1, Sq, Sk]."""
    scores = torch.einsum("bihd,bjhd->bhij", q.double(), _expand(_clean(k, bounds), q)) * scale
    slope = torch.ones((), dtype=torch.float64, device=q.device)
    if softcap is not None:
        t = torch.tanh(scores / softcap)
        scores, slope = softcap * t, 1 - t * t
    key = torch.arange(k.shape[1], device=q.device)
    mask = (key >= bounds.lo[..., None]) & (key < bounds.hi[..., None])
    return scores, slope, mask[:, None]
