"""How shards travel: buffers, messages, and the carousel that passes what each shard holds on by a permutation.

A transport allocates the buffers that travel, starts a set of messages (``post``), makes their arrival visible to the kernels
that are enqueued next (``wait``), and is told when a buffer's content is no longer needed (``release``): a transport that
writes into a neighbour's memory turns that into a credit. Point-to-point needs no credit, because a receive must be posted.

Every process posts the same number of messages in the same order, so no order of sends and receives can block.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ringattn.ring.ring import Ring
from ringattn.ring.schedule import Transfer


class Message(NamedTuple):
    """Rows of a buffer (its first dimension) to or from a process of the ring."""

    buffer: Tensor
    rows: slice
    process: int

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
        """The buffer's content has been used by all work enqueued so far: its owner upstream may overwrite it."""
        ...


class PointToPoint:
    """NCCL or gloo isend / irecv, one batch a step. Also serves a ring of one process, which never posts a message."""

    def __init__(self, ring: Ring) -> None:
        self.ring = ring

    def allocate(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(tuple(shape), dtype=dtype, device=device)

    def post(self, sends: list[Message], receives: list[Message], note: Note) -> list[dist.Work]:
        group, peer = self.ring.group, self.ring.global_rank
        ops = [dist.P2POp(dist.isend, m.payload, peer(m.process), group) for m in sends if m.payload.numel()]
        ops += [dist.P2POp(dist.irecv, m.payload, peer(m.process), group) for m in receives if m.payload.numel()]
        return dist.batch_isend_irecv(ops) if ops else []

    def wait(self, ticket: list[dist.Work]) -> None:
        for work in ticket:
            work.wait()

    def release(self, buffer: Tensor) -> None:
        pass


def transport_of(ring: Ring) -> Transport:
    """The ring's transport, chosen once for the life of the ring."""
    if ring.transport is None:
        ring.transport = PointToPoint(ring)
    chosen: Transport = ring.transport
    return chosen


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
        self._pending: tuple[Any, list[Tensor], list[Tensor]] | None = None

    def take(self) -> Tensor:
        """A free buffer (allocated in the first hops only; afterwards the same few go round)."""
        return self._spare.pop() if self._spare else self._make()

    def give(self, buffers: Sequence[Tensor]) -> None:
        """Hand buffers back whose content is no longer needed."""
        for buffer in buffers:
            self.transport.release(buffer)
        self._spare.extend(buffers)

    def post(self, transfer: Transfer, offset: int, note: Note) -> None:
        """Start passing ``held`` on; it stays readable, but must not be written, until :meth:`wait`."""
        ring, size, start = self.ring, self.ring.size, self.ring.shards.start
        arriving: dict[int, Tensor] = {}
        leaving, sends, receives = [], [], []
        for j, w in enumerate(ring.shards):
            target = (w + transfer.shift) % size
            if target in ring.shards:
                arriving[target - start] = self.held[j]
            else:
                sends.append(Message(self.held[j], transfer.slice((w - offset) % size), target // ring.virtual))
                leaving.append(self.held[j])
        for j, w in enumerate(ring.shards):
            source = (w - transfer.shift) % size
            if j not in arriving:
                arriving[j] = self.take()
                receives.append(Message(arriving[j], transfer.slice((source - offset) % size), source // ring.virtual))
        ticket = self.transport.post(sends, receives, note)
        self._pending = (ticket, [arriving[j] for j in range(ring.virtual)], leaving)

    def wait(self) -> None:
        """Finish what :meth:`post` started: ``held`` becomes what has arrived."""
        assert self._pending is not None
        ticket, self.held, leaving = self._pending
        self._pending = None
        self.transport.wait(ticket)
        self.give(leaving)
