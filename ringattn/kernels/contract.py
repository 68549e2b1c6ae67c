"""The kernel contract: what one hop of attention is, for every kernel.

A *hop* is one shard of queries against one shard of keys and values. A kernel knows no positions, layouts, documents or
windows: each query row sees the half-open interval ``lo <= j < hi`` of *local key indices*, and both bounds never decrease
along the rows. Its transpose (the query rows that see a key) is an interval with the same property.

Between hops the kernel carries the online softmax's own state (FlashAttention-2, arXiv 2307.08691, section 3.1) in the
accumulate dtype: ``acc`` (not normalised), ``m`` (running maximum in base 2, i.e. of ``scale * log2(e) * q.k``) and ``l``
(running sum of ``2^(s - m)``). Nothing is rounded to 16 bit before the last hop, so the error does not grow with the ring.

Shapes: B batch, Sq / Sk local query / key rows, H query heads, Hkv key-value heads (H a multiple of Hkv; query head h reads
key head ``h // (H // Hkv)``), D head dim, Bb = 1 or B.

    q, out, dout, dq   [B, Sq, H, D]      any strides, last dim contiguous
    k, v, dk, dv       [B, Sk, Hkv, D]    any strides, last dim contiguous
    lse, dlse          [B, H, Sq]         natural logarithm; -inf for a row that sees no key
    bounds             int32 [Bb, Sq] (lo, hi) and [Bb, Sk] (q_lo, q_hi)

A row that sees no key in any hop: out 0, lse -inf, zero gradients. Let the hull be the range from the first to the
last key that any row of a batch entry sees, rounded out to blocks of KEY_BLOCK rows: key rows outside it may hold anything, NaN
included (the ring trims its messages to it), and a kernel must not read them into a result. Key rows inside it are finite.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor

LOG2_E = math.log2(math.e)
KEY_BLOCK = 128  # key tiles start at multiples of their size and no key tile is larger than this, on kernels that tile by a fixed grid

Part = Literal["all", "kv", "q"]


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of carried state, lse and travelling gradients: fp64 for fp64 inputs, fp32 for everything else."""
    return torch.float64 if dtype == torch.float64 else torch.float32


@dataclass(frozen=True)
class Bounds:
    """Which keys each query row of a hop sees, and the transpose.

    ``lo``, ``hi``: int32 [Bb, Sq], ``0 <= lo <= hi <= Sk``, both never decreasing along Sq; row i sees keys lo[i] <= j < hi[i].
    ``q_lo``, ``q_hi``: int32 [Bb, Sk]; key j is seen by rows q_lo[j] <= i < q_hi[j] (where q_lo > q_hi never occurs).
    ``pairs``: visible (query, key) pairs, summed over the Bb rows. ``full``: every row sees every key.
    ``derived``: what kernels have worked out from these bounds and want to find again, by their own keys.
    """

    lo: Tensor
    hi: Tensor
    q_lo: Tensor
    q_hi: Tensor
    pairs: int
    full: bool
    derived: dict[Any, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    @staticmethod
    def from_rows(lo: np.ndarray, hi: np.ndarray, keys: int, device: torch.device | str = "cpu") -> Bounds:
        """Bounds from the per-row intervals ``lo``, ``hi`` (integers [Bb, Sq], monotone); the transpose is derived."""
        bb, rows = lo.shape
        sizes = [bb * rows, bb * rows, bb * keys, bb * keys]
        flat = torch.empty(sum(sizes), dtype=torch.int32, pin_memory=torch.device(device).type == "cuda")
        host = [x.view(bb, -1).numpy() for x in flat.split(sizes)]
        host[0][:] = lo
        np.maximum(lo, hi, out=host[1], casting="unsafe")
        pairs = int(host[1].sum(dtype=np.int64) - host[0].sum(dtype=np.int64))
        for b in range(bb):
            # the first query row that sees a key is the number of rows that stop at or before it, and so on
            for ends, counts in ((host[1][b], host[2][b]), (host[0][b], host[3][b])):
                np.cumsum(np.bincount(ends, minlength=keys + 1)[:keys], out=counts, dtype=np.int32)
        lo_t, hi_t, q_lo, q_hi = (x.view(bb, -1) for x in flat.to(device, non_blocking=True).split(sizes))
        return Bounds(lo_t, hi_t, q_lo, q_hi, pairs, pairs == bb * rows * keys)

    def to(self, device: torch.device | str) -> Bounds:
        """The same bounds on another device."""
        lo, hi, q_lo, q_hi = (t.to(device, non_blocking=True) for t in (self.lo, self.hi, self.q_lo, self.q_hi))
        return Bounds(lo, hi, q_lo, q_hi, self.pairs, self.full)


@dataclass
class State:
    """The online softmax's state between hops, in the accumulate dtype (see the module docstring).

    ``acc`` [B, Sq, H, D], ``m`` [B, H, Sq] (base 2), ``l`` [B, H, Sq].
    """

    acc: Tensor
    m: Tensor
    l: Tensor

    @staticmethod
    def empty(q: Tensor) -> State:
        """Uninitialised state for queries ``q``; the first hop of a pass writes it without reading it."""
        b, s, h, d = q.shape
        dtype = accumulate_dtype(q.dtype)
        acc = torch.empty(b, s, h, d, dtype=dtype, device=q.device)
        m, l = torch.empty(2, b, h, s, dtype=dtype, device=q.device).unbind(0)
        return State(acc, m, l)


class Kernel(Protocol):
    """One implementation of a hop, forward and backward. Methods enqueue work and never synchronise with the host.

    A kernel whose ``backward`` does everything at once, so that part "kv" leaves nothing for part "q", says so by an attribute
    ``fused_backward = True``: the ring then keeps other work back.
    """

    name: str

    def refusal(self, q: Tensor, k: Tensor, *, softcap: float | None, sinks: Tensor | None) -> str | None:
        """Why this kernel cannot take these inputs (dtype, device, head dim, feature), or None if it can."""
        ...

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, bounds: Bounds, state: State | None, *, scale: float,
        softcap: float | None = None, first: bool, out: Tensor | None = None, lse: Tensor | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        """Continue the online softmax over one hop.

        ``first``: start from the empty state (acc 0, m -inf, l 0; with ``sinks`` [H]: m = sink * log2(e), l = 1) instead of reading
        ``state``. ``out`` and ``lse`` given: this is the last hop; normalise and write them, and leave ``state`` unspecified.
        Otherwise update ``state`` in place. ``state`` may be None when the hop is both first and last.
        ``softcap`` c: scores become ``c * tanh(scale * q.k / c)``.
        """
        ...

    def prepare(self, out: Tensor, dout: Tensor, lse: Tensor, dlse: Tensor | None) -> Any:
        """Per-row terms of the backward pass, once a pass: delta = rowsum(dout * out) - dlse, and lse * log2(e) with -inf
        turned into +inf (so that dead rows give p = 0 without a special case). The returned object is private to the kernel,
        but for its attribute ``delta`` (fp32 / fp64 [B, H, Sq], a view is fine).
        """
        ...

    def backward(
        self, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, rows: Any, bounds: Bounds, *, scale: float,
        softcap: float | None = None, dq: Tensor, dk: Tensor, dv: Tensor, add_dq: bool, part: Part = "all",
    ) -> None:
        """The gradients of one hop. ``rows`` comes from :meth:`prepare` on this shard of queries.

        dq is added to ``dq`` (``add_dq``) or written; dk, dv are this hop's own contribution and always written, every key row
        (zeros where no row sees the key). Buffers hold the accumulate dtype; a buffer that is written, not added to, may
        instead have the input's dtype. ``part``: "all" computes everything; "kv" only dk, dv; "q" only dq
        (the ring's last hop asks for "kv", sends it on its way home, then asks for "q").
        """
        ...


def sink_gradient(sinks: Tensor, lse: Tensor, delta: Tensor) -> Tensor:
    """Gradient of the attention sinks [H] from lse and delta [B, H, Sq]: ``-sum(exp(sink - lse) * delta)`` over B and rows."""
    weight = torch.exp(sinks.to(lse.dtype)[None, :, None] - lse)
    return -(weight * delta).sum((0, 2)).to(sinks.dtype)
