"""The hop schedule of a batch: known before the loop, the same on every process.

Hop i brings shard w the keys of shard origin(w, offsets[i]) (ringattn.ring.turns), in a ring of one level those of (w - offsets[i])
mod W. Only offsets at which some shard has work are taken (and those at which a turn begins that has any), in ascending order; that order
is part of the contract, because it fixes the bits. Between two hops every shard passes on what it holds by one permutation, so every
process makes the same transfers whatever its own work is. What the messages carry is planned in ringattn.ring.messages.

The mask is handled as its few straight pieces (ringattn.ring.pieces); rows are written out for this process's shards only.

S positions, W shards, L rows a shard, k hops besides hop 0.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch

from ringattn.kernels.contract import Bounds, accumulate_dtype
from ringattn.kernels.intervals import ArrayLike
from ringattn.ring.balance import CostModel, Prediction, predict
from ringattn.ring.layout import Layout
from ringattn.ring.messages import Route, Transfer, arrivals, live_offsets, plan_route, plan_transfers
from ringattn.ring.pieces import Mask, build_mask, key_hulls, split_pieces, write_bounds
from ringattn.ring.ring import MAX_CACHED_SCHEDULES, Ring

__all__ = ["EXCHANGES", "MAX_HANDLES", "WIRES", "Schedule", "Transfer", "find_schedule", "make_schedule"]

EXCHANGES = ("ring", "allgather")
WIRES = ("exact", "bf16")  # dtype of travelling dK / dV: the accumulate dtype, or rounded to bf16 at each departure


class Move(NamedTuple):
    """Transfers of keys that set out before a hop's kernels: to the next hop (``near``), and from the hop that begins a turn to the one
    that begins the next (``far``), which is hop ``next_turn``."""

    near: Route | None
    far: Route | None
    next_turn: int


@dataclass(frozen=True, eq=False)
class Schedule:
    """What every hop of one batch does. Made by :func:`make_schedule`; bound to a ring, a mask and a device.

    ``offsets``: of the hops, ascending, 0 first. ``kv``: k transfers, kv[i] brings what hop i + 1 works on, from hop i or, to the first
    hop of a turn, from that of the turn before. ``dkv``: k transfers of the travelling gradients, dkv[i] leaves after hop i + 1; the last
    of a turn goes where the turn began, that of turn 0 home. ``carry``: one for each later turn, of the sum up to it: to the next
    node, the last one home. ``bounds[i][j]``: index bounds of hop i for this
    process's j-th shard, None where it has no work. ``pairs``: visible (query, key) pairs of the whole ring for one head,
    summed over the Bb rows of bounds. ``mask``: what it was made for. ``exchange``: ring, or allgather (one hop over the gathered KV
    sorted by position, no transfers; ``permutation``: the position of every row, shard after shard, and its inverse, int64 [S] each).
    ``wire``: exact, or bf16 for the travelling gradients. ``handle``: what the ops take.
    """

    ring: Ring
    layout: Layout
    offsets: tuple[int, ...]
    kv: tuple[Transfer, ...]
    dkv: tuple[Transfer, ...]
    carry: tuple[Transfer, ...]
    bounds: tuple[tuple[Bounds | None, ...], ...]
    pairs: int
    mask: Mask
    exchange: str = "ring"
    permutation: tuple[torch.Tensor, torch.Tensor] | None = None
    wire: str = "exact"
    handle: int = field(default_factory=itertools.count(1).__next__)

    def __post_init__(self) -> None:
        _HANDLES[self.handle] = self
        while len(_HANDLES) > MAX_HANDLES:
            _HANDLES.popitem(last=False)

    @cached_property
    def last_hop(self) -> tuple[int, ...]:
        """For each of this process's shards, the last hop at which it has work (0 if it has none at all)."""
        return tuple(
            max((i for i, hop in enumerate(self.bounds) if hop[j] is not None), default=0) for j in range(self.ring.virtual)
        )

    @cached_property
    def kv_routes(self) -> tuple[Route, ...]:
        """``kv`` as this process sees it."""
        return tuple(plan_route(t, self.ring) for t in self.kv)

    @cached_property
    def dkv_routes(self) -> tuple[Route, ...]:
        """``dkv`` as this process sees it."""
        return tuple(plan_route(t, self.ring) for t in self.dkv)

    @cached_property
    def carry_routes(self) -> tuple[Route, ...]:
        """``carry`` as this process sees it."""
        return tuple(plan_route(t, self.ring) for t in self.carry)

    @cached_property
    def hops_of_turns(self) -> tuple[range, ...]:
        """The hops of each turn; one turn in a ring of one level."""
        return self.ring.turns.split(self.offsets)

    @cached_property
    def kv_slots(self) -> int:
        """Buffers for keys that a pass needs on this process: what its shards hold and what arrives; in a ring of two levels also what
        the turn began with and what the next one begins with."""
        if not self.kv:
            return 0
        near, far = ([r for r in routes if r is not None] for routes in ((m.near for m in self.hop_moves), (m.far for m in self.hop_moves)))
        return self.ring.virtual * (2 if far else 1) + arrivals(near) + arrivals(far)

    @cached_property
    def arriving_gradients(self) -> int:
        """Buffers that travelling gradients from other processes arrive in, those between nodes included."""
        return arrivals(self.dkv_routes) + arrivals(self.carry_routes)

    @cached_property
    def begins(self) -> dict[int, int]:
        """The turn that a hop begins."""
        return {turn[0]: k for k, turn in enumerate(self.hops_of_turns)}

    @cached_property
    def hop_moves(self) -> tuple[Move, ...]:
        """What of the keys travels beside each hop."""
        moves = []
        for turn in self.hops_of_turns:
            more = turn[-1] + 1 < len(self.offsets)
            for hop in turn:
                near = self.kv_routes[hop] if hop < turn[-1] else None
                moves.append(Move(near, self.kv_routes[turn[-1]] if more and hop == turn[0] else None, turn[-1] + 1))
        return tuple(moves)

    def origin(self, shard: int, hop: int) -> int:
        """The shard whose keys ``shard`` works on at ``hop`` of the ring exchange."""
        return self.ring.turns.origin(shard, self.offsets[hop])

    def wire_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype in which dK and dV of inputs of ``dtype`` travel."""
        return torch.bfloat16 if self.wire == "bf16" else accumulate_dtype(dtype)

    @property
    def batch_rows(self) -> int:
        """Bb: 1 where all rows of a batch share the mask."""
        bounds = self.bounds[0][0]
        assert bounds is not None
        return bounds.lo.shape[0]

    @cached_property
    def work(self) -> np.ndarray:
        """Visible pairs of each hop and shard, the whole ring's: float64 [hops, W], for one head and summed over the Bb masks."""
        rows = [split_pieces(self.layout.chunks, row) for row in self.mask.rows]
        by_origin = np.sum([[p.pairs for p in shards] for shards in rows], axis=0).astype(np.float64)
        if self.exchange == "allgather":
            return by_origin.sum(1)[None]
        return by_origin[self.ring.turns.hop_indices()][list(self.offsets)]

    @cached_property
    def prediction(self) -> Prediction:
        """Predicted times of the ring exchange, and its ``balance``."""
        return predict(self.layout.chunks, self.mask, CostModel(), self.ring.turns)

    def message_bytes(self, *, batch: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> tuple[int, int]:
        """Bytes that each shard sends in one forward and one backward pass of the ring exchange, for inputs of ``dtype``.

        rows * 2 * batch * kv_heads * head_dim numbers for K and V in both passes, and as many in the dtype of the wire for the
        travelling dK and dV. Moves between two virtual shards of a process are counted and cost nothing.
        """
        gradients = (*(t for t in self.dkv if t.before != t.after), *self.carry)
        kv, dkv = (2 * batch * kv_heads * head_dim * sum(t.rows for t in transfers) for transfers in (self.kv, gradients))
        return kv * dtype.itemsize, kv * dtype.itemsize + dkv * self.wire_dtype(dtype).itemsize


# Ops take integers, so a schedule travels as a handle. The table keeps the latest; it is the one registry of the package.
MAX_HANDLES = 64
_HANDLES: OrderedDict[int, Schedule] = OrderedDict()


def find_schedule(handle: int) -> Schedule:
    """The schedule of a handle. Raises KeyError if more than MAX_HANDLES schedules have been made since."""
    if handle not in _HANDLES:
        raise KeyError(f"schedule handle {handle} has expired: at most {MAX_HANDLES} schedules are kept between forward and backward")
    return _HANDLES[handle]


def make_schedule(
    layout: Layout, ring: Ring, *, causal: bool = True, window: int | None = None, documents: ArrayLike | None = None,
    visible: tuple[ArrayLike, ArrayLike] | None = None, exchange: str = "ring", wire: str = "exact",
    device: torch.device | str = "cpu",
) -> Schedule:
    """The schedule of a batch: call it once a batch (and once per distinct window) and hand it to every layer.

    ``documents`` and ``visible`` are over the *whole* sequence, [S] or [B, S], as in ``flash_attention``. Cached by content on the
    ring. ``exchange``: ring | allgather. ``wire``: exact | bf16. K and V always travel as they are, and all sums are taken in the
    accumulate dtype; ``bf16`` halves the travelling gradients by rounding them each time they leave a shard (all-gather: once, on
    their way to another process). Relative error of dK and dV in the norm over a ring of W: about 1.7e-3 sqrt((W - 1) / 2), which is
    3e-3 for 8 shards and 1e-2 for 64; all-gather 1.7e-3. Everything else keeps its bits.

    Raises ValueError for masks that are not monotone intervals, for a layout made for another ring size, and for the all-gather on a
    ring of two levels.
    """
    layout.check(ring)
    if exchange not in EXCHANGES:
        raise ValueError(f"exchange={exchange!r} is unknown, choose from {', '.join(EXCHANGES)}")
    if exchange == "allgather" and ring.inner is not None:
        raise ValueError(f"exchange='allgather' has no turns: not on a ring with inner={ring.inner}")
    if wire not in WIRES:
        raise ValueError(f"wire={wire!r} is unknown, choose from {', '.join(WIRES)}")
    device = torch.device(device)
    mask = build_mask(layout.seq_len, causal=causal, window=window, documents=documents, visible=visible)
    key = (layout.key, mask.key, exchange, wire, device)
    if key in ring.schedules:
        ring.schedules.move_to_end(key)
        schedule: Schedule = ring.schedules[key]
        _HANDLES[schedule.handle] = schedule
        return schedule
    schedule = (_gathered if exchange == "allgather" else _turning)(layout, ring, mask, wire, device)
    ring.schedules[key] = schedule
    if len(ring.schedules) > MAX_CACHED_SCHEDULES:
        ring.schedules.popitem(last=False)
    return schedule


def _turning(layout: Layout, ring: Ring, mask: Mask, wire: str, device: torch.device) -> Schedule:
    """The schedule of the ring exchange."""
    rows = [split_pieces(layout.chunks, row) for row in mask.rows]
    hulls = key_hulls(rows)
    turns = ring.turns
    offsets = live_offsets(hulls, turns)
    plan = plan_transfers(offsets, hulls, layout.shard_len, turns)
    # hop 0 always runs, even where nothing is visible: it writes what later hops add to
    hops = [(q, turns.origin(q, d)) for d in offsets for q in ring.shards]
    wanted = [([shards[q] for shards in rows], o) for q, o in hops]
    live = [q == o or any(p.hulls[1][o] > 0 for p in pieces) for (q, o), (pieces, _) in zip(hops, wanted, strict=True)]
    written = iter(write_bounds(list(itertools.compress(wanted, live)), device))
    bounds = tuple(next(written) if some else None for some in live)
    by_hop = tuple(bounds[i : i + ring.virtual] for i in range(0, len(bounds), ring.virtual))
    return Schedule(ring, layout, offsets, *plan, by_hop, mask.pairs, mask, wire=wire)


def _gathered(layout: Layout, ring: Ring, mask: Mask, wire: str, device: torch.device) -> Schedule:
    """The schedule of the all-gather exchange: each shard's rows against all keys, sorted by position."""
    bounds = []
    for q in ring.shards:
        lo, stop = (np.stack(x) for x in zip(*(row.at(layout.shard_positions(q)) for row in mask.rows), strict=True))
        bounds.append(Bounds.from_rows(lo, stop, layout.seq_len, device))
    order = torch.from_numpy(np.concatenate([layout.shard_positions(w) for w in range(layout.ring_size)])).to(device)
    return Schedule(ring, layout, (0,), (), (), (), (tuple(bounds),), mask.pairs, mask, "allgather", (order, order.argsort()), wire)
