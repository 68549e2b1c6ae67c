"""Shared by the model's tests: dense attention to hand to the model, an independent fp64 model, and observers of memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ringattn.model import ModelConfig


def rel(x: Tensor, gold: Tensor) -> float:
    """Relative L2 error over the whole tensor."""
    x, gold = x.detach().double(), gold.detach().double()
    return float((x - gold).norm() / gold.norm())


def causal_mask(positions: int, window: int = 0, documents: Tensor | None = None) -> Tensor:
    """Boolean [1 or B, S, S]: which keys each query sees."""
    i = torch.arange(positions)
    mask = i[:, None] >= i[None, :]
    if window:
        mask &= i[:, None] - i[None, :] < window
    return mask[None] if documents is None else mask & (documents[:, :, None] == documents[:, None, :])


class DenseAttend:
    """Attention by one mask for each handle; records the handles in the order of the calls."""

    def __init__(self, masks: dict[int, Tensor], softcap: float = 0.0) -> None:
        self.masks, self.softcap, self.handles = masks, softcap, list[int]()

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, handle: int, sinks: Tensor | None) -> Tensor:
        self.handles.append(handle)
        return dense(q, k, v, self.masks[handle], sinks, self.softcap)


def dense(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, sinks: Tensor | None = None, softcap: float = 0.0) -> Tensor:
    group = q.shape[2] // k.shape[2]
    k, v = (t.repeat_interleave(group, dim=2) for t in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(q.shape[-1])
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~mask[:, None], -math.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.to(scores.dtype)[None, :, None, None].expand(*scores.shape[:3], 1)], dim=-1)
    weights = scores.softmax(-1)[..., : k.shape[1]]
    return torch.einsum("bhqk,bkhd->bqhd", weights, v)


def gold_loss(p: dict[str, Tensor], cfg: ModelConfig, tokens: Tensor, positions: Tensor, labels: Tensor, masks: Sequence[Tensor]) -> Tensor:
    """The model written a second time, whole and plain. ``masks``: one a layer. RoPE as a complex product."""

    def norm(x: Tensor, name: str) -> Tensor:
        return p[name] * x / torch.sqrt((x * x).mean(-1, keepdim=True) + cfg.norm_eps)

    def turn(x: Tensor) -> Tensor:
        half = cfg.head_dim // 2
        frequency = torch.tensor([cfg.rope_theta ** (-2 * i / cfg.head_dim) for i in range(half)], dtype=torch.float64)
        phase = torch.polar(torch.ones(()).double(), positions.double()[..., None] * frequency).unsqueeze(-2)
        z = torch.complex(x[..., :half], x[..., half:]) * (phase if positions.dim() == 2 else phase[None])
        return torch.cat([z.real, z.imag], -1)

    b, s = tokens.shape
    q_width, kv_width = cfg.heads * cfg.head_dim, cfg.kv_heads * cfg.head_dim
    x = p["embedding.weight"][tokens]
    for i in range(cfg.layers):
        at, ff = f"blocks.{i}.attention.", f"blocks.{i}.ffn."
        h = norm(x, at + "norm.weight")
        w_q, w_k, w_v = p[at + "qkv.weight"].split([q_width, kv_width, kv_width])
        q, k, v = ((h @ w.t()).view(b, s, -1, cfg.head_dim) for w in (w_q, w_k, w_v))
        if cfg.qk_norm:
            q, k = norm(q, at + "q_norm.weight"), norm(k, at + "k_norm.weight")
        out = dense(turn(q), turn(k), v, masks[i], p.get(at + "sinks"), cfg.softcap)
        x = x + out.reshape(b, s, -1) @ p[at + "out.weight"].t()
        h = norm(x, ff + "norm.weight")
        gate, up = p[ff + "gate_up.weight"].split(cfg.ffn_width)
        g = h @ gate.t()
        x = x + (g * torch.sigmoid(g) * (h @ up.t())) @ p[ff + "down.weight"].t()
    logits = norm(x, "final_norm.weight") @ p["embedding.weight" if cfg.tied else "head.weight"].t()
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")


class Largest(TorchDispatchMode):
    """Watches every op: the largest result, in numbers, and how often each op ran."""

    def __init__(self) -> None:
        super().__init__()
        self.numel, self.calls = 0, dict[Any, int]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.calls[func] = self.calls.get(func, 0) + 1
        for t in tree_leaves(out):
            if isinstance(t, Tensor):
                self.numel = max(self.numel, t.untyped_storage().nbytes() // t.element_size())
        return out


class Saved:
    """Bytes of distinct storages that autograd keeps while active, parameters excluded."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.known = {p.untyped_storage().data_ptr() for p in model.parameters()}
        self.storages: dict[int, Any] = {}

    def pack(self, t: Tensor) -> Tensor:
        storage = t.untyped_storage()
        if storage.data_ptr() not in self.known:
            self.storages[storage.data_ptr()] = storage  # held, so that no address is used twice
        return t

    @property
    def bytes(self) -> int:
        return sum(s.nbytes() for s in self.storages.values())

    def watch(self) -> Any:
        return torch.autograd.graph.saved_tensors_hooks(self.pack, lambda t: t)
