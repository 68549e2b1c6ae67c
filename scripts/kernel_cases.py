"""Problems for bench_kernel.py and tune_kernel.py: masks, inputs, exact references, and kernels behind one small interface.

Shapes as in ringattn/kernels/contract.py: q [B, Sq, H, D], k and v [B, Sk, Hkv, D].
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ringattn.kernels.contract import Bounds, Kernel, State, accumulate_dtype
from ringattn.kernels.intervals import mask_intervals
from ringattn.kernels.select import load_kernel

DEVICE = "cuda"


@dataclass(frozen=True)
class Problem:
    """One call of attention. ``mask``: causal, full, window (the last ``window`` keys) or documents (packed, ragged, causal)."""

    batch: int
    seq: int
    heads: int
    key_heads: int
    dim: int
    mask: str = "causal"
    dtype: torch.dtype = torch.bfloat16
    window: int = 4096
    keys: int = 0  # 0: as many as queries
    per_row: bool = False  # other documents in each row of the batch

    @property
    def sk(self) -> int:
        return self.keys or self.seq

    @property
    def label(self) -> str:
        group = f" GQA {self.heads // self.key_heads}:1" if self.heads != self.key_heads else ""
        other = f" x {self.sk}" if self.sk != self.seq else ""
        mask = f"window {self.window}" if self.mask == "window" else self.mask
        return f"hd{self.dim} {mask}{group} {self.batch} x {self.seq}{other}"

    def intervals(self) -> tuple[np.ndarray, np.ndarray]:
        """Half-open visible keys (lo, hi), int64 [Bb, Sq]."""
        if self.mask == "documents":
            lengths = ragged_lengths(self.seq, max(1, self.seq // 8))
            ids = np.repeat(np.arange(len(lengths)), lengths)
            rows = [np.roll(lengths, r) for r in range(self.batch)]
            documents = np.stack([np.repeat(np.arange(len(x)), x) for x in rows]) if self.per_row else ids
            lo, hi = mask_intervals(self.seq, documents=documents)
        else:
            window = self.window if self.mask == "window" else None
            lo, hi = mask_intervals(self.seq, self.sk, causal=self.mask != "full", window=window)
        return lo, np.maximum(hi + 1, lo)

    def bounds(self) -> Bounds:
        return Bounds.from_rows(*self.intervals(), self.sk, DEVICE)

    def pairs(self) -> int:
        """Visible pairs per head, over the whole batch."""
        lo, hi = self.intervals()
        return int((hi - lo).sum()) * self.batch // lo.shape[0]

    def inputs(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Fresh random q, k, v, dout."""
        shape = (self.batch, self.seq, self.heads, self.dim)
        key_shape = (self.batch, self.sk, self.key_heads, self.dim)
        return tuple(torch.randn(s, device=DEVICE, dtype=self.dtype) for s in (shape, key_shape, key_shape, shape))  # type: ignore[return-value]


def ragged_lengths(total: int, mean: int) -> np.ndarray:
    """A fixed list of document lengths of about this mean, the same on every machine; they sum to ``total``."""
    share = np.array([0.31, 1.72, 0.09, 2.45, 0.66, 1.13, 0.02, 1.38, 0.84, 1.40])
    lengths: list[int] = []
    while sum(lengths) < total:
        lengths.append(max(1, int(share[len(lengths) % len(share)] * mean)))
    lengths[-1] -= sum(lengths) - total
    return np.array([n for n in lengths if n])


def reference(p: Problem, q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> tuple[Tensor, ...]:
    """out, dq, dk, dv in fp64, one batch row and key head at a time."""
    lo, hi = (torch.from_numpy(np.ascontiguousarray(x)).to(DEVICE) for x in p.intervals())
    out, dq = (torch.empty(q.shape, dtype=torch.float64, device=DEVICE) for _ in range(2))
    dk, dv = (torch.empty(k.shape, dtype=torch.float64, device=DEVICE) for _ in range(2))
    group = p.heads // p.key_heads
    j = torch.arange(p.sk, device=DEVICE)
    for b in range(p.batch):
        row = min(b, lo.shape[0] - 1)
        hidden = ~((j >= lo[row, :, None]) & (j < hi[row, :, None]))
        dead = hidden.all(-1, keepdim=True)
        for h in range(p.key_heads):
            heads = slice(h * group, (h + 1) * group)
            ql, kl, vl, dl = (x.double() for x in (q[b, :, heads], k[b, :, h], v[b, :, h], dout[b, :, heads]))
            scale = p.dim**-0.5
            s = (torch.einsum("igd,jd->gij", ql, kl) * scale).masked_fill(hidden, -math.inf)
            a = torch.softmax(s.masked_fill(dead, 0.0), -1).masked_fill(hidden, 0.0)
            o = torch.einsum("gij,jd->igd", a, vl)
            da = torch.einsum("igd,jd->gij", dl, vl)
            ds = a * (da - (dl * o).sum(-1).T[..., None]) * scale
            out[b, :, heads], dq[b, :, heads] = o, torch.einsum("gij,jd->igd", ds, kl)
            dk[b, :, h], dv[b, :, h] = torch.einsum("gij,igd->jd", ds, ql), torch.einsum("gij,igd->jd", a, dl)
    return out, dq, dk, dv


def relative(x: Tensor, gold: Tensor) -> float:
    return ((x.double() - gold.double()).norm() / gold.double().norm().clamp_min(1e-300)).item()


class Ours:
    """A kernel of this package on one problem, its buffers allocated once. ``hops`` > 1: the keys in equal shards, state carried."""

    def __init__(self, kernel: Kernel, p: Problem, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, hops: int = 1) -> None:
        refusal = kernel.refusal(q, k, softcap=None, sinks=None)
        if refusal is not None:
            raise ValueError(refusal)
        self.kernel, self.p, self.q, self.k, self.v, self.dout, self.hops = kernel, p, q, k, v, dout, hops
        self.scale = p.dim**-0.5
        self.out = torch.full_like(q, math.nan)
        self.lse = torch.full((p.batch, p.heads, p.seq), math.nan, device=DEVICE)
        self.state = State.empty(q) if hops > 1 else None
        grads = q.dtype if hops == 1 else accumulate_dtype(q.dtype)
        self.dq, self.dk, self.dv = (torch.full_like(x, math.nan, dtype=grads) for x in (q, k, v))
        size = p.sk // hops
        self.cuts = [slice(i * size, (i + 1) * size if i < hops - 1 else p.sk) for i in range(hops)]
        lo, hi = p.intervals()
        self.bounds = []
        for cut in self.cuts:
            n = cut.stop - cut.start
            self.bounds.append(Bounds.from_rows(np.clip(lo - cut.start, 0, n), np.clip(hi - cut.start, 0, n), n, DEVICE))

    def forward(self) -> Tensor:
        for i, (cut, bounds) in enumerate(zip(self.cuts, self.bounds, strict=True)):
            last = i == self.hops - 1
            self.kernel.forward(self.q, self.k[:, cut], self.v[:, cut], bounds, self.state, scale=self.scale, first=i == 0,
                                out=self.out if last else None, lse=self.lse if last else None)  # fmt: skip
        return self.out

    def backward(self) -> tuple[Tensor, Tensor, Tensor]:
        rows = self.kernel.prepare(self.out, self.dout, self.lse, None)
        for i, (cut, bounds) in enumerate(zip(self.cuts, self.bounds, strict=True)):
            self.kernel.backward(self.q, self.k[:, cut], self.v[:, cut], self.dout, rows, bounds, scale=self.scale, dq=self.dq,
                                 dk=self.dk[:, cut], dv=self.dv[:, cut], add_dq=i > 0)  # fmt: skip
        return self.dq, self.dk, self.dv


class CarriedHop(Ours):
    """A middle hop of a ring: state comes in and goes out, dq is added to fp32."""

    def __init__(self, kernel: Kernel, p: Problem, q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> None:
        super().__init__(kernel, p, q, k, v, dout)
        self.state = State.empty(q)
        self.dq, self.dk, self.dv = (torch.zeros_like(x, dtype=torch.float32) for x in (q, k, v))
        self.kernel.forward(q, k, v, self.bounds[0], self.state, scale=self.scale, first=True)
        self.kernel.forward(q, k, v, self.bounds[0], None, scale=self.scale, first=True, out=self.out, lse=self.lse)
        self.rows = self.kernel.prepare(self.out, dout, self.lse, None)

    def forward(self) -> Tensor:
        self.kernel.forward(self.q, self.k, self.v, self.bounds[0], self.state, scale=self.scale, first=False)
        return self.out

    def backward(self) -> tuple[Tensor, Tensor, Tensor]:
        self.kernel.backward(self.q, self.k, self.v, self.dout, self.rows, self.bounds[0], scale=self.scale, dq=self.dq, dk=self.dk,
                             dv=self.dv, add_dq=True)  # fmt: skip
        return self.dq, self.dk, self.dv


class Peer:
    """Another implementation, through autograd. ``call``: (q, k, v as leaves) -> out [B, S, H, D]."""

    def __init__(self, call: Callable[[Tensor, Tensor, Tensor], Tensor], q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> None:
        self.call, self.dout = call, dout
        self.leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
        self.out: Tensor | None = None

    def forward(self) -> Tensor:
        self.out = self.call(*self.leaves)
        return self.out

    def backward(self) -> tuple[Tensor, ...]:
        assert self.out is not None
        return torch.autograd.grad(self.out, self.leaves, self.dout, retain_graph=True)


def peer(name: str, p: Problem, q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> Peer:
    """fa2 | cudnn (torch SDPA), flex (FlexAttention, compiled) or fa4 (flash_attn.cute). Raises where it cannot do the problem."""
    if name in ("fa2", "cudnn"):
        from torch.nn.attention import SDPBackend, sdpa_kernel

        if p.mask != "full" and (p.mask != "causal" or p.sk != p.seq):
            raise ValueError("SDPA has no such mask")
        backend = SDPBackend.FLASH_ATTENTION if name == "fa2" else SDPBackend.CUDNN_ATTENTION

        def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            with sdpa_kernel(backend):
                return torch.nn.functional.scaled_dot_product_attention(
                    q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=p.mask == "causal", enable_gqa=p.heads != p.key_heads
                ).transpose(1, 2)

        return Peer(sdpa, q, k, v, dout)
    if name == "flex":
        return Peer(_flex(p), q, k, v, dout)
    if name == "fa4":
        from flash_attn.cute import flash_attn_func

        if p.mask == "documents":
            raise ValueError("the dense call has no documents")
        window = (p.window - 1, 0) if p.mask == "window" else (None, None)

        def fa4(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out = flash_attn_func(q, k, v, causal=p.mask == "causal", window_size=window)
            return out[0] if isinstance(out, tuple) else out

        return Peer(fa4, q, k, v, dout)
    raise ValueError(f"unknown candidate {name!r}")


def _flex(p: Problem) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    lo, hi = (torch.from_numpy(np.ascontiguousarray(x)).to(DEVICE) for x in p.intervals())
    per_row = lo.shape[0] > 1

    def visible(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        r = b if per_row else 0
        return (j >= lo[r, i]) & (j < hi[r, i])

    mask = None if p.mask == "full" else create_block_mask(visible, p.batch if per_row else None, None, p.seq, p.sk, device=DEVICE)
    torch._dynamo.reset()
    flex = torch.compile(flex_attention, dynamic=False)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        gqa = p.heads != p.key_heads
        return flex(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), block_mask=mask, enable_gqa=gqa).transpose(1, 2)

    return call


def candidate(name: str, p: Problem, q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> Any:
    """A kernel of this package by its name, or a peer."""
    if name in ("triton", "gluon", "torch"):
        return Ours(load_kernel(name), p, q, k, v, dout)
    return peer(name, p, q, k, v, dout)


def time_together(calls: dict[str, Callable[[], Any]], rounds: int, round_ms: float) -> dict[str, float]:
    """Median milliseconds of each call: all take turns, ``rounds`` times for about ``round_ms`` each: clocks drift for all alike.

    In another order each time: clocks follow the power drawn some milliseconds before, so whoever comes after a hungrier one loses.
    """
    order = random.Random(0)
    repeats = {}
    for name, call in calls.items():
        for _ in range(2):
            call()
        repeats[name] = max(2, min(200, round(round_ms / max(_milliseconds(call, 3), 1e-3))))
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name in order.sample(list(calls), len(calls)):
            samples[name].append(_milliseconds(calls[name], repeats[name]))
    return {name: statistics.median(x) for name, x in samples.items()}


def time_apart(calls: dict[str, Callable[[], Any]], rest_s: float = 0.5) -> dict[str, float]:
    """Median milliseconds of each call by itself, after a rest: triton's ``do_bench`` (25 ms of warm-up, 100 ms measured), as single
    kernels are timed elsewhere. Higher rates than :func:`time_together`'s, where the GPU stays at its power limit."""
    from triton.testing import do_bench

    times = {}
    for name, call in calls.items():
        torch.cuda.synchronize()
        time.sleep(rest_s)
        times[name] = float(do_bench(call, warmup=25, rep=100, return_mode="median"))
    return times


def _milliseconds(call: Callable[[], Any], repeats: int) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(repeats):
        call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / repeats


def grid(quick: bool) -> Iterable[Problem]:
    """The FlashAttention-2 paper's grid: 16,384 tokens, width 2,048, and the packed, windowed and long cases."""
    lengths = (2048, 16384) if quick else (512, 1024, 2048, 4096, 8192, 16384, 32768)
    for dim in (128, 64) if quick else (64, 128, 256):
        heads = 2048 // dim
        for mask in ("causal", "full"):
            for seq in lengths:
                yield Problem(max(1, 16384 // seq), seq, heads, heads, dim, mask)
    for dim in (128,) if quick else (64, 128, 256):
        heads = 2048 // dim
        base = Problem(1, 16384, heads, heads, dim)
        yield replace(base, mask="documents")
        if heads % 8 == 0:
            for seq in (16384,) if quick else lengths:
                yield replace(base, batch=max(1, 16384 // seq), seq=seq, key_heads=heads // 8)
        yield replace(base, seq=65536, mask="window", window=4096)
