"""Who owns which chunk of the sequence: the one table behind every layout.

The sequence is cut into N chunks of equal length C and each chunk has one owner. A shard's local rows are its chunks in order of
position, so a global interval of positions is always an interval of local indices.

S positions, W shards, L = S / W rows a shard, N = S / C chunks; every shard owns N / W of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ringattn.kernels.contract import KEY_BLOCK

TABLES = ("contiguous", "zigzag", "striped", "chunk-striped")


@dataclass(frozen=True, eq=False)
class Chunks:
    """``owners``: the shard that owns each chunk, int64 [N]; ``chunk_len``: C; ``ring_size``: W."""

    owners: np.ndarray
    chunk_len: int
    ring_size: int

    @property
    def seq_len(self) -> int:
        """S."""
        return len(self.owners) * self.chunk_len

    @property
    def shard_len(self) -> int:
        """L."""
        return self.seq_len // self.ring_size

    @cached_property
    def striped(self) -> bool:
        """Position p belongs to shard p mod W: index arithmetic is then a division, whatever N."""
        return self.chunk_len == 1 and bool((self.owners.reshape(-1, self.ring_size) == np.arange(self.ring_size)).all())

    @cached_property
    def held(self) -> np.ndarray:
        """Chunks of each shard before each chunk: int64 [N + 1, W]."""
        counts = np.zeros((len(self.owners) + 1, self.ring_size), np.int64)
        counts[np.arange(1, len(self.owners) + 1), self.owners] = 1
        return counts.cumsum(0, out=counts)

    @cached_property
    def owners_and_end(self) -> np.ndarray:
        """``owners`` and -1 for the end of the sequence, so that position S may be looked up: int64 [N + 1]."""
        return np.append(self.owners, -1)

    def positions(self, shard: int) -> np.ndarray:
        """Global positions of a shard's rows, ascending: int64 [L]."""
        starts = np.flatnonzero(self.owners == shard) * self.chunk_len
        return (starts[:, None] + np.arange(self.chunk_len)).ravel()

    def count_below(self, positions: np.ndarray) -> np.ndarray:
        """How many rows of each shard lie before each of ``positions`` (0..S): int64 [n] -> [n, W].

        That is the local index where a position would stand.
        """
        shards = np.arange(self.ring_size)
        if self.striped:
            return (positions[:, None] + (self.ring_size - 1 - shards)) // self.ring_size
        chunk, inside = np.divmod(positions, self.chunk_len)
        own = self.owners_and_end[chunk][:, None] == shards
        return self.held[chunk] * self.chunk_len + own * inside[:, None]


def chunk_length(shard_len: int, least: int = KEY_BLOCK) -> int:
    """The least divisor of ``shard_len`` that is at least ``least``, or a quarter of a shard where that is less.

    So 128 positions (a kernel tile) wherever 128 divides a shard of 512 or more. A shard of prime length is one chunk.
    """
    least = min(least, -(-shard_len // 4))
    return min(d for d in divisors(shard_len) if d >= least)


def divisors(n: int) -> list[int]:
    """All divisors, ascending."""
    small = [d for d in range(1, int(n**0.5) + 1) if n % d == 0]
    return small + [n // d for d in reversed(small) if d * d != n]


def owner_table(kind: str, seq_len: int, ring_size: int) -> Chunks:
    """The table of one of TABLES. ``seq_len`` must be a multiple of the ring size (zigzag: of twice that)."""
    w = np.arange(ring_size)
    match kind:
        case "contiguous":
            owners = w
        case "zigzag":
            owners = np.concatenate([w, w[::-1]])
        case "striped":
            owners = np.tile(w, seq_len // ring_size)
        case "chunk-striped":
            owners = np.tile(w, seq_len // ring_size // chunk_length(seq_len // ring_size))
        case _:
            raise ValueError(f"no owner table is named {kind!r}: choose from {', '.join(TABLES)}")
    return Chunks(owners, seq_len // len(owners), ring_size)
