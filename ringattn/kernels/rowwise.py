"""What lies between the matrix products, row by row: SwiGLU, RMSNorm's backward, RoPE, the softmax of the loss.

On a GPU, for up to 32-bit inputs, one Triton kernel each (:mod:`ringattn.kernels.rowwise_triton`); elsewhere PyTorch. Both compute in
the accumulate dtype (fp32, fp64 for fp64); PyTorch's SwiGLU rounds silu as well as the product. Only :func:`swiglu_backward` and
:func:`cross_entropy` write over their inputs.

Shapes: N rows, E width, F hidden width, H heads, Hkv KV heads, D head dim, V vocabulary.
"""

from __future__ import annotations

import math
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor

from ringattn.kernels.contract import accumulate_dtype

try:
    from ringattn.kernels import rowwise_triton
except ImportError:  # no triton on this machine: PyTorch it is
    rowwise_triton: ModuleType | None = None  # type: ignore[no-redef]

NORM_PROGRAMS = 528  # four on each multiprocessor of a large GPU; fixed, since it fixes the order of sums
IGNORE = -100


def fused(x: Tensor) -> bool:
    """Whether the Triton kernels take ``x``."""
    return rowwise_triton is not None and x.is_cuda and x.dtype in (torch.float32, torch.bfloat16, torch.float16)


def _block(numbers: int, most: int) -> int:
    return min(most, 1 << (max(1, numbers) - 1).bit_length())


def _warps(block: int) -> int:
    return min(16, max(1, block // 512))


def plain_swiglu(gate_up: Tensor) -> Tensor:
    """``silu(gate) * up`` of the two halves of the last dim, by PyTorch: for autograd, and where there is no kernel."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def swiglu(gate_up: Tensor) -> Tensor:
    """The same for ``gate_up`` [N, 2F], contiguous, without a gradient; returns [N, F]."""
    if not fused(gate_up):
        return plain_swiglu(gate_up)
    assert rowwise_triton is not None
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    hidden, block = gate_up.new_empty(rows, width), _block(width, 2048)
    if rows:
        rowwise_triton.swiglu_forward[(rows, -(-width // block))](gate_up, hidden, width, BLOCK=block, num_warps=_warps(block))
    return hidden


def swiglu_backward(gate_up: Tensor, d_hidden: Tensor) -> tuple[Tensor, Tensor]:
    """(hidden values [N, F], gradient of ``gate_up`` [N, 2F]) from the gradient of the former. Both arguments are overwritten."""
    if not fused(gate_up):
        gate, up = gate_up.chunk(2, dim=1)
        silu = F.silu(gate)
        return silu * up, torch.cat([torch.ops.aten.silu_backward(d_hidden * up, gate), d_hidden * silu], dim=1)
    assert rowwise_triton is not None
    rows, width = d_hidden.shape
    block = _block(width, 2048)
    if rows:
        rowwise_triton.swiglu_backward[(rows, -(-width // block))](gate_up, d_hidden, width, BLOCK=block, num_warps=_warps(block))
    return d_hidden, gate_up


def rms_norm_backward(d_normed: Tensor, x: Tensor, weight: Tensor, eps: float, residual: Tensor | None, out: Tensor) -> Tensor:
    """Write ``residual`` (if any) plus the gradient through ``rms_norm(x, weight)`` into ``out`` (all [N, E]).

    Returns the weight's gradient, [E] in the accumulate dtype. ``d_normed`` has x's dtype."""
    wide, rows = accumulate_dtype(x.dtype), x.shape[0]
    if not fused(x) or rows == 0:
        x_w, d_n = x.to(wide), d_normed.to(wide)
        inv_rms = torch.rsqrt(x_w.square().mean(1, keepdim=True) + eps)
        x_hat = x_w * inv_rms
        d_hat = d_n * weight
        d_x = inv_rms * (d_hat - x_hat * (d_hat * x_hat).mean(1, keepdim=True))
        out.copy_(d_x if residual is None else residual + d_x)
        return (d_n * x_hat).sum(0)
    assert rowwise_triton is not None
    width = x.shape[1]
    block, programs = _block(width, 1 << 30), min(NORM_PROGRAMS, rows)
    d_weight = x.new_empty(programs, width, dtype=wide)
    added = x if residual is None else residual.contiguous()
    args = (d_normed.contiguous(), x.contiguous(), weight, added, out, d_weight, rows, width, eps)
    rowwise_triton.rms_norm_backward[(programs,)](*args, RESIDUAL=residual is not None, BLOCK=block, num_warps=_warps(block))
    return d_weight.sum(0)


def split_rotate(qkv: Tensor, cos: Tensor, sin: Tensor, first_row: int, q: Tensor, k: Tensor, v: Tensor) -> None:
    """Split ``qkv`` [N, (H + 2 Hkv) D] into ``q`` [N, H, D], ``k`` and ``v`` [N, Hkv, D], turning the pairs of q and k.

    ``cos``, ``sin`` [phase rows, D/2]: row i takes phase (first_row + i) mod phase rows. The pairs are (i, i + D/2).
    """
    if fused(qkv):
        _launch_rotate(qkv, cos, sin, first_row, q, k, v, backward=False)
        return
    parts = qkv.view(len(qkv), -1, q.shape[2]).split([q.shape[1], k.shape[1], v.shape[1]], dim=1)
    at = (torch.arange(first_row, first_row + len(qkv), device=qkv.device)) % len(cos)
    q.copy_(_turn(parts[0], cos[at], sin[at]))
    k.copy_(_turn(parts[1], cos[at], sin[at]))
    v.copy_(parts[2])


def split_rotate_backward(d_q: Tensor, d_k: Tensor, d_v: Tensor, cos: Tensor, sin: Tensor, first_row: int) -> Tensor:
    """The gradient of ``qkv`` [N, (H + 2 Hkv) D] in :func:`split_rotate`."""
    if fused(d_q):
        d_qkv = d_q.new_empty(len(d_q), (d_q.shape[1] + 2 * d_k.shape[1]) * d_q.shape[2])
        _launch_rotate(d_qkv, cos, sin, first_row, d_q, d_k, d_v, backward=True)
        return d_qkv
    at = (torch.arange(first_row, first_row + len(d_q), device=d_q.device)) % len(cos)
    turned = [_turn(d, cos[at], -sin[at]).to(d.dtype) for d in (d_q, d_k)]
    return torch.cat([*turned, d_v], dim=1).flatten(1)


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def _launch_rotate(qkv: Tensor, cos: Tensor, sin: Tensor, first_row: int, q: Tensor, k: Tensor, v: Tensor, *, backward: bool) -> None:
    assert rowwise_triton is not None
    n, heads, dim = q.shape
    if n == 0:
        return
    width = _block(dim // 2, 1 << 30)
    rows = max(1, 2048 // width)
    grid = (-(-n // rows), heads + 2 * k.shape[1])
    rowwise_triton.split_rotate[grid](
        qkv, q, k, v, cos, sin, n, first_row, len(cos), H=heads, HKV=k.shape[1], HALF=dim // 2, BACKWARD=backward, ROWS=rows, WIDTH=width,
        num_warps=4,
    )


def cross_entropy(
    logits: Tensor, labels: Tensor, softcap: float, z_loss: float, gradient: torch.dtype | None
) -> tuple[Tensor, Tensor | None]:
    """Loss of each row of ``logits`` [N, V] (accumulate dtype, contiguous, overwritten) and its gradient.

    The loss of a row is ``lse - z[label] + z_loss * lse^2`` with ``z = softcap * tanh(logits / softcap)`` (softcap 0: the logits) and
    ``lse`` the log of the sum of exp(z); rows labelled :data:`IGNORE` have loss and gradient 0. Returns ([N], [N, V] of dtype
    ``gradient`` or None). The gradient may live in the memory of ``logits``, its rows then lie as far apart as those did.
    """
    if fused(logits):
        return _fused_cross_entropy(logits, labels, softcap, z_loss, gradient)
    valid = labels != IGNORE
    index = torch.where(valid, labels, 0).unsqueeze(1)
    slope = None
    if softcap:
        t = logits.div_(softcap).tanh_()
        slope = 1 - t * t if gradient is not None else None
        logits = t.mul_(softcap)
    lse = torch.logsumexp(logits, 1)
    loss = lse - logits.gather(1, index).squeeze(1)
    if z_loss:
        loss = loss + z_loss * lse.square()
    loss = torch.where(valid, loss, 0.0)
    if gradient is None:
        return loss, None
    d = logits.sub_(lse.unsqueeze(1)).exp_()  # the logits' memory becomes their gradient: softmax minus one at the label
    if z_loss:
        d.mul_((1 + 2 * z_loss * lse).unsqueeze(1))
    d.scatter_add_(1, index, d.new_full((len(d), 1), -1.0))
    if slope is not None:
        d.mul_(slope)
    return loss, d.mul_(valid.unsqueeze(1)).to(gradient)


def _fused_cross_entropy(
    logits: Tensor, labels: Tensor, softcap: float, z_loss: float, gradient: torch.dtype | None
) -> tuple[Tensor, Tensor | None]:
    assert rowwise_triton is not None and logits.dtype == torch.float32
    n, vocab = logits.shape
    loss = logits.new_empty(n)
    dtype = gradient or torch.float32
    over = logits.view(dtype)
    block = _block(vocab, 8192)
    if n:
        rowwise_triton.cross_entropy[(n,)](
            logits, over, labels.contiguous(), loss, vocab, softcap or math.inf, z_loss, CAP=softcap > 0, IGNORE=IGNORE,
            WANT=gradient is not None, RATIO=over.shape[1] // vocab, BLOCK=block, num_warps=_warps(block),
        )
    return loss, None if gradient is None else over[:, :vocab]
