"""The feed-forward sublayer, ``x + down(silu(gate(n)) * up(n))`` with ``n = RMSNorm(x)`` (SwiGLU, arXiv 2002.05202).

Blockwise (Blockwise Parallel Transformer, arXiv 2305.19370): the sequence is taken chunk by chunk, norm and residual included, and
the backward pass recomputes each chunk's hidden values, so that only the sublayer's input is saved and nothing of size [S, F] exists.
It is one registered op, ``torch.ops.ringattn.ffn``, for two reasons:

- its output is the output of the whole block, hence the next block's input, which block checkpointing keeps in any case. A
  selective policy that must-saves this op (:data:`ringattn.model.FREE_TO_SAVE`) therefore skips the feed-forward's recomputation
  at no cost in memory;
- torch.compile sees a single node and cannot fuse the chunks back together.

The backward pass takes 2 matrix products for the recomputation (gate, up) and 6 for the gradients. Weight gradients are summed over
the chunks in fp32 (fp64 in fp64) and rounded once. SwiGLU and the norm's backward are one kernel each (:mod:`ringattn.kernels.rowwise`),
SwiGLU's in place over the recomputed values. Results depend on the chunk size only through the rounding of matrix products.

Shapes: N tokens, E width, F hidden width.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ringattn.kernels import rowwise
from ringattn.kernels.contract import accumulate_dtype
from ringattn.model.linalg import add_outer


@torch.library.custom_op("ringattn::ffn", mutates_args=())
def blockwise_ffn(x: Tensor, norm: Tensor, gate_up: Tensor, down: Tensor, eps: float, chunk: int) -> Tensor:
    """``x + down(swiglu(gate_up(rms_norm(x))))``, ``chunk`` tokens at once.

    ``x`` [..., E]; ``norm`` [E]; ``gate_up`` [2F, E] (gate first); ``down`` [E, F]; all of one dtype. Returns [..., E], contiguous.
    """
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    for x_c, out_c in zip(x.reshape(-1, x.shape[-1]).split(chunk), out.view(-1, x.shape[-1]).split(chunk), strict=True):
        hidden = rowwise.swiglu(F.rms_norm(x_c, norm.shape, norm, eps) @ gate_up.t())
        torch.addmm(x_c, hidden, down.t(), out=out_c)
    return out


@torch.library.custom_op("ringattn::ffn_backward", mutates_args=())
def _blockwise_ffn_backward(
    d_out: Tensor, x: Tensor, norm: Tensor, gate_up: Tensor, down: Tensor, eps: float, chunk: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    wide = accumulate_dtype(x.dtype)
    d_x = torch.empty_like(x, memory_format=torch.contiguous_format)
    d_norm, d_gate_up, d_down = (torch.zeros_like(w, dtype=wide) for w in (norm, gate_up, down))
    rows = [t.reshape(-1, x.shape[-1]).split(chunk) for t in (d_out, x, d_x)]
    for d_out_c, x_c, d_x_c in zip(*rows, strict=True):
        n = F.rms_norm(x_c, norm.shape, norm, eps)
        hidden, d_pre = rowwise.swiglu_backward(n @ gate_up.t(), d_out_c @ down)  # both made in their arguments' memory
        add_outer(d_down, d_out_c, hidden)
        add_outer(d_gate_up, d_pre, n)
        d_norm += rowwise.rms_norm_backward(d_pre @ gate_up, x_c, norm, eps, d_out_c, d_x_c)
    return d_x, d_norm.to(norm.dtype), d_gate_up.to(gate_up.dtype), d_down.to(down.dtype)


@blockwise_ffn.register_fake
def _(x: Tensor, norm: Tensor, gate_up: Tensor, down: Tensor, eps: float, chunk: int) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@_blockwise_ffn_backward.register_fake
def _(
    d_out: Tensor, x: Tensor, norm: Tensor, gate_up: Tensor, down: Tensor, eps: float, chunk: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    d_x = torch.empty_like(x, memory_format=torch.contiguous_format)
    return d_x, torch.empty_like(norm), torch.empty_like(gate_up), torch.empty_like(down)


def _save_inputs(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:4])
    ctx.eps, ctx.chunk = inputs[4:]


def _backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
    return *_blockwise_ffn_backward(d_out, *ctx.saved_tensors, ctx.eps, ctx.chunk), None, None


blockwise_ffn.register_autograd(_backward, setup_context=_save_inputs)
