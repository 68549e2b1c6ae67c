"""The decoder: Llama-family blocks around an attention function that is handed in.

Everything but ``attend`` is row-local: a model run on one shard of a sequence with that shard's positions computes what it would
compute for those rows of the whole. Each block is the unit of FSDP, of activation checkpointing and of torch.compile;
``Block.forward`` is a pure function of (x, cos, sin, handle) and of its parameters. Embedding, final norm and head belong to the root unit.

Parameters hold NaN until :meth:`Transformer.initialise` or a checkpoint fills them, so that a forgotten call shows in the first loss.

Shapes: B batch, S tokens at hand (a shard or the whole), E width, H heads, Hkv KV heads, D head dim, F hidden width, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from ringattn.kernels.contract import accumulate_dtype
from ringattn.kernels.rowwise import plain_swiglu
from ringattn.model import init
from ringattn.model.config import ModelConfig
from ringattn.model.ffn import blockwise_ffn
from ringattn.model.loss import Head
from ringattn.model.qkv import blockwise_qkv
from ringattn.model.rope import rope_phases, rotate

# (q [B, S, H, D], k [B, S, Hkv, D], v [B, S, Hkv, D], schedule handle, sinks [H] or None) -> out [B, S, H, D].
# Scale, softcap and kernel are the closure's business; the mask is the schedule's.
Attend = Callable[[Tensor, Tensor, Tensor, int, Tensor | None], Tensor]

# Ops whose output block checkpointing keeps anyway (as the next block's input): must-save them and save their recomputation.
FREE_TO_SAVE = (torch.ops.ringattn.ffn.default,)


class Linear(nn.Module):
    """``x @ weight^T`` without bias; ``weight`` [out, in]. Initial values come from the table only."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((outputs, inputs), math.nan))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dim (arXiv 1910.07467): statistics in fp32 (fp64 in fp64), output in x's dtype."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.full((width,), math.nan))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class Embedding(nn.Module):
    """Rows of ``weight`` [V, E] by token id."""

    def __init__(self, vocab_size: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((vocab_size, width), math.nan))

    def forward(self, tokens: Tensor) -> Tensor:
        return F.embedding(tokens, self.weight)


class Attention(nn.Module):
    """``x + out(attend(rotate(q), rotate(k), v))`` with q, k, v from RMSNorm(x); queries, keys and values are one matrix, in that order.

    Blockwise (norm, matrix and rotation chunk by chunk, see :mod:`ringattn.model.qkv`) if the feed-forward is and there is no QK-norm.
    """

    sinks: nn.Parameter | None

    def __init__(self, cfg: ModelConfig, attend: Attend) -> None:
        super().__init__()
        self.attend, self.chunk = attend, cfg.ffn_chunk
        self.head_dim = cfg.head_dim
        self.splits = (cfg.heads, cfg.kv_heads, cfg.kv_heads)
        self.norm = RMSNorm(cfg.width, cfg.norm_eps)
        self.qkv = Linear(cfg.width, sum(self.splits) * cfg.head_dim)
        self.out = Linear(cfg.heads * cfg.head_dim, cfg.width)
        self.q_norm = RMSNorm(cfg.head_dim, cfg.norm_eps) if cfg.qk_norm else None
        self.k_norm = RMSNorm(cfg.head_dim, cfg.norm_eps) if cfg.qk_norm else None
        self.register_parameter("sinks", nn.Parameter(torch.full((cfg.heads,), math.nan)) if cfg.sinks else None)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, handle: int) -> Tensor:
        if self.chunk and self.q_norm is None:
            args = (self.norm.weight, self.qkv.weight, cos, sin, *self.splits[:2], self.norm.eps, self.chunk)
            q, k, v = blockwise_qkv(x, *args)
        else:
            qkv = rearrange(self.qkv(self.norm(x)), "b s (h d) -> b s h d", d=self.head_dim)
            q, k, v = qkv.split(self.splits, dim=2)
            if self.q_norm is not None and self.k_norm is not None:
                q, k = self.q_norm(q), self.k_norm(k)  # keeps qkv for the backward pass, so v may stay a part of it
            else:
                v = v.contiguous()  # nothing else needs qkv any more; as a view v would keep all of it alive
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        attended = self.attend(q, k, v, handle, self.sinks)
        return x + self.out(rearrange(attended, "b s h d -> b s (h d)"))


class FeedForward(nn.Module):
    """``x + down(swiglu(gate_up(RMSNorm(x))))``; blockwise with recomputation if ``chunk`` > 0 (see :mod:`ringattn.model.ffn`)."""

    def __init__(self, cfg: ModelConfig) -> None:
        super().__init__()
        self.chunk = cfg.ffn_chunk
        self.norm = RMSNorm(cfg.width, cfg.norm_eps)
        self.gate_up = Linear(cfg.width, 2 * cfg.ffn_width)
        self.down = Linear(cfg.ffn_width, cfg.width)

    def forward(self, x: Tensor) -> Tensor:
        if self.chunk:
            out: Tensor = blockwise_ffn(x, self.norm.weight, self.gate_up.weight, self.down.weight, self.norm.eps, self.chunk)
            return out
        return x + self.down(plain_swiglu(self.gate_up(self.norm(x))))


class Block(nn.Module):
    """One layer: attention, then feed-forward, both pre-norm with residual."""

    def __init__(self, cfg: ModelConfig, attend: Attend) -> None:
        super().__init__()
        self.attention = Attention(cfg, attend)
        self.ffn = FeedForward(cfg)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, handle: int) -> Tensor:
        """``x`` [B, S, E]; ``cos``, ``sin`` fp32 (fp64 in fp64) [1 or B, S, D/2]; ``handle`` of the layer's schedule. Returns [B, S, E].

        Raises TypeError if the phases came in 16 bit: FSDP's mixed precision casts a module's floating inputs unless told not to.
        """
        if cos.dtype != accumulate_dtype(x.dtype):
            raise TypeError(f"RoPE phases arrived as {cos.dtype}: use MixedPrecisionPolicy(..., cast_forward_inputs=False) for the blocks")
        out: Tensor = self.ffn(self.attention(x, cos, sin, handle))
        return out


class Transformer(nn.Module):
    """Decoder and loss in one.

    ``attend`` is called once a layer, see :data:`Attend`. Device and dtype follow torch's own contexts (``torch.device("meta")``,
    ``torch.set_default_dtype``) or ``.to``; there are no buffers. Raises ValueError, listing every mistake of ``cfg``.
    """

    def __init__(self, cfg: ModelConfig, *, attend: Attend) -> None:
        super().__init__()
        problems: list[str] = []
        cfg.validate(problems)
        if cfg.vocab_size < 1:
            problems.append(f"model.vocab_size={cfg.vocab_size}: must be set (from the data) before the model is built")
        if problems:
            raise ValueError("\n".join(problems))
        self.cfg = cfg
        self.embedding = Embedding(cfg.vocab_size, cfg.width)
        self.blocks = nn.ModuleList(Block(cfg, attend) for _ in range(cfg.layers))
        self.final_norm = RMSNorm(cfg.width, cfg.norm_eps)
        self.head = Head(cfg.vocab_size, cfg.width, tied=cfg.tied, chunk=cfg.loss_chunk, softcap=cfg.logit_softcap,
                         z_loss=cfg.z_loss)  # fmt: skip
        self._schedule_of_layer = [cfg.distinct_windows.index(w) for w in cfg.layer_windows]

    def forward(self, tokens: Tensor, positions: Tensor, labels: Tensor, schedules: Sequence[int]) -> Tensor:
        """The sum of cross-entropy over valid labels, in nats: a scalar, fp32 (fp64 for an fp64 model).

        ``tokens``, ``labels`` int64 [B, S] (label -100 = nothing to predict); ``positions`` int64 [S] or [B, S], for RoPE only;
        ``schedules``: one handle for each of ``cfg.distinct_windows``, in that order. Raises ValueError for what does not fit.
        """
        if len(schedules) != len(self.cfg.distinct_windows):
            raise ValueError(f"{len(schedules)} schedules for the windows {self.cfg.distinct_windows}: needs one each, in this order")
        if tokens.shape != labels.shape or positions.shape not in (tokens.shape, tokens.shape[1:]):
            shapes = ", ".join(f"{n} {list(t.shape)}" for n, t in (("tokens", tokens), ("positions", positions), ("labels", labels)))
            raise ValueError(f"needs tokens and labels [B, S] and positions [S] or [B, S], got {shapes}")
        x = self.embedding(tokens)
        cos, sin = rope_phases(positions, self.cfg.head_dim, self.cfg.rope_theta, accumulate_dtype(x.dtype))
        for block, schedule in zip(self.blocks, self._schedule_of_layer, strict=True):
            x = block(x, cos, sin, schedules[schedule])
        loss: Tensor = self.head(self.final_norm(x), labels, self.embedding.weight if self.cfg.tied else None)
        return loss

    def initialise(self, seed: int) -> None:
        """Fill every parameter from the table of :mod:`ringattn.model.init`: the same values for any sharding, dtype and device."""
        init.initialise(self, self.cfg, seed)

    def extra_repr(self) -> str:
        return f"name={self.cfg.name}, parameters={self.cfg.parameters():,}"
