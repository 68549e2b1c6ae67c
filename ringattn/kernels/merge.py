"""Merging finished partial results, for users who assemble attention themselves (the ring carries unfinished state instead)."""

from __future__ import annotations

import math

import torch
from einops import rearrange
from torch import Tensor


def merge(out: Tensor, lse: Tensor, out2: Tensor, lse2: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over the union of two disjoint sets of keys from the results over each (FlashAttention-2, section 2.3).

    out, out2: [B, S, H, D]; lse, lse2: [B, H, S], natural logarithm, -inf where a row saw no key. Differentiable.
    Returns (out, lse) in the dtypes of the first pair; computed in the dtype of lse. Merging with an empty partial returns the
    other one bit for bit; two empty ones give (0, -inf).

    Raises ValueError for shapes that do not match (nothing is broadcast).
    """
    b, s, h, _ = out.shape
    if out2.shape != out.shape or lse.shape != (b, h, s) or lse2.shape != lse.shape:
        shapes = ", ".join(str(tuple(x.shape)) for x in (out, lse, out2, lse2))
        raise ValueError(f"merge takes out [B, S, H, D], lse [B, H, S] twice with equal shapes, got {shapes}")
    gone, gone2 = lse == -math.inf, lse2 == -math.inf
    # finite stand-ins keep -inf - -inf out of the arithmetic and of its gradient; the final where undoes them
    a = torch.where(gone, torch.where(gone2, 0.0, lse2.detach()), lse)
    c = torch.where(gone2, a.detach(), lse2)
    top = torch.maximum(a, c).detach()
    wa, wc = torch.exp(a - top), torch.exp(c - top)
    total = wa + wc
    share = rearrange(wc / total, "b h s -> b s h 1")
    mixed = (out * (1 - share) + out2 * share).to(out.dtype)
    rows, rows2 = (rearrange(x, "b h s -> b s h 1") for x in (gone, gone2))
    merged = torch.where(rows2, out, torch.where(rows, out2.to(out.dtype), mixed))
    return merged, torch.where(gone2, lse, torch.where(gone, lse2.to(lse.dtype), top + torch.log(total)))
