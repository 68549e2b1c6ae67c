"""A layout says which shard holds which positions: a table that gives each chunk of the sequence its owner.

The sequence is cut into chunks of equal length and each chunk has one owner; a shard's local rows are its chunks in order of
position. So a global interval of positions is always an interval of local indices, which is all that the schedule needs.

    contiguous   W chunks, chunk r to shard r
    zigzag       2W chunks, r and 2W-1-r to shard r: equal causal work, and only hop 0 is masked (as in Llama 3, arXiv 2407.21783)
    striped      S chunks of one position, p to shard p mod W (Striped Attention, arXiv 2311.09431)

S positions, W shards, L = S / W rows a shard.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np
import torch
import torch.distributed as dist
from einops import rearrange
from torch import Tensor

from ringattn.ring.ring import Ring

LAYOUTS = ("contiguous", "zigzag", "striped")


def next_length(kind: str, seq_len: int, ring_size: int) -> int:
    """The least length >= ``seq_len`` that ``kind`` can split over ``ring_size`` shards."""
    quantum = 2 * ring_size if kind == "zigzag" else ring_size
    return max(1, -(-seq_len // quantum)) * quantum


class Layout:
    """Which positions each of ``ring_size`` shards holds.

    Args:
        kind: contiguous | zigzag | striped.
        seq_len: S, positions of the whole sequence; must be a multiple of W (contiguous, striped) or 2 W (zigzag).
        ring_size: W.
        ulysses, documents: for layouts that are not offered yet; anything but the default is refused.

    Raises ValueError naming the argument, its value and what is allowed (for ``seq_len``: the next length that works).
    """

    def __init__(self, kind: str, seq_len: int, ring_size: int, ulysses: int = 1, documents: Tensor | None = None) -> None:
        if kind not in LAYOUTS:
            raise ValueError(f"layout {kind!r} is unknown, choose from {', '.join(LAYOUTS)}")
        if ring_size < 1:
            raise ValueError(f"ring_size={ring_size} must be >= 1")
        if seq_len < 1 or seq_len != next_length(kind, seq_len, ring_size):
            what = f"2 * ring size = {2 * ring_size}" if kind == "zigzag" else f"the ring size {ring_size}"
            raise ValueError(
                f"seq_len={seq_len} cannot be split by layout {kind!r}: it must be a multiple of {what}; "
                f"the next length that works is {next_length(kind, seq_len, ring_size)}"
            )
        if ulysses != 1:
            raise ValueError(f"ulysses={ulysses} is not offered by layout {kind!r}: only 1 is allowed")
        if documents is not None:
            raise ValueError(f"layout {kind!r} does not depend on documents: leave it None")
        self.kind, self.seq_len, self.ring_size = kind, seq_len, ring_size
        self.shard_len = seq_len // ring_size

    @cached_property
    def owners(self) -> np.ndarray:
        """The shard that owns each chunk: int64 [chunks]."""
        w = np.arange(self.ring_size)
        match self.kind:
            case "contiguous":
                return w
            case "zigzag":
                return np.concatenate([w, w[::-1]])
            case _:  # striped
                return np.tile(w, self.shard_len)

    @property
    def chunk_len(self) -> int:
        """Positions in a chunk."""
        return self.seq_len // len(self.owners)

    def shard_positions(self, shard: int) -> np.ndarray:
        """Global positions of a shard's rows, in local order (ascending): int64 [L]."""
        chunks = np.flatnonzero(self.owners == shard)
        return rearrange(chunks[:, None] * self.chunk_len + np.arange(self.chunk_len), "c p -> (c p)")

    def count_below(self, shard: int, positions: np.ndarray) -> np.ndarray:
        """How many of a shard's rows lie before each of ``positions`` (0..S): the local index where that position would stand."""
        held = np.concatenate([[0], np.cumsum(self.owners == shard)])
        chunk, inside = np.divmod(positions, self.chunk_len)
        own = np.append(self.owners == shard, False)[chunk]
        return held[chunk] * self.chunk_len + own * inside

    @cached_property
    def _order(self) -> Tensor:
        """Global position of every row, shard after shard: int64 [S]."""
        return torch.from_numpy(np.concatenate([self.shard_positions(w) for w in range(self.ring_size)]))

    def positions(self, ring: Ring) -> Tensor:
        """Global positions of this process's rows, its shards laid end to end: int64 [V * L] on the CPU."""
        self._check(ring)
        return self._order[ring.shards.start * self.shard_len : ring.shards.stop * self.shard_len]

    def shard(self, x: Tensor, ring: Ring, dim: int = 1) -> Tensor:
        """This process's rows of a whole-sequence tensor: dimension ``dim`` shrinks from S to S / P. Differentiable.

        Raises ValueError if that dimension does not hold S rows.
        """
        if x.shape[dim] != self.seq_len:
            shape = tuple(x.shape)
            raise ValueError(f"cannot shard dim {dim} of a tensor of shape {shape}: it must hold the whole {self.seq_len} positions")
        return x.index_select(dim, self.positions(ring).to(x.device))

    def unshard(self, local: Tensor, ring: Ring, dim: int = 1) -> Tensor:
        """Gather the whole sequence on every process: dimension ``dim`` grows from S / P to S. Not differentiable.

        Raises ValueError if that dimension does not hold S / P rows.
        """
        self._check(ring)
        if local.shape[dim] != self.seq_len // ring.processes:
            raise ValueError(
                f"cannot unshard dim {dim} of a tensor of shape {tuple(local.shape)}: it must hold {self.seq_len // ring.processes} rows"
            )
        parts = [local]
        if ring.processes > 1:
            parts = [torch.empty_like(local, memory_format=torch.contiguous_format) for _ in range(ring.processes)]
            dist.all_gather(parts, local.detach().contiguous(), group=ring.group)
        gathered = torch.cat(parts, dim)
        return gathered.index_select(dim, torch.argsort(self._order).to(local.device))

    def _check(self, ring: Ring) -> None:
        if ring.size != self.ring_size:
            raise ValueError(f"the layout is for a ring of {self.ring_size} shards but the ring has {ring.size}")

    @property
    def key(self) -> tuple[object, ...]:
        """Equal for equal layouts."""
        return (self.kind, self.seq_len, self.ring_size)

    def __repr__(self) -> str:
        return f"Layout({self.kind!r}, seq_len={self.seq_len}, ring_size={self.ring_size})"
