"""Checks of attention's arguments, shared by the local and the ring functions: one clear ValueError each."""

from __future__ import annotations

import torch
from torch import Tensor

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def check_inputs(q: Tensor, k: Tensor, v: Tensor, *, scale: float | None, softcap: float | None, sinks: Tensor | None) -> float:
    """Check q [B, Sq, H, D], k and v [B, Sk, Hkv, D] and the scalars; return the scale (default D ** -0.5).

    Raises ValueError naming the argument, its value and what is allowed.
    """
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.ndim != 4:
            raise ValueError(f"{name} has shape {tuple(x.shape)}, expected [batch, sequence, heads, head_dim]")
        if x.dtype not in DTYPES:
            raise ValueError(f"{name} has dtype {x.dtype}, allowed are {', '.join(str(d) for d in DTYPES)}")
        if x.dtype != q.dtype or x.device != q.device:
            raise ValueError(f"{name} is {x.dtype} on {x.device} but q is {q.dtype} on {q.device}: they must be the same")
    if k.shape != v.shape:
        raise ValueError(f"k has shape {tuple(k.shape)} but v has {tuple(v.shape)}: they must be the same")
    if q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        raise ValueError(f"q has shape {tuple(q.shape)} but k has {tuple(k.shape)}: batch and head_dim must agree")
    if k.shape[2] < 1 or q.shape[2] % k.shape[2]:
        raise ValueError(f"q has {q.shape[2]} heads, not a multiple of the {k.shape[2]} heads of k and v")
    if scale is not None and not scale > 0:
        raise ValueError(f"scale={scale} must be > 0")
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap={softcap} must be > 0, or None for no cap")
    if sinks is not None and (sinks.shape != (q.shape[2],) or sinks.device != q.device):
        got = f"{tuple(sinks.shape)} on {sinks.device}"
        raise ValueError(f"sinks has shape {got}, expected [{q.shape[2]}] (one a query head) on {q.device}")
    return q.shape[3] ** -0.5 if scale is None else float(scale)
