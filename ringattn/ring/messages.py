"""What travels on each hop: the fewest rows that a permutation of equal messages can carry.

Messages are trimmed to the rows that any later receiver needs (forward, KV) or that any earlier receiver touched (backward, the
travelling dK / dV), rounded out to blocks of KEY_BLOCK rows, and as long for every shard as the longest needs.

W shards, L rows a shard, k live offsets besides 0.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ringattn.kernels.contract import KEY_BLOCK
from ringattn.ring.ring import Ring

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


class Route(NamedTuple):
    """A transfer as one process sees it, worked out before the loop. Own shards are numbered 0 .. V - 1.

    ``carried``, ``arrived``: the rows that own shard j sends, and that it gets. ``sources``: the own shard whose buffer j gets, None
    where a message brings it. ``receives``: (own shard, process it comes from). ``sends``: (own shard, process it goes to, own shard
    in the role of the receiver). ``targets``, ``origins``: those processes.
    """

    carried: tuple[slice, ...]
    arrived: tuple[slice, ...]
    sources: tuple[int | None, ...]
    receives: tuple[tuple[int, int], ...]
    sends: tuple[tuple[int, int, int], ...]
    targets: tuple[int, ...]
    origins: tuple[int, ...]


def plan_route(transfer: Transfer, offset: int, ring: Ring) -> Route:
    """The route of a transfer by which each shard w passes on what it holds of shard w - ``offset``."""
    size, shards = ring.size, ring.shards
    sources = [(w - transfer.shift) % size for w in shards]
    targets = [(w + transfer.shift) % size for w in shards]
    receives = tuple((j, s // ring.virtual) for j, s in enumerate(sources) if s not in shards)
    sends = tuple((j, t // ring.virtual, t % ring.virtual) for j, t in enumerate(targets) if t not in shards)
    return Route(
        carried=tuple(transfer.slice((w - offset) % size) for w in shards),
        arrived=tuple(transfer.slice((s - offset) % size) for s in sources),
        sources=tuple(s - shards.start if s in shards else None for s in sources),
        receives=receives, sends=sends, targets=tuple(to for _, to, _ in sends), origins=tuple(origin for _, origin in receives),
    )  # fmt: skip


def live_offsets(hulls: Sequence[Sequence[Hull]]) -> tuple[int, ...]:
    """Offset 0 and every d at which some shard q has work with the keys of shard q - d, ascending. hulls[q][o] as in plan_transfers."""
    w = len(hulls)
    return tuple(d for d in range(w) if d == 0 or any(_size(hulls[q][(q - d) % w]) for q in range(w)))


def plan_transfers(
    offsets: tuple[int, ...], hulls: Sequence[Sequence[Hull]], shard_len: int
) -> tuple[tuple[Transfer, ...], tuple[Transfer, ...]]:
    """KV and dKV transfers, k each. KV shrinks on its way (what later hops need), dKV grows (what earlier hops touched).

    ``hulls[q][o]``: the least range of local key rows of shard o that holds every key visible to shard q.
    """
    w, hops = len(hulls), offsets[1:]
    touched = [[_round_out(hulls[(o + d) % w][o], shard_len) for o in range(w)] for d in hops]
    shifts = [b - a for a, b in itertools.pairwise(offsets)]
    gone = [list(step) for step in itertools.accumulate(touched, _union_each)]
    needed = [list(step) for step in itertools.accumulate(reversed(touched), _union_each)][::-1]
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


def _union_each(some: Sequence[Hull], others: Sequence[Hull]) -> list[Hull]:
    return [_union(pair) for pair in zip(some, others, strict=True)]


def _union(hulls: Iterable[Hull]) -> Hull:
    some = [h for h in hulls if _size(h)]
    return (min(h[0] for h in some), max(h[1] for h in some)) if some else (0, 0)


def _size(hull: Hull) -> int:
    return hull[1] - hull[0]
