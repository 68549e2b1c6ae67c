"""Output head and cross-entropy, chunk by chunk: the logits of the whole sequence never exist.

At a million tokens and a vocabulary of 128,256 the fp32 logits would take 478 GiB. Here at most [chunk, V] exist at once, forward
and backward; their gradient takes their place (as in arXiv 2410.10989, Liger Kernel, and ALST, arXiv 2506.13996, section 3.1).

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

from ringattn import cost
from ringattn.kernels.contract import accumulate_dtype
from ringattn.kernels.rowwise import IGNORE, cross_entropy
from ringattn.model.linalg import add_outer, mm

__all__ = ["IGNORE", "Head", "choose_chunk", "linear_cross_entropy"]


def choose_chunk(vocab_size: int, dtype: torch.dtype) -> int:
    """Rows at once where ``chunk`` is 0, for inputs of ``dtype``; see :func:`ringattn.cost.logit_rows`."""
    return cost.logit_rows(vocab_size, accumulate_dtype(dtype).itemsize)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, chunk: int, softcap: float, z_loss: float, want: tuple[bool, bool]
    ) -> Tensor:
        wide = accumulate_dtype(hidden.dtype)
        total = hidden.new_zeros((), dtype=torch.float64)  # one number a chunk: fp64 costs nothing and the order of chunks cannot be seen
        d_hidden = torch.empty_like(hidden, memory_format=torch.contiguous_format) if want[0] else None
        d_weight = torch.zeros_like(weight, dtype=wide) if want[1] else None
        for start in range(0, len(labels), chunk):
            h, label = hidden[start : start + chunk], labels[start : start + chunk]
            loss, d_logits = cross_entropy(mm(h, weight.t()), label, softcap, z_loss, h.dtype if any(want) else None)
            total += loss.sum(dtype=torch.float64)
            if d_logits is None:
                continue
            if d_hidden is not None:
                torch.mm(d_logits, weight, out=d_hidden[start : start + len(h)])
            if d_weight is not None:
                add_outer(d_weight, d_logits, h)
            del loss, d_logits  # the next chunk's logits take their place
        ctx.weight_dtype = weight.dtype
        ctx.gradients = d_hidden, d_weight
        return total.to(wide)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.gradients is None:
            raise RuntimeError(
                "linear_cross_entropy: its gradients were made in the forward pass and handed out by the first backward pass, without "
                "a copy; for a second one run the forward pass again"
            )
        (d_hidden, d_weight), ctx.gradients = ctx.gradients, None
        if d_hidden is not None:
            d_hidden.mul_(upstream)
        if d_weight is not None:
            d_weight = _scaled(d_weight, upstream, ctx.weight_dtype)
        return d_hidden, d_weight, None, None, None, None, None


def _scaled(sums: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """``(sums * factor).to(dtype)`` in the memory of ``sums`` [M, N], contiguous: no second copy of the largest matrix there is.

    A narrower result grows from the front, a block of rows at a time, always behind the rows that are still to be read.
    """
    sums.mul_(factor)
    if sums.dtype == dtype:
        return sums
    result = sums.view(-1).view(dtype)[: sums.numel()].view(sums.shape)
    rows = max(1, (16 << 20) // (sums.shape[1] * sums.itemsize))
    for start in range(0, len(sums), rows):
        result[start : start + rows] = sums[start : start + rows].to(dtype)
    return result


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, labels: Tensor, *, chunk: int = 0, softcap: float = 0.0, z_loss: float = 0.0
) -> Tensor:
    """Sum over valid labels of the cross-entropy (nats) of ``hidden @ weight^T``.

    ``hidden`` [..., E]; ``weight`` [V, E] of the same dtype; ``labels`` int64 [...], :data:`IGNORE` where nothing is to be predicted.
    Returns a scalar, fp32 (fp64 for fp64 inputs); 0 with zero gradients if no label is valid. Logits, softmax and the weight's
    gradient are fp32 for 16-bit inputs. ``chunk``: tokens at once, 0 = as many as :func:`choose_chunk` says. ``softcap``: logits
    become ``softcap * tanh(logits / softcap)`` (Gemma 2, arXiv 2408.00118); 0 = off. ``z_loss``: adds ``z_loss * lse^2`` for each
    valid label, with lse the log of the softmax's denominator (PaLM, arXiv 2204.02311, section 5); 0 = off.

    The gradients leave in the memory in which the forward pass summed them, so only one backward pass is possible: a second one raises
    RuntimeError. Raises ValueError for shapes or dtypes that differ. A label that is neither a token nor IGNORE is an error of PyTorch's
    on a CPU; on a GPU it makes the loss NaN.
    """
    if hidden.shape[:-1] != labels.shape or hidden.shape[-1] != weight.shape[1]:
        raise ValueError(f"hidden {list(hidden.shape)} does not fit labels {list(labels.shape)} and weight {list(weight.shape)}")
    if hidden.dtype != weight.dtype:
        raise ValueError(f"hidden is {hidden.dtype} but the head's weight is {weight.dtype}")
    if chunk < 0 or softcap < 0 or z_loss < 0:
        raise ValueError(f"chunk={chunk}, softcap={softcap}, z_loss={z_loss}: must be 0 or more")
    chunk = chunk or choose_chunk(weight.shape[0], weight.dtype)
    want = tuple(torch.is_grad_enabled() and t.requires_grad for t in (hidden, weight))
    rows = hidden.reshape(-1, hidden.shape[-1])
    total: Tensor = _LinearCrossEntropy.apply(rows, weight, labels.reshape(-1), chunk, softcap, z_loss, want)
    return total


class Head(nn.Module):
    """Output head and loss in one module, so that the hooks of FSDP that gather the weight run around its use.

    ``weight`` [V, E], or None for a tied head: then the embedding's weight is handed to :meth:`forward` (so that the shared matrix has
    one name, one state-dict key and one FSDP owner: the root unit).
    """

    weight: nn.Parameter | None

    def __init__(self, vocab_size: int, width: int, *, tied: bool, chunk: int, softcap: float = 0.0, z_loss: float = 0.0) -> None:
        super().__init__()
        self.options: dict[str, Any] = {"chunk": chunk, "softcap": softcap}
        self.z_loss = z_loss
        self.register_parameter("weight", None if tied else nn.Parameter(torch.full((vocab_size, width), math.nan)))

    def forward(self, hidden: Tensor, labels: Tensor, tied_weight: Tensor | None = None) -> Tensor:
        """Sum of cross-entropy over valid labels; ``hidden`` [B, S, E], ``labels`` int64 [B, S]."""
        weight = self.weight if tied_weight is None else tied_weight
        assert weight is not None, "a tied head needs the embedding's weight"
        # The z-loss steers training; a validation loss is the plain cross-entropy.
        return linear_cross_entropy(hidden, weight, labels, **self.options, z_loss=self.z_loss if torch.is_grad_enabled() else 0.0)
