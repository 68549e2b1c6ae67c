"""What travels on each hop: the fewest rows that a permutation of equal messages can carry.

Messages are trimmed to the rows that any later receiver needs (forward, KV) or that any earlier receiver touched (backward, the
travelling dK / dV), rounded out to blocks of KEY_BLOCK rows, and as long for every shard as the longest needs.

In a ring of two levels (ringattn.ring.turns) the messages within a turn are trimmed to what the rest of the turn needs, those between
nodes to what later turns need. dK / dV of a turn come to the shard that began it, are added to those of earlier turns, and go on to the
next node; those of turn 0 are home then.

W shards, L rows a shard, k hops besides hop 0.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ringattn.kernels.contract import KEY_BLOCK
from ringattn.ring.ring import Ring
from ringattn.ring.turns import Turns

Hull = tuple[int, int]  # rows [start, stop) of a shard; start == stop is empty


@dataclass(frozen=True)
class Transfer:
    """One permutation: what shards hold at offset ``before`` goes to those that hold it at ``after``. Of the KV of shard o, rows
    starts[o] .. starts[o] + rows are sent."""

    before: int
    after: int
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


class Plan(NamedTuple):
    """All transfers of a pass over the keys: see :class:`ringattn.ring.schedule.Schedule`."""

    kv: tuple[Transfer, ...]
    dkv: tuple[Transfer, ...]
    carry: tuple[Transfer, ...]


def plan_route(transfer: Transfer, ring: Ring) -> Route:
    """A transfer as the process of ``ring`` sees it."""
    turns, shards = ring.turns, ring.shards
    origins_out = [turns.origin(w, transfer.before) for w in shards]
    origins_in = [turns.origin(w, transfer.after) for w in shards]
    sources = [turns.holder(o, transfer.before) for o in origins_in]
    targets = [turns.holder(o, transfer.after) for o in origins_out]
    receives = tuple((j, s // ring.virtual) for j, s in enumerate(sources) if s not in shards)
    sends = tuple((j, t // ring.virtual, t % ring.virtual) for j, t in enumerate(targets) if t not in shards)
    return Route(
        carried=tuple(map(transfer.slice, origins_out)),
        arrived=tuple(map(transfer.slice, origins_in)),
        sources=tuple(s - shards.start if s in shards else None for s in sources),
        receives=receives, sends=sends, targets=tuple(to for _, to, _ in sends), origins=tuple(origin for _, origin in receives),
    )  # fmt: skip


def arrivals(routes: Sequence[Route]) -> int:
    """Buffers that messages of one transfer go into, at most."""
    return max((len(route.receives) for route in routes), default=0)


def live_offsets(hulls: Sequence[Sequence[Hull]], turns: Turns) -> tuple[int, ...]:
    """Offset 0, every d at which some shard has work, and the start of each turn that has any; ascending. hulls as in plan_transfers."""
    shards = range(turns.size)
    return turns.with_starts(d for d in shards if any(_size(hulls[q][turns.origin(q, d)]) for q in shards))


def plan_transfers(offsets: tuple[int, ...], hulls: Sequence[Sequence[Hull]], shard_len: int, turns: Turns) -> Plan:
    """KV shrinks on its way (what later hops need), dKV grows (what earlier hops touched).

    ``hulls[q][o]``: the least range of local key rows of shard o that holds every key visible to shard q.
    """
    touched = [[_round_out(hulls[turns.holder(o, d)][o], shard_len) for o in range(turns.size)] for d in offsets]
    hops, whole = turns.split(offsets), (shard_len, (0,) * turns.size)
    of_turn = [list(itertools.accumulate((touched[h] for h in turn), _union_each)) for turn in hops]
    left = [list(itertools.accumulate((touched[h] for h in reversed(turn)), _union_each))[::-1] for turn in hops]
    # between nodes: KV that this turn and later ones need, dKV that this turn and earlier ones (but for turn 0) touched
    later = list(itertools.accumulate((x[-1] for x in reversed(of_turn[1:])), _union_each))[::-1]
    earlier = list(itertools.accumulate((x[-1] for x in of_turn[1:]), _union_each))
    out, back = _nest(later, whole), _nest(earlier[::-1], whole)[::-1]
    starts = [offsets[turn[0]] for turn in hops]
    kv: list[Transfer] = []
    dkv: list[Transfer] = []
    for k, turn in enumerate(hops):
        here = [offsets[h] for h in turn]
        if k:
            kv.append(Transfer(starts[k - 1], starts[k], *out[k - 1]))
        inner = _nest(left[k][1:], out[k - 1] if k else whole)
        kv += [Transfer(a, b, *message) for (a, b), message in zip(itertools.pairwise(here), inner, strict=True)]
        # hop 0 stays at home
        grown = of_turn[k] if k else list(itertools.accumulate((touched[h] for h in turn[1:]), _union_each))
        messages = _nest(grown[::-1], back[k - 1] if k else whole)[::-1]
        ways = list(zip(here, [*here[1:], starts[k]], strict=True))[0 if k else 1 :]
        dkv += [Transfer(a, b, *message) for (a, b), message in zip(ways, messages, strict=True)]
    carry = [Transfer(a, b, *message) for (a, b), message in zip(itertools.pairwise((*starts[1:], 0)), back, strict=True)]
    return Plan(tuple(kv), tuple(dkv), tuple(carry))


def _nest(hulls: list[list[Hull]], within: tuple[int, tuple[int, ...]]) -> list[tuple[int, tuple[int, ...]]]:
    """Equal-length messages (rows, starts) for a shrinking sequence of hulls per shard: each lies within the one before it."""
    result = []
    outer, outer_starts = within
    for step in hulls:
        rows = max(_size(h) for h in step)
        starts = tuple(min(max(h[0], s), s + outer - rows) if _size(h) else s for h, s in zip(step, outer_starts, strict=True))
        result.append((rows, starts))
        outer, outer_starts = rows, starts
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
