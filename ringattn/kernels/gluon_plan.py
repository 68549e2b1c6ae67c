"""A mask as the Hopper kernels read it: which tiles to visit. Made once for each mask, on the device."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ringattn.kernels.contract import KEY_BLOCK, Bounds


@dataclass(frozen=True)
class Plan:
    """A mask as the kernels read it, for query tiles of ``rows`` rows: see ``plan_kernel`` in gluon_helpers.py for the tables."""

    lo: Tensor
    hi: Tensor
    query: Tensor
    live: Tensor
    key_rows: Tensor
    keys: Tensor


def make_plan(bounds: Bounds, rows: int, helpers: Any) -> Plan:
    """The tables of a mask for query tiles of ``rows`` rows, one small kernel. ``helpers``: the module gluon_helpers."""
    lo, hi, q_lo, q_hi = (x.contiguous() for x in (bounds.lo, bounds.hi, bounds.q_lo, bounds.q_hi))
    (batch, queries), keys = lo.shape, q_lo.shape[1]
    row_tiles, key_tiles = tiles(queries, rows), tiles(keys, KEY_BLOCK)
    shapes = ((row_tiles, 4), (key_tiles,), (key_tiles + 1,), (key_tiles, 2), (key_tiles, 2, KEY_BLOCK))
    sizes = [tiles(batch * math.prod(shape), 4) * 4 for shape in shapes]  # each starts at a multiple of 16 bytes
    parts = torch.empty(sum(sizes), dtype=torch.int32, device=lo.device).split(sizes)
    query, live, rank, key_rows, table = (
        part[: batch * math.prod(shape)].view(batch, *shape) for part, shape in zip(parts, shapes, strict=True)
    )
    helpers.plan_kernel[(batch,)](
        lo, hi, q_lo, q_hi, query, live, rank, key_rows, table, queries, keys, row_tiles, key_tiles,
        BM=rows, KEYS=KEY_BLOCK, TILES=16, num_warps=4,
    )  # fmt: skip
    return Plan(lo, hi, query, live, key_rows, table)


def tiles(length: int, tile: int) -> int:
    """How many tiles cover the length."""
    return -(-length // tile)
