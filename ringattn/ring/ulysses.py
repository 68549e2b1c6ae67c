"""Ulysses: U processes trade rows for heads before attention and back after it (DeepSpeed-Ulysses, arXiv 2309.14509).

A wrapper around either exchange. Each of the U processes holds one of U contiguous parts of every ring shard, with all heads;
during attention it holds whole shards with H / U of the heads. KV heads are replicated when there are fewer than U, and their
gradients summed (the repeat's own derivative).

U processes, V shards a process, L rows of a whole shard, l = L / U.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from einops import rearrange, repeat
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group

from ringattn.ring.hang import exchange_error
from ringattn.ring.ring import Ring


def check_heads(heads: int, kv_heads: int, ulysses: int) -> None:
    """Raises ValueError if the heads cannot be split over ``ulysses`` processes."""
    if heads % ulysses:
        raise ValueError(f"{heads} query heads cannot be split over ulysses={ulysses}: it must divide them")
    if kv_heads % ulysses and ulysses % kv_heads:
        raise ValueError(f"{kv_heads} KV heads cannot be split over or replicated to ulysses={ulysses}: one must divide the other")


def rows_to_heads(x: Tensor, ring: Ring) -> Tensor:
    """[B, V * l, H, D] with all heads -> [B, V * L, H / U, D] with whole shards. Differentiable."""
    if x.shape[2] < ring.ulysses:
        x = repeat(x, "b s h d -> b s (h g) d", g=ring.ulysses // x.shape[2])
    sent = rearrange(x, "b s (u h) d -> (u b) s h d", u=ring.ulysses).contiguous()
    return rearrange(_all_to_all(sent, ring), "(u b) (v l) h d -> b (v u l) h d", u=ring.ulysses, v=ring.virtual)


def heads_to_rows(x: Tensor, ring: Ring) -> Tensor:
    """The way back: [B, V * L, H / U, D] -> [B, V * l, H, D]. Differentiable."""
    sent = rearrange(x, "b (v u l) h d -> (u b) (v l) h d", u=ring.ulysses, v=ring.virtual).contiguous()
    return rearrange(_all_to_all(sent, ring), "(u b) s h d -> b s (u h) d", u=ring.ulysses)


def own_heads(x: Tensor, ring: Ring) -> Tensor:
    """This process's share of a tensor with one entry a query head: [H] -> [H / U]."""
    return rearrange(x, "(u h) -> u h", u=ring.ulysses)[ring.ulysses_rank]


def _all_to_all(x: Tensor, ring: Ring) -> Tensor:
    """Exchange equal parts of dimension 0 with the U processes."""
    assert ring.ulysses_group is not None
    swapped: Tensor = torch.ops.ringattn.swap(x, ring.ulysses_group.group_name)
    return swapped


# One opaque op: part i of dimension 0 goes to process i and is replaced by what process i sends. It is its own transpose.
torch.library.define("ringattn::swap", "(Tensor x, str group_name) -> Tensor", tags=(torch.Tag.cudagraph_unsafe,))


@torch.library.impl("ringattn::swap", "default")
def _swap(x: Tensor, group_name: str) -> Tensor:
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    group: dist.ProcessGroup = _resolve_process_group(group_name)  # type: ignore[arg-type]
    try:
        dist.all_to_all_single(out, x.contiguous(), group=group)
    except RuntimeError as error:
        raise exchange_error(group, "the exchange of heads", error) from error
    return out


@torch.library.register_fake("ringattn::swap")
def _fake(x: Tensor, group_name: str) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _save(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    ctx.group_name = inputs[1]


def _derivative(ctx, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[no-untyped-def]
    return torch.ops.ringattn.swap(grad, ctx.group_name), None


torch.library.register_autograd("ringattn::swap", _derivative, setup_context=_save)
