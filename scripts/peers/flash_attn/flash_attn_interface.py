"""The two functions of flash-attn that ring-flash-attn calls, on top of the kernels that PyTorch brings along.

On CUDA these are FlashAttention-2 itself (``aten::_flash_attention_forward``); on a CPU, for trying things out, PyTorch's CPU kernel.
q, out, dq [B, S, H, D]; k, v, dk, dv [B, S, Hkv, D]; lse fp32 [B, H, S]. Windows, dropout, ALiBi and softcap are not offered.
"""

from __future__ import annotations

import torch
from torch import Tensor


def _flash_attn_forward(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float, softmax_scale: float, causal: bool, window_size_left: int = -1,
    window_size_right: int = -1, softcap: float = 0.0, alibi_slopes: Tensor | None = None, return_softmax: bool = False,
) -> tuple[Tensor, Tensor, None, None]:
    """(out, lse, None, None)."""
    _refuse(dropout_p, window_size_left, softcap, alibi_slopes)
    if q.is_cuda:
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            q, k, v, None, None, q.shape[1], k.shape[1], 0.0, causal, False, scale=softmax_scale
        )
        return out, lse, None, None
    heads_first = (x.transpose(1, 2) for x in (q, k, v))
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*heads_first, 0.0, causal, scale=softmax_scale)
    return out.transpose(1, 2), lse, None, None


def _flash_attn_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor, dq: Tensor, dk: Tensor, dv: Tensor, dropout_p: float,
    softmax_scale: float, causal: bool, window_size_left: int = -1, window_size_right: int = -1, softcap: float = 0.0,
    alibi_slopes: Tensor | None = None, deterministic: bool = False, rng_state: Tensor | None = None,
) -> None:
    """Writes dq, dk, dv."""
    _refuse(dropout_p, window_size_left, softcap, alibi_slopes)
    if q.is_cuda:
        state = torch.zeros(2, dtype=torch.uint64, device=q.device)  # of the dropout that is not there
        grads = torch.ops.aten._flash_attention_backward(
            dout.contiguous(), q, k, v, out, softmax_lse, None, None, q.shape[1], k.shape[1], 0.0, causal, state, state, scale=softmax_scale
        )
    else:
        heads_first = [x.transpose(1, 2) for x in (dout, q, k, v, out)]
        grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *heads_first, softmax_lse, 0.0, causal, scale=softmax_scale
        )
        grads = [x.transpose(1, 2) for x in grads]
    for buffer, grad in zip((dq, dk, dv), grads, strict=True):
        buffer.copy_(grad)


def _flash_attn_varlen_forward(*args: object, **kwargs: object) -> None:
    raise NotImplementedError("this stand-in for flash-attn has no packed variants")


_flash_attn_varlen_backward = _flash_attn_varlen_forward


def _refuse(dropout_p: float, window_left: int, softcap: float, alibi_slopes: Tensor | None) -> None:
    if dropout_p or window_left >= 0 or softcap or alibi_slopes is not None:
        raise NotImplementedError("this stand-in for flash-attn offers no dropout, windows, softcap or ALiBi")
