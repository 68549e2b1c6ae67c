"""How shards travel: buffers, messages, and the carousel that passes what each shard holds on by a permutation.

A transport allocates the buffers that travel, starts a set of messages (``post``), makes their arrival visible to the kernels
that are enqueued next (``wait``), and is told when a buffer is no longer needed (``release``). A posted receive is the credit that
lets the neighbour write: what a library's receive does, a transport that writes into a neighbour's memory signals itself.

Every process posts the same number of messages in the same order, so no order of sends and receives can block, and a buffer that
receives here has a twin of the same role on every process.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ringattn.ring.hang import guard, watch_of
from ringattn.ring.ring import Ring
from ringattn.ring.schedule import Transfer


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

    def __init__(self, ring: Ring) -> None:
        self.ring = ring
        self._device = torch.device("cpu")

    def allocate(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(tuple(shape), dtype=dtype, device=device)

    def post(self, sends: list[Message], receives: list[Message], note: Note) -> list[dist.Work]:
        group, peer = self.ring.group, self.ring.global_rank
        ops = [dist.P2POp(dist.isend, m.payload, peer(m.process), group) for m in sends if m.payload.numel()]
        ops += [dist.P2POp(dist.irecv, m.payload, peer(m.process), group) for m in receives if m.payload.numel()]
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
    if len({host for host, _ in answers}) > 1:
        reasons.append("the ring spans more than one node")
    if name == "push" and reasons:
        raise ValueError(f"transport='push' is not possible: {reasons[0]}")
    if name == "p2p" or reasons:
        ring.transport = PointToPoint(ring)
        return "p2p"
    ring.transport = SymmetricPush(ring, device)
    return "push"


class Carousel:
    """One travelling buffer for each shard of this process, and the spare ones that arrivals go into.

    ``held[j]`` is what this process's j-th shard holds now. Moves between shards of one process pass a reference; only moves
    to another process are messages. A message's rows depend on whose data it is: at offset d, shard w holds that of w - d.
    """

    def __init__(self, ring: Ring, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> None:
        self.ring, self.transport = ring, transport_of(ring)
        self._make = lambda: self.transport.allocate(shape, dtype, device)
        self._spare: list[Tensor] = []
        self.held: list[Tensor] = []
        self._pending: tuple[Any, list[Tensor], list[Tensor], guard] | None = None

    def take(self) -> Tensor:
        """A free buffer (allocated in the first hops only; afterwards the same few go round)."""
        return self._spare.pop() if self._spare else self._make()

    def give(self, buffers: Sequence[Tensor]) -> None:
        """Hand buffers back whose content is no longer needed."""
        self._spare.extend(buffers)

    def close(self) -> None:
        """The pass is over: all buffers go back to the transport."""
        for buffer in (*self._spare, *self.held):
            self.transport.release(buffer)
        self._spare, self.held = [], []

    def post(self, transfer: Transfer, offset: int, note: Note) -> None:
        """Start passing ``held`` on; it stays readable, but must not be written, until :meth:`wait`."""
        ring, size, start = self.ring, self.ring.size, self.ring.shards.start
        came_from = [(w - transfer.shift) % size for w in ring.shards]
        arriving = [self.held[s - start] if s in ring.shards else self.take() for s in came_from]
        receives = [
            Message(buffer, transfer.slice((s - offset) % size), s // ring.virtual, buffer)
            for s, buffer in zip(came_from, arriving, strict=True) if s not in ring.shards
        ]
        leaving, sends = [], []
        for w, buffer in zip(ring.shards, self.held, strict=True):
            target = (w + transfer.shift) % size
            if target not in ring.shards:
                twin = arriving[target % ring.virtual]
                sends.append(Message(buffer, transfer.slice((w - offset) % size), target // ring.virtual, twin))
                leaving.append(buffer)
        peers = [m.process for m in sends], [m.process for m in receives]
        with guard(ring, "posting", note, *peers):
            ticket = self.transport.post(sends, receives, note)
        self._pending = (ticket, arriving, leaving, guard(ring, "waiting", note, *peers))

    def wait(self) -> None:
        """Finish what :meth:`post` started: ``held`` becomes what has arrived."""
        assert self._pending is not None
        ticket, self.held, leaving, waiting = self._pending
        self._pending = None
        with waiting:
            self.transport.wait(ticket)
        self.give(leaving)
