"""Attention kernels of others behind our contract, for comparison and for single-hop use: torch's FlashAttention-2 and cuDNN, FA4.

``flash``: aten's FlashAttention-2 on CUDA, torch's own flash kernel on CPU. ``cudnn``: aten's call of cuDNN. ``fa4``: flash_attn.cute,
where that is installed. They take a whole sequence at once, full or causal, and nothing else: no state to carry between hops, no
documents, windows or other intervals, no softcap, no sinks, no gradient through lse. Each of these is refused by name. Their
gradients may differ in the last bits from run to run, so ``deterministic`` refuses them too.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass

import torch
from torch import Tensor

from ringattn.kernels.contract import Bounds, Part, State

VENDORS = ("flash", "cudnn", "fa4")
_HALF = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Rows:
    """What the backward needs from the forward. ``delta`` is for sinks, which are refused."""

    out: Tensor
    lse: Tensor
    delta: Tensor | None = None


class VendorKernel:
    """The :class:`~ringattn.kernels.contract.Kernel` of this name, for hops that are both first and last."""

    deterministic = False
    single_hop = True

    def __init__(self, name: str) -> None:
        """Raises ImportError where the kernel's library is not installed."""
        if name == "fa4" and (importlib.util.find_spec("flash_attn") is None or importlib.util.find_spec("flash_attn.cute") is None):
            raise ImportError("kernel='fa4' needs flash_attn.cute (FlashAttention-4), which is not installed")
        self.name = name

    def refusal(self, q: Tensor, k: Tensor, *, softcap: float | None, sinks: Tensor | None) -> str | None:
        """Why this kernel cannot take these inputs, or None if it can."""
        if not q.is_cuda and (self.name != "flash" or q.device.type != "cpu"):
            return f"it runs on CUDA devices, the inputs are on {q.device}"
        if q.is_cuda and q.dtype not in _HALF:
            return f"dtype {q.dtype} is not one of bfloat16, float16"
        dim, most = q.shape[-1], {"flash": 256, "cudnn": 128, "fa4": 128}[self.name]
        if q.is_cuda and (dim % 8 or dim > most):
            return f"head dim {dim} is not a multiple of 8 up to {most}"
        if softcap is not None:
            return f"softcap={softcap} is not offered"
        if sinks is not None:
            return "sinks are not offered"
        if min(q.shape[0], q.shape[1], k.shape[1]) < 1:
            return f"empty inputs, q {tuple(q.shape)}, k {tuple(k.shape)}"
        return None

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, bounds: Bounds, state: State | None, *, scale: float,
        softcap: float | None = None, first: bool, out: Tensor | None = None, lse: Tensor | None = None,
        sinks: Tensor | None = None,
    ) -> None:  # fmt: skip
        """Attention over one hop that is the first and the last. Raises ValueError for other hops and for other masks."""
        if not first or out is None or lse is None:
            raise ValueError(f"kernel={self.name!r} cannot carry the softmax's state from hop to hop")
        causal = self._causal(bounds)
        if self.name == "fa4":
            from flash_attn.cute.interface import _flash_attn_fwd

            got_out, got_lse = _flash_attn_fwd(q, k, v, softmax_scale=scale, causal=causal, return_lse=True)
        elif self.name == "cudnn":
            results = torch.ops.aten._scaled_dot_product_cudnn_attention(
                *(x.transpose(1, 2) for x in (q, k, v)), None, True, 0.0, causal, False, scale=scale
            )
            got_out, got_lse = results[0].transpose(1, 2), results[1]
        elif q.is_cuda:
            got_out, got_lse = torch.ops.aten._flash_attention_forward(
                q, k, v, None, None, q.shape[1], k.shape[1], 0.0, causal, False, scale=scale
            )[:2]
        else:
            q, k, v = (x.transpose(1, 2) for x in (q, *_expanded(q, k, v)))
            got_out, got_lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)
            got_out = got_out.transpose(1, 2)
        out.copy_(got_out)
        lse.copy_(got_lse.reshape(lse.shape))

    def prepare(self, out: Tensor, dout: Tensor, lse: Tensor, dlse: Tensor | None) -> Rows:
        """Raises ValueError for a gradient through lse: these kernels take none."""
        if dlse is not None:
            raise ValueError(f"kernel={self.name!r} has no gradient through lse")
        return Rows(out, lse)

    def backward(
        self, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, rows: Rows, bounds: Bounds, *, scale: float,
        softcap: float | None = None, dq: Tensor, dk: Tensor, dv: Tensor, add_dq: bool, part: Part = "all",
    ) -> None:  # fmt: skip
        """The gradients of one hop that is the first and the last."""
        if add_dq or part != "all":
            raise ValueError(f"kernel={self.name!r} cannot add up gradients from hop to hop")
        causal, lengths = self._causal(bounds), (q.shape[1], k.shape[1])
        if self.name == "fa4":
            from flash_attn.cute.interface import _flash_attn_bwd

            grads = _flash_attn_bwd(q, k, v, rows.out, dout.contiguous(), rows.lse, softmax_scale=scale, causal=causal)[:3]
        elif self.name == "cudnn":
            none = torch.empty(0, dtype=torch.int64, device=q.device)  # no seed, offset, bias or packed lengths
            heads_first = [x.transpose(1, 2) for x in (dout, q, k, v, rows.out)]
            grads = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
                *heads_first, rows.lse.unsqueeze(-1), none, none, None, None, None, *lengths, 0.0, causal, scale=scale
            )
            grads = [x.transpose(1, 2) for x in grads]
        elif q.is_cuda:
            seed = torch.zeros(2, dtype=torch.uint64, device=q.device)  # of the dropout that is not there
            grads = torch.ops.aten._flash_attention_backward(
                dout.contiguous(), q, k, v, rows.out, rows.lse, None, None, *lengths, 0.0, causal, seed, seed, scale=scale
            )
        else:
            heads_first = [x.transpose(1, 2) for x in (dout, q, *_expanded(q, k, v), rows.out)]
            grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(*heads_first, rows.lse, 0.0, causal, scale=scale)
            grads = [x.transpose(1, 2).unflatten(2, (k.shape[2], -1)).sum(3) if i else x.transpose(1, 2) for i, x in enumerate(grads)]
        for buffer, grad in zip((dq, dk, dv), grads, strict=True):
            buffer.copy_(grad)

    def _causal(self, bounds: Bounds) -> bool:
        """Whether these bounds are causal; False if they are full. Reads them from the device, once for each mask.

        Raises ValueError if they are neither.
        """
        found = bounds.derived.get("causal")
        if found is None:
            (rows, queries), keys = bounds.lo.shape, bounds.q_lo.shape[1]
            own = torch.arange(1, queries + 1, device=bounds.hi.device)
            square = queries == keys and bounds.pairs == rows * queries * (queries + 1) // 2
            found = bounds.derived["causal"] = bool(square and (bounds.lo == 0).all() and (bounds.hi == own).all())
        if not (found or bounds.full):
            raise ValueError(
                f"kernel={self.name!r} takes full masks, and causal ones with as many keys as queries: documents, windows and other "
                "intervals are not offered"
            )
        return bool(found) and not bounds.full


def _expanded(q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
    """k and v with as many heads as q: torch's CPU kernel knows no groups."""
    return [x.repeat_interleave(q.shape[2] // k.shape[2], 2) for x in (k, v)]
