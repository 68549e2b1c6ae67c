"""What travels in a pass: the keys and values, and behind them their gradients.

A ring of one level passes both on from hop to hop. In a ring of two levels (ringattn.ring.turns) what a turn began with sets out for the
next node before the turn's first kernel and is waited for after its last one; meanwhile copies of it go round the inner ring. Gradients
of a turn come together where the turn began, while the next turn's first hop is computed; added to those of earlier turns they go on to
the next node during the rest of that turn. After the last turn they have two ways to go that nothing hides: to where it began, and home.

V shards a process of L rows; packed KV is [L, 2, B, Hkv, D].
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from einops import rearrange
from torch import Tensor

from ringattn.ring.messages import Route
from ringattn.ring.schedule import Schedule
from ringattn.ring.transport import Carousel, Note, Pool, Slot

Pair = tuple[Tensor, Tensor]  # K and V, or dK and dV [B, L, Hkv, D]


class Keys:
    """The keys and values that this process's shards work on: at hop 0 their own (``home``), later ``held``."""

    def __init__(self, schedule: Schedule, home: Sequence[Pair], like: Tensor, direction: str) -> None:
        ring = schedule.ring
        self.home, self.moves, self._number, self._direction = home, schedule.hop_moves, ring.passes, direction
        self.pool = Pool(ring, packed_shape(like, schedule.layout.shard_len), like.dtype, like.device, schedule.kv_slots)
        self.near, self.far = Carousel(ring, self.pool), Carousel(ring, self.pool, outer=True) if schedule.carry else None
        if schedule.kv:  # nothing is packed if nothing travels
            self.near.held = [self.pool.take() for _ in home]
            for slot, (k, v) in zip(self.near.held, home, strict=True):
                for half, x in zip(slot.halves, (k, v), strict=True):
                    half.copy_(x)

    def at(self, hop: int, j: int) -> Pair:
        """K and V of shard j at ``hop``."""
        return self.near.held[j].halves if hop else self.home[j]

    def leave(self, hop: int) -> None:
        """Before the kernels of ``hop``: whatever travels beside them sets out."""
        move = self.moves[hop]
        if move.far is not None:
            assert self.far is not None
            self.far.held = self.far.lent = self.near.lent = list(self.near.held)
            self.far.post(move.far, Note(self._number, self._direction, move.next_turn, "outer kv"))
        if move.near is not None:
            self.near.post(move.near, Note(self._number, self._direction, hop + 1, "kv"))

    def arrive(self, hop: int) -> None:
        """After the kernels of ``hop``: the next hop's keys are here."""
        if self.moves[hop].near is not None:
            self.near.wait()
        elif self.far is not None and hop + 1 < len(self.moves):
            before = dict.fromkeys([*self.near.held, *self.far.lent])
            self.far.wait()
            self.near.held, self.near.lent = self.far.held, ()
            self.pool.give(slot for slot in before if slot not in self.near.held)

    def close(self) -> None:
        """The pass is over."""
        self.pool.close()


class Gradients:
    """The travelling dK / dV of a backward pass. ``home``: dk and dv of this process's shards, with their own contribution (offset 0) in
    place before the first hop is passed on; what comes home is added there."""

    def __init__(self, schedule: Schedule, home: Sequence[Pair], like: Tensor, wide: torch.dtype) -> None:
        ring, wire, hops = schedule.ring, schedule.wire_dtype(like.dtype), len(schedule.offsets)
        self.home, self.routes, self.carry, self.turns = home, schedule.dkv_routes, schedule.carry_routes, schedule.hops_of_turns
        self._begins, self._number, shape = schedule.begins, ring.passes, packed_shape(like, schedule.layout.shard_len)
        # a shard's dK / dV on its way, on an exact wire another that is being written meanwhile, in a ring of two levels one on its way
        # between nodes, and what arrives from other processes
        each = min(hops - 1, 2 if wire == wide else 1) + (1 if self.carry else 0)
        count = each * len(home) + schedule.arriving_gradients
        self.pool = Pool(ring, shape, wire, like.device, count)
        self.near, self.far = Carousel(ring, self.pool), Carousel(ring, self.pool, outer=True) if self.carry else None
        # where contributions are added up if the wire has another dtype; on an exact wire that is the buffer which travels
        self.sums = [] if wire == wide else [Slot(torch.empty(shape, dtype=wide, device=like.device)) for _ in home if hops > 1]

    def begin(self) -> list[Slot]:
        """Where the contributions of a hop are written, one for each shard."""
        return self.sums or [self.pool.take() for _ in self.home]

    def pass_on(self, hop: int, written: list[Slot]) -> None:
        """After the kernels of ``hop`` >= 1: add what has arrived to ``written`` (where a turn begins: finish the turn before); send it."""
        route, turn = self.routes[hop - 1], self._begins.get(hop)
        if hop > 1:
            self.near.wait()
            if turn is not None:
                self._finish(turn - 1)
            else:
                self._add(written, self.near, self.routes[hop - 2])
        self.near.held = written
        if self.sums:
            self.near.held = [self.pool.take() for _ in self.sums]
            for total, slot, some in zip(self.sums, self.near.held, route.carried, strict=True):
                slot.buffer[some] = total.buffer[some]
        self.near.post(route, Note(self._number, "backward", hop, "dkv"))

    def wait(self) -> None:
        """After the last hop: all that is on its way comes home."""
        if not self.routes:
            return
        self.near.wait()
        self._finish(len(self.turns) - 1)
        if self.far is not None:
            self.far.wait()
            self._add_home(self.far, self.carry[-1])

    def close(self) -> None:
        """The pass is over."""
        self.pool.close()

    def _finish(self, turn: int) -> None:
        """The sum of ``turn`` has arrived where the turn began: at home, or on its way there by the nodes of earlier turns."""
        last = self.turns[turn][-1]
        if last == 0:
            return
        if turn == 0:
            self._add_home(self.near, self.routes[last - 1])
            return
        assert self.far is not None
        route = self.carry[turn - 1]
        for slot, some, whole in zip(self.near.held, self.routes[last - 1].arrived, route.carried, strict=True):
            slot.buffer[whole.start : some.start].zero_()
            slot.buffer[some.stop : whole.stop].zero_()
        if turn > 1:
            self.far.wait()
            self._add(self.near.held, self.far, self.carry[turn - 2])
        self.far.held = self.near.held
        self.far.post(route, Note(self._number, "backward", last, "outer dkv"))

    def _add(self, totals: list[Slot], arrived: Carousel, route: Route) -> None:
        """Add what ``route`` has brought to ``totals``; its buffers are free then."""
        for total, slot, some in zip(totals, arrived.held, route.arrived, strict=True):
            total.buffer[some] += slot.buffer[some]
        self.pool.give(arrived.held)

    def _add_home(self, arrived: Carousel, route: Route) -> None:
        for grad, rows, slot in zip(self.home, route.arrived, arrived.held, strict=True):
            for x, y in zip(grad, slot.halves, strict=True):
                x[:, rows] += y[:, rows]
        self.pool.give(arrived.held)


def packed_shape(k: Tensor, length: int) -> tuple[int, ...]:
    """The shape of K and V of ``length`` rows, packed."""
    return (length, 2, k.shape[0], k.shape[2], k.shape[3])


def pack(k: Tensor, v: Tensor) -> Tensor:
    """K and V [B, L, Hkv, D] copied into one packed buffer [L, 2, B, Hkv, D]."""
    buffer = k.new_empty(packed_shape(k, k.shape[1]))
    for i, x in enumerate((k, v)):
        buffer[:, i].copy_(rearrange(x, "b s h d -> s b h d"))
    return buffer
