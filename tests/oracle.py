"""What every exactness test shares: fresh inputs, the fp64 dense oracle, relative errors, and masks of every kind."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ringattn.kernels.intervals import dense_mask, mask_intervals
from ringattn.kernels.reference import dense_attention

F32_BAND, BF_BAND = 5e-6, 1e-2
MASKS = ("causal", "full", "window", "documents", "documents per row", "documents and window", "visible")


def rel(x: Tensor, gold: Tensor) -> float:
    """||x - gold|| / ||gold|| over the whole tensor; NaN if anything is NaN."""
    gold = gold.detach().double()
    return ((x.detach().double() - gold).norm() / gold.norm().clamp_min(1e-300)).item()


def make_mask(kind: str, seq_len: int, batch: int, rng: np.random.Generator) -> dict:
    """Keyword arguments of one mask kind, with fresh random documents or spans (empty rows and padding among them)."""
    ragged = np.sort(rng.integers(0, max(2, seq_len // 12), (batch, seq_len)), axis=1)
    padded = ragged.copy()
    padded[:, seq_len - seq_len // 5 :] = -1
    lo = np.sort(rng.integers(0, seq_len, seq_len))
    hi = np.maximum.accumulate(np.clip(lo + rng.integers(-3, max(2, seq_len // 2), seq_len), -1, seq_len - 1))
    match kind:
        case "causal":
            return {}
        case "full":
            return {"causal": False}
        case "window":
            return {"window": max(1, seq_len // 9)}
        case "documents":
            return {"documents": torch.from_numpy(ragged[0])}
        case "documents per row":
            return {"documents": torch.from_numpy(padded), "causal": False}
        case "documents and window":
            return {"documents": torch.from_numpy(padded), "window": max(1, seq_len // 5)}
        case "visible":
            return {"visible": (torch.from_numpy(lo), torch.from_numpy(hi)), "causal": False}
    raise ValueError(kind)


def make_qkv(
    batch: int, seq_len: int, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, keys: int | None = None,
) -> list[Tensor]:
    """Fresh q, k, v that require gradients, and dout."""
    keys = seq_len if keys is None else keys
    q, dout = (torch.randn(batch, seq_len, heads, head_dim).to(dtype) for _ in range(2))
    k, v = (torch.randn(batch, keys, kv_heads, head_dim).to(dtype) for _ in range(2))
    return [*(x.requires_grad_() for x in (q, k, v)), dout]


@dataclass
class Gold:
    """The oracle's results in fp64."""

    out: Tensor
    lse: Tensor
    grads: list[Tensor]


def oracle(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, mask: dict, *, scale=None, softcap=None, sinks=None, dlse=None) -> Gold:
    """Dense fp64 attention on the given (already rounded) inputs; gradients of sum(out * dout) + sum(lse * dlse)."""
    leaves = [x.detach().double().requires_grad_() for x in (q, k, v, *((sinks,) if sinks is not None else ()))]
    visible = dense_mask(*mask_intervals(q.shape[1], k.shape[1], **mask), k.shape[1])
    out, lse = dense_attention(*leaves[:3], visible, scale=scale, softcap=softcap, sinks=leaves[3] if sinks is not None else None)
    objective = (out * dout.double()).sum()
    if dlse is not None:
        objective = objective + torch.where(lse.isinf(), 0.0, lse * dlse.double()).sum()
    return Gold(out.detach(), lse.detach(), list(torch.autograd.grad(objective, leaves)))


def assert_close(got: dict[str, Tensor], gold: dict[str, Tensor], band: float) -> None:
    """Each tensor by itself within the band, named in the message."""
    errors = {name: rel(got[name], gold[name]) for name in gold}
    bad = {name: e for name, e in errors.items() if not e <= band}
    assert not bad, f"relative errors {bad} exceed {band} (all: {errors})"
