"""A layout says which shard holds which positions: a table that gives each chunk of the sequence its owner.

The sequence is cut into chunks of equal length and each chunk has one owner; a shard's local rows are its chunks in order of
position. So a global interval of positions is always an interval of local indices, which is all that the schedule needs.

    contiguous      W chunks, chunk r to shard r
    zigzag          2W chunks, r and 2W-1-r to shard r: equal causal work, and only hop 0 is masked (as in Llama 3, arXiv 2407.21783)
    striped         S chunks of one position, p to shard p mod W (Striped Attention, arXiv 2311.09431)
    chunk-striped   chunks of whole kernel tiles, c to shard c mod W: the balance of striped without its half-masked tiles. A chunk is
                    the least divisor of L that is at least 128 (for shards shorter than 512: at least L / 4)
    balanced        chunks where the documents of a batch make the ring's lock-step time least; see ringattn.ring.balance

With ``ulysses`` U, each shard is split once more, contiguously, in U equal parts of its local rows, one a process.

Padding: a sequence of a length that a layout cannot split is padded at its tail to :func:`padded_length`, tokens with any id, labels
ignored, documents -1. Padded rows see nothing and are seen by nobody, so attention spends no pairs on them; everything that is
row-local (embedding, norms, FFN, loss) and every message costs padded_length / S as much. Contiguous puts all of it on the last shard.

S positions, W shards, L = S / W rows a shard, P processes in the ring, V shards a process.
"""

from __future__ import annotations

import hashlib
import math
from functools import cached_property

import numpy as np
import torch
import torch.distributed as dist
from einops import rearrange
from torch import Tensor

from ringattn.kernels.contract import KEY_BLOCK
from ringattn.kernels.intervals import ArrayLike
from ringattn.ring.balance import CostModel, Prediction, plan_chunks, predict, tables_for
from ringattn.ring.chunks import TABLES, Chunks, owner_table
from ringattn.ring.pieces import build_mask
from ringattn.ring.ring import Ring
from ringattn.ring.turns import Turns

LAYOUTS = TABLES  # those that depend on nothing but lengths
ALL_LAYOUTS = (*LAYOUTS, "balanced")


def _quantum(kind: str, ring_size: int, ulysses: int) -> int:
    """Every length that ``kind`` can split is a multiple of this: two chunks a shard in zigzag, U parts a shard."""
    return ring_size * (math.lcm(2, ulysses) if kind == "zigzag" else ulysses)


def next_length(kind: str, seq_len: int, ring_size: int, ulysses: int = 1) -> int:
    """The least length >= ``seq_len`` that ``kind`` can split over ``ring_size`` shards of ``ulysses`` parts."""
    quantum = _quantum(kind, ring_size, ulysses)
    return max(1, -(-seq_len // quantum)) * quantum


def padded_length(kind: str, seq_len: int, ring_size: int, ulysses: int = 1) -> int:
    """The length to pad to: the least >= ``seq_len`` that ``kind`` splits *well*.

    That is :func:`next_length`, but for layouts of chunks of tiles: there shards of 512 rows or more become whole tiles of
    128 rows, so that chunks are 128 rows too. It costs at most 128 * W * U tokens a sequence (lengths that are such already: none).
    """
    whole = ring_size * math.lcm(KEY_BLOCK, ulysses)
    if kind in ("chunk-striped", "balanced") and seq_len >= 4 * KEY_BLOCK * ring_size:
        return -(-seq_len // whole) * whole
    return next_length(kind, seq_len, ring_size, ulysses)


class Layout:
    """Which positions each of ``ring_size`` shards holds.

    Args:
        kind: contiguous | zigzag | striped | chunk-striped (or chunk_striped) | balanced.
        seq_len: S, positions of the whole sequence; must be a multiple of W * U, and of 2 W in zigzag.
        ring_size: W.
        ulysses: U, the processes that share each shard.
        documents: what ``balanced`` is planned for, int [S] or [B, S] as in ``make_schedule``; every process must give the same.
        causal, window: the mask that ``balanced`` is planned for; with several windows in a model, its widest.
        inner: shards a node that ``balanced`` is planned for and :meth:`predict` goes by, as of the ring; None: a ring of one level.
        cost: constants of the prediction that ``balanced`` goes by.

    Attributes: ``kind``, ``seq_len``, ``ring_size``, ``ulysses``, ``shard_len`` L.

    Raises ValueError naming the argument, its value and what is allowed (for ``seq_len``: the next length that works).
    """

    def __init__(
        self, kind: str, seq_len: int, ring_size: int, ulysses: int = 1, documents: ArrayLike | None = None, *,
        causal: bool = True, window: int | None = None, inner: int | None = None, cost: CostModel | None = None,
    ) -> None:
        kind = kind.replace("_", "-")
        if kind not in ALL_LAYOUTS:
            raise ValueError(f"layout {kind!r} is unknown, choose from {', '.join(ALL_LAYOUTS)}")
        for name, value in (("ring_size", ring_size), ("ulysses", ulysses)):
            if isinstance(value, bool) or value < 1:
                raise ValueError(f"{name}={value} must be >= 1")
        if seq_len < 1 or seq_len != next_length(kind, seq_len, ring_size, ulysses):
            what = "ring size" if ulysses == 1 else f"ring size {ring_size} and of ulysses={ulysses} in every shard"
            what = f"2 * {what}" if kind == "zigzag" else f"the {what}"
            raise ValueError(
                f"seq_len={seq_len} cannot be split by layout {kind!r}: it must be a multiple of {what}"
                f" = {_quantum(kind, ring_size, ulysses)}; the next length that works is {next_length(kind, seq_len, ring_size, ulysses)}"
            )
        if (documents is None) == (kind == "balanced"):
            needs = "is planned for the documents of a batch: give documents" if documents is None else (
                "does not depend on documents: leave documents None"
            )
            raise ValueError(f"layout {kind!r} {needs}")
        self.kind, self.seq_len, self.ring_size, self.ulysses = kind, seq_len, ring_size, ulysses
        self.shard_len = seq_len // ring_size
        self.turns = Turns(ring_size, inner or ring_size)
        self.key: tuple[object, ...] = (kind, seq_len, ring_size, ulysses)  # equal for equal layouts
        if kind == "balanced":
            mask = build_mask(seq_len, causal=causal, window=window, documents=documents)
            self.chunks = plan_chunks(mask, self.turns, cost or CostModel())
            self.key += (hashlib.sha256(self.chunks.owners.tobytes()).hexdigest()[:16],)

    @cached_property
    def chunks(self) -> Chunks:
        """The table of owners."""
        return owner_table(self.kind, self.seq_len, self.ring_size)

    @property
    def owners(self) -> np.ndarray:
        """The shard that owns each chunk: int64 [chunks]."""
        return self.chunks.owners

    @property
    def chunk_len(self) -> int:
        """Positions in a chunk."""
        return self.chunks.chunk_len

    def shard_positions(self, shard: int) -> np.ndarray:
        """Global positions of a shard's rows, in local order (ascending): int64 [L]."""
        return self.chunks.positions(shard)

    def count_below(self, shard: int, positions: np.ndarray) -> np.ndarray:
        """How many of a shard's rows lie before each of ``positions`` (0..S): the local index where that position would stand."""
        return np.searchsorted(self.shard_positions(shard), positions)

    def predict(
        self, *, causal: bool = True, window: int | None = None, documents: ArrayLike | None = None,
        visible: tuple[ArrayLike, ArrayLike] | None = None, cost: CostModel | None = None,
    ) -> Prediction:
        """How long the ring takes on a mask (arguments as in ``make_schedule``), and how well its shards are balanced."""
        mask = build_mask(self.seq_len, causal=causal, window=window, documents=documents, visible=visible)
        return predict(self.chunks, mask, cost or CostModel(), self.turns)

    @cached_property
    def _order(self) -> Tensor:
        """Global position of every row, shard after shard: int64 [S]."""
        return torch.from_numpy(np.concatenate([self.shard_positions(w) for w in range(self.ring_size)]))

    def positions(self, ring: Ring) -> Tensor:
        """Global positions of this process's rows, its (parts of) shards laid end to end: int64 [V * L / U] on the CPU."""
        self.check(ring)
        shards = rearrange(self._order, "(w u l) -> w u l", w=self.ring_size, u=self.ulysses)
        return shards[ring.shards.start : ring.shards.stop, ring.ulysses_rank].flatten()

    def shard(self, x: Tensor, ring: Ring, dim: int = 1) -> Tensor:
        """This process's rows of a whole-sequence tensor: dimension ``dim`` shrinks from S to S / (P * U). Differentiable.

        Raises ValueError if that dimension does not hold S rows.
        """
        if x.shape[dim] != self.seq_len:
            shape = tuple(x.shape)
            raise ValueError(f"cannot shard dim {dim} of a tensor of shape {shape}: it must hold the whole {self.seq_len} positions")
        return x.index_select(dim, self.positions(ring).to(x.device))

    def unshard(self, local: Tensor, ring: Ring, dim: int = 1) -> Tensor:
        """Gather the whole sequence on every process: dimension ``dim`` grows from S / (P * U) to S. Not differentiable.

        Raises ValueError if that dimension does not hold S / (P * U) rows.
        """
        self.check(ring)
        rows = self.seq_len // (ring.processes * self.ulysses)
        if local.shape[dim] != rows:
            raise ValueError(f"cannot unshard dim {dim} of a tensor of shape {tuple(local.shape)}: it must hold {rows} rows")
        x = local.detach().movedim(dim, 0)
        x = rearrange(_gather(x, ring.ulysses_group, ring.ulysses), "(u v l) ... -> (v u l) ...", u=self.ulysses, v=ring.virtual)
        x = _gather(x, ring.group, ring.processes)
        return x.index_select(0, torch.argsort(self._order).to(x.device)).movedim(0, dim)

    def check(self, ring: Ring) -> None:
        """Raises ValueError if this layout is not for ``ring``."""
        if ring.size != self.ring_size:
            raise ValueError(f"the layout is for a ring of {self.ring_size} shards but the ring has {ring.size}")
        if ring.ulysses != self.ulysses:
            raise ValueError(f"the layout is for ulysses={self.ulysses} but the ring has ulysses={ring.ulysses}")

    def __repr__(self) -> str:
        ulysses = f", ulysses={self.ulysses}" if self.ulysses > 1 else ""
        return f"Layout({self.kind!r}, seq_len={self.seq_len}, ring_size={self.ring_size}{ulysses})"


def choose_layout(
    seq_len: int, ring_size: int, causal: bool = True, window: int | None = None, documents: ArrayLike | None = None, *,
    ulysses: int = 1, inner: int | None = None, cost: CostModel | None = None,
) -> Layout:
    """The layout of least predicted time (``parallel.layout=auto``) for a mask, transfers included: ``Prediction.time``.

    Tries every kind that can split ``seq_len``, ``balanced`` only for documents. Of equals, the simplest. A pure function: every
    process that gives the same arguments gets the same layout. Raises ValueError if no kind can split ``seq_len``.
    """
    cost = cost or CostModel()
    mask = build_mask(seq_len, causal=causal, window=window, documents=documents)
    Layout("contiguous", seq_len, ring_size, ulysses)  # refuses what nothing can split
    kinds = [kind for kind in tables_for(seq_len, ring_size) if next_length(kind, seq_len, ring_size, ulysses) == seq_len]
    layouts = [Layout(kind, seq_len, ring_size, ulysses, inner=inner) for kind in kinds]
    if documents is not None:
        layouts.append(Layout("balanced", seq_len, ring_size, ulysses, documents, causal=causal, window=window, inner=inner, cost=cost))
    return min(layouts, key=lambda layout: predict(layout.chunks, mask, cost, layout.turns).time)


def _gather(x: Tensor, group: dist.ProcessGroup | None, processes: int) -> Tensor:
    """The tensors of a group's processes, one after the other along dimension 0."""
    if processes == 1:
        return x
    parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(processes)]
    dist.all_gather(parts, x.contiguous(), group=group)
    return torch.cat(parts)
