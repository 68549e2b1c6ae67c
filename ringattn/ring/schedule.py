"""The hop schedule of a batch: known before the loop, the same on every process.

Hop i brings shard w the keys of shard (w - offsets[i]) mod W. Only offsets at which some shard has work are taken, in ascending
order; that order is part of the contract, because it fixes the bits. Between hops i and i+1 every shard passes on what it holds
by one permutation, w -> (w + shift) mod W, so every process makes the same transfers whatever its own work is.

Messages are trimmed to the rows that any later receiver needs (forward, KV) or that any earlier receiver touched (backward, the
travelling dK / dV), rounded out to blocks of KEY_BLOCK rows, and as long for every shard as the longest needs.

S positions, W shards, L rows a shard, k live offsets besides 0.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch

from ringattn.kernels.contract import KEY_BLOCK, Bounds
from ringattn.kernels.flash import content_key
from ringattn.kernels.intervals import ArrayLike, mask_intervals
from ringattn.ring.layout import Layout
from ringattn.ring.ring import MAX_CACHED_SCHEDULES, Ring

EXCHANGES = ("ring", "allgather")
Hull = tuple[int, int]  # rows [start, stop) of a shard; start == stop is empty


@dataclass(frozen=True)
class Transfer:
    """One permutation: shard w sends to (w + shift) mod W. Of the KV of shard o, rows starts[o] .. starts[o] + rows are sent."""

    shift: int
    rows: int
    starts: tuple[int, ...]

    def slice(self, origin: int) -> slice:
        """The rows of shard ``origin``'s KV (or dKV) that this message carries."""
        return slice(self.starts[origin], self.starts[origin] + self.rows)


@dataclass(frozen=True, eq=False)
class Schedule:
    """What every hop of one batch does. Made by :func:`make_schedule`; bound to a ring, a mask and a device.

    ``offsets``: live offsets, ascending, 0 first. ``kv``: k transfers, kv[i] between hops i and i + 1. ``dkv``: k transfers of the
    travelling gradients, dkv[i] leaves after hop i + 1; the last one goes home. ``bounds[i][j]``: index bounds of hop i for this
    process's j-th shard, None where it has no work. ``pairs``: visible (query, key) pairs of the whole ring for one head,
    summed over the Bb rows of bounds. ``exchange``: ring, or allgather
    (one hop over the gathered KV sorted by position, no transfers; ``permutation``: the position of every row, shard after shard, and
    its inverse, int64 [S] each). ``handle``: what the ops take.
    """

    ring: Ring
    layout: Layout
    offsets: tuple[int, ...]
    kv: tuple[Transfer, ...]
    dkv: tuple[Transfer, ...]
    bounds: tuple[tuple[Bounds | None, ...], ...]
    pairs: int
    exchange: str = "ring"
    permutation: tuple[torch.Tensor, torch.Tensor] | None = None
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

    @property
    def batch_rows(self) -> int:
        """Bb: 1 where all rows of a batch share the mask."""
        bounds = self.bounds[0][0]
        assert bounds is not None
        return bounds.lo.shape[0]


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
    visible: tuple[ArrayLike, ArrayLike] | None = None, exchange: str = "ring", device: torch.device | str = "cpu",
) -> Schedule:
    """The schedule of a batch: call it once a batch (and once per distinct window) and hand it to every layer.

    ``documents`` and ``visible`` are over the *whole* sequence, [S] or [B, S], as in ``flash_attention``. Cached by content on the
    ring. ``exchange``: ring | allgather.

    Raises ValueError for masks that are not monotone intervals and for a layout made for another ring size.
    """
    layout.positions(ring)  # refuses a layout of another size
    if exchange not in EXCHANGES:
        raise ValueError(f"exchange={exchange!r} is unknown, choose from {', '.join(EXCHANGES)}")
    device = torch.device(device)
    key = (layout.key, causal, window, content_key(documents), *(content_key(x) for x in visible or ()), exchange, device)
    if key in ring.schedules:
        ring.schedules.move_to_end(key)
        schedule: Schedule = ring.schedules[key]
        _HANDLES[schedule.handle] = schedule
        return schedule
    lo, hi = mask_intervals(layout.seq_len, causal=causal, window=window, documents=documents, visible=visible)
    pairs = int(np.maximum(hi - lo + 1, 0).sum())
    if exchange == "allgather":
        rows = [layout.shard_positions(q) for q in ring.shards]
        gathered = tuple(Bounds.from_rows(lo[:, r], hi[:, r] + 1, layout.seq_len, device) for r in rows)
        order = torch.from_numpy(np.concatenate([layout.shard_positions(r) for r in range(layout.ring_size)])).to(device)
        schedule = Schedule(ring, layout, (0,), (), (), (gathered,), pairs, exchange, (order, order.argsort()))
    else:
        hulls = _key_hulls(layout, lo, hi)
        w = layout.ring_size
        offsets = tuple(d for d in range(w) if d == 0 or any(_size(hulls[q][(q - d) % w]) for q in range(w)))
        kv, dkv = _transfers(offsets, hulls, layout.shard_len)
        bounds = tuple(tuple(_bounds(layout, lo, hi, q, (q - d) % w, device, d == 0) for q in ring.shards) for d in offsets)
        schedule = Schedule(ring, layout, offsets, kv, dkv, bounds, pairs)
    ring.schedules[key] = schedule
    if len(ring.schedules) > MAX_CACHED_SCHEDULES:
        ring.schedules.popitem(last=False)
    return schedule


def _bounds(layout: Layout, lo: np.ndarray, hi: np.ndarray, query: int, origin: int, device: torch.device, keep: bool) -> Bounds | None:
    """Local index bounds of shard ``query``'s rows against the keys of shard ``origin``; None if nothing is visible (unless ``keep``)."""
    rows = layout.shard_positions(query)
    first, stop = layout.count_below(origin, lo[:, rows]), layout.count_below(origin, hi[:, rows] + 1)
    if not keep and (stop <= first).all():
        return None
    return Bounds.from_rows(first, stop, layout.shard_len, device)


def _key_hulls(layout: Layout, lo: np.ndarray, hi: np.ndarray) -> list[list[Hull]]:
    """hulls[q][o]: the least range of local key rows of shard o that holds every key visible to shard q.

    Exact for masks without holes between consecutive rows (causal, windows, documents); for others it may count a hull as live that
    holds no visible key, which costs a transfer and changes nothing else. Works from the first and last live row of each run of
    consecutive positions, because bounds are monotone.
    """
    w, live = layout.ring_size, lo <= hi
    spans, owner = [], []  # inclusive position intervals that some run of some batch row sees, and the shard of that run
    for q in range(w):
        rows = layout.shard_positions(q)
        runs = np.split(rows, np.flatnonzero(np.diff(rows) != 1) + 1) if layout.chunk_len > 1 else [rows]
        for run, b in itertools.product(runs, range(lo.shape[0])):
            seen = run[live[b, run]]
            if seen.size:
                spans.append((lo[b, seen[0]], hi[b, seen[-1]]))
                owner.append(q)
    ends, owners = np.array(spans, np.int64).reshape(-1, 2), np.array(owner, np.int64)
    hulls: list[list[Hull]] = [[(0, 0)] * w for _ in range(w)]
    for o in range(w):
        first, stop = layout.count_below(o, ends[:, 0]), layout.count_below(o, ends[:, 1] + 1)
        for q in range(w):
            some = (first < stop) & (owners == q)
            if some.any():
                hulls[q][o] = (int(first[some].min()), int(stop[some].max()))
    return hulls


def _transfers(offsets: tuple[int, ...], hulls: list[list[Hull]], shard_len: int) -> tuple[tuple[Transfer, ...], tuple[Transfer, ...]]:
    """KV and dKV transfers. KV shrinks on its way (what later hops need), dKV grows (what earlier hops touched)."""
    w, hops = len(hulls), offsets[1:]
    touched = [[_round_out(hulls[(o + d) % w][o], shard_len) for o in range(w)] for d in hops]
    shifts = [b - a for a, b in itertools.pairwise(offsets)]
    needed = [[_union(touched[j][o] for j in range(i, len(hops))) for o in range(w)] for i in range(len(hops))]
    gone = [[_union(touched[j][o] for j in range(i + 1)) for o in range(w)] for i in range(len(hops))]
    kv = [Transfer(s, n, starts) for s, (n, starts) in zip(shifts, _nest(needed, shard_len), strict=True)]
    home = [*shifts[1:], -offsets[-1] % w] if hops else []
    dkv = [Transfer(s, n, starts) for s, (n, starts) in zip(home, reversed(_nest(gone[::-1], shard_len)), strict=True)]
    return tuple(kv), tuple(dkv)


def _nest(hulls: list[list[Hull]], shard_len: int) -> list[tuple[int, tuple[int, ...]]]:
    """Equal-length messages for a shrinking sequence of hulls per shard: each message lies within the one before it."""
    result = []
    outer_starts, outer = [0] * (len(hulls[0]) if hulls else 0), shard_len
    for step in hulls:
        rows = max(_size(h) for h in step)
        starts = [min(max(h[0], s), s + outer - rows) if _size(h) else s for h, s in zip(step, outer_starts, strict=True)]
        result.append((rows, tuple(starts)))
        outer_starts, outer = starts, rows
    return result


def _round_out(hull: Hull, shard_len: int) -> Hull:
    if not _size(hull):
        return hull
    return hull[0] // KEY_BLOCK * KEY_BLOCK, min(-(-hull[1] // KEY_BLOCK) * KEY_BLOCK, shard_len)


def _union(hulls: Iterable[Hull]) -> Hull:
    some = [h for h in hulls if _size(h)]
    return (min(h[0] for h in some), max(h[1] for h in some)) if some else (0, 0)


def _size(hull: Hull) -> int:
    return hull[1] - hull[0]
