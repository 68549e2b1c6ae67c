"""Queries, keys and values from the residual stream: RMSNorm, one matrix, RoPE, chunk by chunk in one registered op.

``torch.ops.ringattn.qkv`` saves its input only, which the residual connection keeps in any case: neither the normed input nor the
packed product of the whole sequence exists, and RoPE needs no fp32 copies. The backward pass recomputes the norm of each chunk (no matrix
product). Weight gradients are summed over the chunks in fp32 (fp64 in fp64) and rounded once.

Shapes: N = B * S tokens, E width, H heads, Hkv KV heads, D head dim.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ringattn.kernels import rowwise
from ringattn.kernels.contract import accumulate_dtype
from ringattn.model.linalg import add_outer


def _empty(x: Tensor, weight: Tensor, heads: int, kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    dim = weight.shape[0] // (heads + 2 * kv_heads)
    q, k, v = (x.new_empty(*x.shape[:2], n, dim) for n in (heads, kv_heads, kv_heads))
    return q, k, v


@torch.library.custom_op("ringattn::qkv", mutates_args=())
def blockwise_qkv(
    x: Tensor, norm: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, heads: int, kv_heads: int, eps: float, chunk: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Rotated q [B, S, H, D] and k [B, S, Hkv, D], and v, of ``rms_norm(x) @ weight^T``, ``chunk`` tokens at once.

    ``x`` [B, S, E]; ``norm`` [E]; ``weight`` [(H + 2 Hkv) D, E], all of one dtype; ``cos``, ``sin`` [1 or B, S, D/2].
    """
    q, k, v = _empty(x, weight, heads, kv_heads)
    cos, sin = cos.flatten(0, 1), sin.flatten(0, 1)
    parts = [t.flatten(0, 1).split(chunk) for t in (x, q, k, v)]
    for i, (x_c, q_c, k_c, v_c) in enumerate(zip(*parts, strict=True)):
        rowwise.split_rotate(F.rms_norm(x_c, norm.shape, norm, eps) @ weight.t(), cos, sin, i * chunk, q_c, k_c, v_c)
    return q, k, v


@torch.library.custom_op("ringattn::qkv_backward", mutates_args=())
def _blockwise_qkv_backward(
    d_q: Tensor, d_k: Tensor, d_v: Tensor, x: Tensor, norm: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, eps: float, chunk: int
) -> tuple[Tensor, Tensor, Tensor]:
    wide = accumulate_dtype(x.dtype)
    d_x = torch.empty_like(x, memory_format=torch.contiguous_format)
    d_norm, d_weight = (torch.zeros_like(w, dtype=wide) for w in (norm, weight))
    cos, sin = cos.flatten(0, 1), sin.flatten(0, 1)
    parts = [t.contiguous().flatten(0, 1).split(chunk) for t in (x, d_q, d_k, d_v)]
    for i, (x_c, q_c, k_c, v_c, d_x_c) in enumerate(zip(*parts, d_x.flatten(0, 1).split(chunk), strict=True)):
        d_qkv = rowwise.split_rotate_backward(q_c, k_c, v_c, cos, sin, i * chunk)
        add_outer(d_weight, d_qkv, F.rms_norm(x_c, norm.shape, norm, eps))
        d_norm += rowwise.rms_norm_backward(d_qkv @ weight, x_c, norm, eps, None, d_x_c)
    return d_x, d_norm.to(norm.dtype), d_weight.to(weight.dtype)


@blockwise_qkv.register_fake
def _(
    x: Tensor, norm: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, heads: int, kv_heads: int, eps: float, chunk: int
) -> tuple[Tensor, Tensor, Tensor]:
    return _empty(x, weight, heads, kv_heads)


@_blockwise_qkv_backward.register_fake
def _(
    d_q: Tensor, d_k: Tensor, d_v: Tensor, x: Tensor, norm: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, eps: float, chunk: int
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(x, memory_format=torch.contiguous_format), torch.empty_like(norm), torch.empty_like(weight)


def _save_inputs(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs[:5])
    ctx.eps, ctx.chunk = inputs[7:]


def _backward(ctx: Any, d_q: Tensor, d_k: Tensor, d_v: Tensor) -> tuple[Tensor | None, ...]:
    return *_blockwise_qkv_backward(d_q, d_k, d_v, *ctx.saved_tensors, ctx.eps, ctx.chunk), *[None] * 6


blockwise_qkv.register_autograd(_backward, setup_context=_save_inputs)
