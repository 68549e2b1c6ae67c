"""Rotary position embedding by explicit positions (RoFormer, arXiv 2104.09864).

Positions are data: int64 [S] or [B, S], whatever order the tokens lie in. A sharded or packed sequence passes its own, so this
module knows nothing of shards or documents. Pairs are (i, i + D/2), the convention of Llama checkpoints in the common format.
"""

from __future__ import annotations

import torch
from torch import Tensor


def rope_phases(positions: Tensor, head_dim: int, theta: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosine and sine of every (position, frequency).

    ``positions`` int64 [S] or [B, S]; returns two tensors [1 or B, S, D/2] of ``dtype`` (fp32, or fp64 for an fp64 model).

    The angle position * frequency is formed in fp64 and only its cosine and sine are rounded: an fp32 product at position 2^20
    is off by about 0.1 radian, which is more than neighbouring tokens differ at most frequencies. Cost: once a batch, not a layer.
    """
    if positions.dtype != torch.int64 or positions.dim() not in (1, 2):
        raise ValueError(f"positions must be int64 [S] or [B, S], not {positions.dtype} with shape {list(positions.shape)}")
    exponent = torch.arange(0, head_dim, 2, dtype=torch.float64, device=positions.device) / head_dim
    angle = positions.to(torch.float64).unsqueeze(-1) * theta**-exponent
    if angle.dim() == 2:
        angle = angle.unsqueeze(0)
    return angle.cos().to(dtype), angle.sin().to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair of ``x`` [B, S, H, D] by its phase ([1 or B, S, D/2]); computed in the phases' dtype, returned in x's."""
    cos, sin = cos.unsqueeze(2), sin.unsqueeze(2)
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)
