"""Matrix products of 16-bit inputs with fp32 results, for sums that are taken chunk by chunk.

A sum over chunks must not be rounded to 16 bit after each of them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ringattn.kernels.contract import accumulate_dtype


def mm(a: Tensor, b: Tensor) -> Tensor:
    """``a @ b`` ([M, K] times [K, N]) in the accumulate dtype."""
    wide = accumulate_dtype(a.dtype)
    if a.dtype == wide:
        return a @ b
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=wide)  # tensor cores take 16 bit in and give fp32 out
    return a.to(wide) @ b.to(wide)


def add_outer(total: Tensor, a: Tensor, b: Tensor) -> None:
    """``total += a^T @ b`` in place; ``total`` [M, N] has the accumulate dtype, ``a`` is [rows, M], ``b`` [rows, N]."""
    if a.dtype == total.dtype:
        torch.addmm(total, a.t(), b, out=total)
    elif a.is_cuda:
        torch.addmm(total, a.t(), b, out_dtype=total.dtype, out=total)
    else:
        torch.addmm(total, a.t().to(total.dtype), b.to(total.dtype), out=total)
