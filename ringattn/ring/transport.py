"""How shards travel: buffers, messages, and the carousel that passes what each shard holds on by a permutation.

A transport allocates the buffers that travel, starts a set of messages (``post``), makes their arrival visible to the kernels
that are enqueued next (``wait``), and is told when a buffer is no longer needed (``release``). A posted receive is the credit that
lets the neighbour write: what a library's receive does, a transport that writes into a neighbour's memory signals itself.

Every process posts the same number of messages in the same order, so no order of sends and receives can block, and a buffer that
receives here has a twin of the same role on every process.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ringattn.ring.hang import guard, watch_of
from ringattn.ring.messages import Route
from ringattn.ring.ring import Ring


class Message(NamedTuple):
    """Rows of a buffer (its first dimension) to or from a process of the ring. ``twin``: this process's buffer in the role of the one
    that a sent message lands in (for a receive: the buffer itself)."""

    buffer: Tensor
    rows: slice
    process: int
    twin: Tensor

    @property
    def payload(self) -> Tensor:
        """The rows that travel, contiguous."""
        return self.buffer[self.rows]


class Note(NamedTuple):
    """What a set of messages is, for checks, error messages and traces: e.g. pass 12 ("forward"), hop 3, "kv"."""

    number: int  # passes of this ring since it was made, the same on every process
    direction: str  # forward | backward
    hop: int  # the hop after which the data is used (kv) or was made (dkv)
    what: str  # kv | dkv


class Transport(Protocol):
    """What the ring needs from a way of moving data."""

    def allocate(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """A buffer that may travel, rows first."""
        ...

    def post(self, sends: list[Message], receives: list[Message], note: Note) -> Any:
        """Start all messages; returns a ticket for :meth:`wait`. Enqueued before the kernel that hides it."""
        ...

    def wait(self, ticket: Any) -> None:
        """From here on (in stream order on a GPU) the received rows are readable and the sent buffers reusable."""
        ...

    def release(self, buffer: Tensor) -> None:
        """The buffer of a finished pass is free for another; the same on every process."""
        ...


class PointToPoint:
    """NCCL or gloo isend / irecv, one batch a step. Also serves a ring of one process, which never posts a message."""

    def __init__(self, ring: Ring, group: dist.ProcessGroup | None = None) -> None:
        self.ring, self.group = ring, group or ring.group
        self._device = torch.device("cpu")

    def allocate(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(tuple(shape), dtype=dtype, device=device)

    def post(self, sends: list[Message], receives: list[Message], note: Note) -> list[dist.Work]:
        group, peer = self.group, self.ring.global_rank
        ops = [dist.P2POp(dist.isend, x, peer(m.process), group) for m in sends if (x := m.payload).numel()]
        ops += [dist.P2POp(dist.irecv, x, peer(m.process), group) for m in receives if (x := m.payload).numel()]
        works = dist.batch_isend_irecv(ops) if ops else []
        if works:
            self._device = ops[0].tensor.device
        return works

    def wait(self, ticket: list[dist.Work]) -> None:
        if ticket:
            watch_of(self.ring).finish(ticket, self._device)

    def release(self, buffer: Tensor) -> None:
        pass


TRANSPORTS = ("auto", "p2p", "push")


def transport_of(ring: Ring) -> Transport:
    """The ring's transport, chosen once for the life of the ring: point-to-point unless ``use_transport`` said otherwise."""
    if ring.transport is None:
        ring.transport = PointToPoint(ring)
    chosen: Transport = ring.transport
    return chosen


def outer_transport_of(ring: Ring) -> Transport:
    """How shards travel between the nodes of a ring of two levels: point-to-point, in a process group of its own if there is one."""
    if ring.outer_transport is None:
        ring.outer_transport = PointToPoint(ring, ring.outer_group)
    chosen: Transport = ring.outer_transport
    return chosen


def use_transport(ring: Ring, name: str, device: torch.device) -> str:
    """Choose the ring's transport before its first pass; every process of the ring calls it alike. Returns the name of the choice.

    ``p2p``: NCCL or gloo. ``push``: copy engines into symmetric memory, within one node. ``auto``: push where all processes can.
    Raises ValueError for an unknown name, or where the ring cannot push, with the first reason.
    """
    from ringattn.ring.push import SymmetricPush, push_refusal

    if name not in TRANSPORTS:
        raise ValueError(f"transport={name!r} is unknown, choose from {', '.join(TRANSPORTS)}")
    answers: list[tuple[str, str | None]] = [(socket.gethostname(), push_refusal(ring, device))]
    if ring.group is not None and ring.processes > 1 and name != "p2p":
        answers *= ring.processes
        dist.all_gather_object(answers, answers[0], group=ring.group)
    reasons = [reason for _, reason in answers if reason]
    if ring.inner is not None:
        reasons.append(f"the ring has two levels (inner={ring.inner})")
    if len({host for host, _ in answers}) > 1:
        reasons.append("the ring spans more than one node")
    if name == "push" and reasons:
        raise ValueError(f"transport='push' is not possible: {reasons[0]}")
    if name == "p2p" or reasons:
        ring.transport = PointToPoint(ring)
        return "p2p"
    ring.transport = SymmetricPush(ring, device)
    return "push"


class Slot:
    """A travelling buffer [L, 2, B, Hkv, D] and its ``halves``, views of K and V [B, L, Hkv, D] (or of dK and dV)."""

    __slots__ = ("buffer", "halves")

    def __init__(self, buffer: Tensor) -> None:
        self.buffer = buffer
        self.halves: tuple[Tensor, Tensor] = buffer.permute(1, 2, 0, 3, 4).unbind(0)  # type: ignore[assignment]


class Pool:
    """Buffers [L, 2, B, Hkv, D] that go round: ``count`` of them, made here, before the loop, and given back when the pass is over."""

    def __init__(self, ring: Ring, shape: Sequence[int], dtype: torch.dtype, device: torch.device, count: int) -> None:
        self._transport = transport_of(ring)
        self._all = [Slot(self._transport.allocate(shape, dtype, device)) for _ in range(count)]
        self._spare = list(self._all)

    def take(self) -> Slot:
        """A free buffer: the same few go round."""
        return self._spare.pop()

    def give(self, slots: Iterable[Slot]) -> None:
        """Hand buffers back whose content is no longer needed."""
        self._spare.extend(slots)

    def close(self) -> None:
        """The pass is over: all buffers go back to the transport."""
        for slot in self._all:
            self._transport.release(slot.buffer)
        self._all, self._spare = [], []


class Carousel:
    """Passes on what each shard of this process holds: ``held[j]`` is what the j-th shard has now.

    Moves between shards of one process pass a reference; only moves to another process are messages. ``outer``: between nodes.
    """

    def __init__(self, ring: Ring, pool: Pool, *, outer: bool = False) -> None:
        self.ring, self.pool, self.transport = ring, pool, (outer_transport_of if outer else transport_of)(ring)
        self.held: list[Slot] = []
        self.lent: Sequence[Slot] = ()  # not given back when they have left: somebody else still reads them
        self._pending: tuple[Any, list[Slot], list[Slot], guard] | None = None

    def post(self, route: Route, note: Note) -> None:
        """Start passing ``held`` on; it stays readable, but must not be written, until :meth:`wait`."""
        held = self.held
        arriving = [self.pool.take() if source is None else held[source] for source in route.sources]
        receives = [Message(arriving[j].buffer, route.arrived[j], process, arriving[j].buffer) for j, process in route.receives]
        sends = [Message(held[j].buffer, route.carried[j], process, arriving[twin].buffer) for j, process, twin in route.sends]
        with guard(self.ring, "posting", note, route.targets, route.origins):
            ticket = self.transport.post(sends, receives, note)
        waiting = guard(self.ring, "waiting", note, route.targets, route.origins)
        self._pending = (ticket, arriving, [held[j] for j, _, _ in route.sends], waiting)

    def wait(self) -> None:
        """Finish what :meth:`post` started: ``held`` becomes what has arrived."""
        assert self._pending is not None
        ticket, self.held, leaving, waiting = self._pending
        self._pending = None
        with waiting:
            self.transport.wait(ticket)
        self.pool.give(leaving if not self.lent else [slot for slot in leaving if slot not in self.lent])
