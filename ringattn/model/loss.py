"""Output head and cross-entropy, chunk by chunk: the logits of the whole sequence never exist.

At a million tokens and a vocabulary of 128,256 the fp32 logits would take 478 GiB. Here at most [chunk, V] exist at once, forward
and backward (as in arXiv 2410.10989, Liger Kernel, and ALST, arXiv 2506.13996, section 3.1).

The gradients are computed in the forward pass, while the chunk's softmax is at hand, and scaled by the upstream gradient in the
backward pass. That takes 3 matrix products; recomputing the logits in the backward pass would take 4. It costs no memory at the
peak, since the backward pass begins here: the weight's gradient would be the next allocation anyway. Nor does the backward pass
need the head's weight, which FSDP therefore need not gather again. Without grad mode only the loss is computed.

Shapes: N tokens, E width, V vocabulary.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ringattn.kernels.contract import accumulate_dtype
from ringattn.model.linalg import add_outer, mm

IGNORE = -100


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, chunk: int, want_hidden: bool, want_weight: bool) -> Tensor:
        wide = accumulate_dtype(hidden.dtype)
        total = hidden.new_zeros((), dtype=torch.float64)  # one number a chunk: fp64 costs nothing and the order of chunks cannot be seen
        d_hidden = torch.empty_like(hidden) if want_hidden else None
        d_weight = torch.zeros_like(weight, dtype=wide) if want_weight else None
        for start in range(0, len(labels), chunk):
            h, label = hidden[start : start + chunk], labels[start : start + chunk]
            logits = mm(h, weight.t())
            valid = label != IGNORE
            index = torch.where(valid, label, 0).unsqueeze(1)
            lse = torch.logsumexp(logits, 1)
            loss = lse - logits.gather(1, index).squeeze(1)
            total += torch.where(valid, loss, 0.0).sum(dtype=torch.float64)
            if d_hidden is None and d_weight is None:
                continue
            # The logits' memory becomes their gradient: softmax minus one at the label, zero in ignored rows.
            d_logits = logits.sub_(lse.unsqueeze(1)).exp_()
            d_logits.scatter_add_(1, index, d_logits.new_full((len(h), 1), -1.0))
            d_logits = d_logits.mul_(valid.unsqueeze(1)).to(h.dtype)
            if d_hidden is not None:
                torch.mm(d_logits, weight, out=d_hidden[start : start + len(h)])
            if d_weight is not None:
                add_outer(d_weight, d_logits, h)
        ctx.weight_dtype = weight.dtype
        ctx.save_for_backward(d_hidden, d_weight)
        return total.to(wide)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        d_hidden, d_weight = ctx.saved_tensors
        if d_hidden is not None:
            d_hidden = d_hidden * upstream
        if d_weight is not None:  # scaled and rounded in one pass; the fp32 sum stays intact for retain_graph
            d_weight = torch.mul(d_weight, upstream, out=torch.empty_like(d_weight, dtype=ctx.weight_dtype))
        return d_hidden, d_weight, None, None, None, None


def linear_cross_entropy(hidden: Tensor, weight: Tensor, labels: Tensor, *, chunk: int) -> Tensor:
    """Sum over valid labels of the cross-entropy (nats) of ``hidden @ weight^T``.

    ``hidden`` [..., E]; ``weight`` [V, E] of the same dtype; ``labels`` int64 [...], :data:`IGNORE` where nothing is to be predicted.
    Returns a scalar, fp32 (fp64 for fp64 inputs); 0 with zero gradients if no label is valid. Logits, softmax and the weight's
    gradient are fp32 for 16-bit inputs. ``chunk``: tokens at once, at least 1. Raises ValueError for shapes or dtypes that differ.
    """
    if hidden.shape[:-1] != labels.shape or hidden.shape[-1] != weight.shape[1]:
        raise ValueError(f"hidden {list(hidden.shape)} does not fit labels {list(labels.shape)} and weight {list(weight.shape)}")
    if hidden.dtype != weight.dtype:
        raise ValueError(f"hidden is {hidden.dtype} but the head's weight is {weight.dtype}")
    if chunk < 1:
        raise ValueError(f"chunk={chunk}: must be at least 1")
    wanted = [torch.is_grad_enabled() and t.requires_grad for t in (hidden, weight)]
    total: Tensor = _LinearCrossEntropy.apply(hidden.reshape(-1, hidden.shape[-1]), weight, labels.reshape(-1), chunk, *wanted)
    return total


class Head(nn.Module):
    """Output head and loss in one module, so that the hooks of FSDP that gather the weight run around its use.

    ``weight`` [V, E], or None for a tied head: then the embedding's weight is handed to :meth:`forward` (so that the shared matrix has
    one name, one state-dict key and one FSDP owner: the root unit).
    """

    weight: nn.Parameter | None

    def __init__(self, vocab_size: int, width: int, *, tied: bool, chunk: int) -> None:
        super().__init__()
        self.chunk = chunk
        self.register_parameter("weight", None if tied else nn.Parameter(torch.full((vocab_size, width), math.nan)))

    def forward(self, hidden: Tensor, labels: Tensor, tied_weight: Tensor | None = None) -> Tensor:
        """Sum of cross-entropy over valid labels; ``hidden`` [B, S, E], ``labels`` int64 [B, S]."""
        weight = self.weight if tied_weight is None else tied_weight
        assert weight is not None, "a tied head needs the embedding's weight"
        return linear_cross_entropy(hidden, weight, labels, chunk=self.chunk)
