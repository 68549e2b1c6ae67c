"""How long a layout takes on a mask, and the ``balanced`` layout that takes the least.

A ring moves in lock step: each hop lasts as long as its slowest shard. Times are in *pairs*: what the kernel needs for one visible
(query, key) pair of one head. The model is simple on purpose; its constants are the fields of :class:`CostModel`.

    shard q with the keys of shard o    sum over q's tiles of query rows that see anything: tile * (keys in the tiles visited + state)
    hop                                 the slowest shard of that hop, or the transfer meanwhile if that takes longer
    turn                                its hops, or the transfer between nodes meanwhile (ringattn.ring.turns)
    lock-step time                      sum over hops of the slowest shard; balance = lock-step time / mean time of a shard (1 is best)

S positions, W shards, L rows a shard.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ringattn.kernels.contract import KEY_BLOCK
from ringattn.ring.chunks import TABLES, Chunks, chunk_length, owner_table
from ringattn.ring.messages import live_offsets, plan_transfers
from ringattn.ring.pieces import Mask, Pieces, key_hulls, split_pieces
from ringattn.ring.search import search
from ringattn.ring.turns import Turns

MAX_CHUNKS = 512  # that the search tells apart; a longer sequence has longer chunks


@dataclass(frozen=True)
class CostModel:
    """Constants of the prediction.

    ``tile``: rows and keys of a kernel tile. ``state``: a row's share of starting a hop, in pairs: the carried state is read and
    written (about 3 % of a hop of 8192 keys). ``transfer``: a row's time on the wire, in pairs; 512 is K and V of 8 heads for 32
    query heads of 128, in 16 bit, at 300 GB/s beside a kernel at 600 TFLOP/s. ``outer_transfer``: the same between nodes, at 50 GB/s.
    """

    tile: int = KEY_BLOCK
    state: int = 256
    transfer: int = 512
    outer_transfer: int = 3072


@dataclass(frozen=True, eq=False)
class Prediction:
    """``work``: time of queries q with keys o, int64 [W, W], in pairs, summed over the batch's masks; ``transfers``: time of the KV
    message that brings what each hop but the first works on; to the first hop of a turn it comes from another node."""

    work: np.ndarray
    offsets: tuple[int, ...]
    transfers: tuple[int, ...]
    turns: Turns

    @cached_property
    def hops(self) -> np.ndarray:
        """Time of each shard at each live hop: int64 [hops, W]."""
        return self.work[self.turns.hop_indices()][list(self.offsets)]

    @property
    def lock_step(self) -> int:
        """Sum over hops of the slowest shard's time."""
        return int(self.hops.max(1).sum())

    @property
    def balance(self) -> float:
        """Lock-step time over the mean time of a shard; 1 if there is no work."""
        return self.lock_step * len(self.work) / max(1, int(self.work.sum())) if self.work.any() else 1.0

    @property
    def time(self) -> int:
        """Lock-step time where no hop, and no turn, is shorter than the transfer that it hides."""
        slowest, sent, total = self.hops.max(1), [*self.transfers, 0], 0
        for turn in self.turns.split(self.offsets):
            within = sum(max(int(slowest[h]), sent[h]) for h in turn[:-1]) + int(slowest[turn[-1]])
            total += max(within, sent[turn[-1]])
        return total


def time_matrix(chunks: Chunks, mask: Mask, cost: CostModel) -> np.ndarray:
    """Predicted time of each shard of queries with each shard of keys: int64 [W, W]."""
    return _times([split_pieces(chunks, row) for row in mask.rows], cost)


def _times(rows: list[list[Pieces]], cost: CostModel) -> np.ndarray:
    return np.sum([[_shard_time(p, cost) for p in shards] for shards in rows], axis=0)


def _shard_time(pieces: Pieces, cost: CostModel) -> np.ndarray:
    """Time of one shard's queries with each shard's keys: int64 [W]. A row tile visits the key tiles from the start of its first
    row to the end of its last, because both ends never decrease; nothing is visited where no row sees anything at all."""
    first = np.arange(0, pieces.rows, cost.tile)
    lo, _ = pieces.at(first)
    _, stop = pieces.at(np.minimum(first + cost.tile, pieces.rows) - 1)
    tiles = -(-stop // cost.tile) - lo // cost.tile
    time: np.ndarray = cost.tile * ((cost.tile * tiles + cost.state) * (lo < stop)).sum(0)
    return time * (pieces.hulls[1] > 0)


def predict(chunks: Chunks, mask: Mask, cost: CostModel, turns: Turns | None = None) -> Prediction:
    """Predicted times of a layout on a mask; ``turns`` None: a ring of one level."""
    turns = turns or Turns(chunks.ring_size, chunks.ring_size)
    rows = [split_pieces(chunks, row) for row in mask.rows]
    hulls = key_hulls(rows)
    offsets = live_offsets(hulls, turns)
    kv = plan_transfers(offsets, hulls, chunks.shard_len, turns).kv
    each = [cost.outer_transfer if d and d % turns.node == 0 else cost.transfer for d in offsets[1:]]
    return Prediction(_times(rows, cost), offsets, tuple(t.rows * x * len(rows) for t, x in zip(kv, each, strict=True)), turns)


def plan_chunks(mask: Mask, turns: Turns, cost: CostModel) -> Chunks:
    """Owners of least lock-step time that were found: never worse than contiguous, zigzag, striped and chunk-striped.

    A pure function of its arguments with the same result on every machine. ``mask.seq_len`` must be a multiple of the ring's size.
    """
    ring_size = turns.size
    found = [owner_table(kind, mask.seq_len, ring_size) for kind in tables_for(mask.seq_len, ring_size)]
    if ring_size > 1:
        searched = _searched(mask, turns, cost)
        if searched is not None:
            found.append(searched)
    return min(found, key=lambda chunks: int(time_matrix(chunks, mask, cost)[turns.hop_indices()].max(1).sum()))


def tables_for(seq_len: int, ring_size: int) -> list[str]:
    """The fixed tables that can split a sequence of this length."""
    return [kind for kind in TABLES if kind != "zigzag" or seq_len % (2 * ring_size) == 0]


def _searched(mask: Mask, turns: Turns, cost: CostModel) -> Chunks | None:
    """The result of the search; None if a shard cannot be cut into chunks."""
    ring_size = turns.size
    shard_len = mask.seq_len // ring_size
    length = chunk_length(shard_len, max(cost.tile, shard_len * ring_size // max(MAX_CHUNKS, 2 * ring_size)))
    count = shard_len // length
    if count == 1:
        return None
    work = _chunk_work(mask, length, cost)
    fixed = cost.tile * cost.state * -(-length // cost.tile)
    return Chunks(search(work, fixed, turns, [1, *_prime_factors(count)]), length, ring_size)


def _chunk_work(mask: Mask, length: int, cost: CostModel) -> np.ndarray:
    """Pairs visited by the queries of each chunk among the keys of each chunk, row tiles as in the kernel: float64 [N, N].

    Keys visible to a row tile are an interval, and the part of an interval [a, b) in each chunk is h(b) - h(a) with h(x) = C in
    chunks before x's and the rest in x's own: sums of h are sums of steps.
    """
    count, rows = mask.seq_len // length, min(cost.tile, length)
    first = np.arange(0, length, rows) + length * np.arange(count)[:, None]
    last = np.minimum(first + rows, length * np.arange(1, count + 1)[:, None]) - 1
    chunk = np.repeat(np.arange(count), first.shape[1]) * (count + 2)
    steps = np.zeros(count * (count + 2))
    for p in mask.rows:
        lo, stop = p.at(first.ravel())[0], p.at(last.ravel())[1]
        some = lo < stop
        if length % cost.tile == 0:
            lo, stop = lo // cost.tile * cost.tile, -(-stop // cost.tile) * cost.tile
        for x, sign in ((stop, rows), (lo, -rows)):
            own, rest = np.divmod(np.where(some, x, 0), length)
            steps += np.bincount(chunk + own + 1, sign * rest, len(steps)) + np.bincount(chunk + own, sign * (length - rest), len(steps))
    grid = steps.reshape(count, count + 2)[:, 1:]
    return grid[:, ::-1].cumsum(1)[:, ::-1][:, :count]


def _prime_factors(n: int) -> list[int]:
    """Ascending, so that the first level of the search has as few chunks as possible: [2, 2, 3] for 12."""
    factors, d = [], 2
    while n > 1:
        while n % d == 0:
            factors.append(d)
            n //= d
        d += 1
    return factors
