"""A ring of W = P * V shards: P processes, each holding V virtual shards laid end to end.

A virtual ring (P = 1) runs the schedule, kernels and arithmetic of a real ring of the same W, so it is the debug mode, the unit
test bench and the simulator for rings larger than the machine. Shard w lives on process w // V.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch.distributed as dist

from ringattn.ring.turns import Turns

MAX_CACHED_SCHEDULES = 16


class Ring:
    """P processes x V virtual shards.

    Args:
        group: the processes of the ring, in ring order; None takes the default group, or this process alone where
            torch.distributed is not initialised.
        virtual: V, the shards each process holds, >= 1.
        ulysses_group: U processes that hold U parts of the same shards and split the heads among them during attention
            (DeepSpeed-Ulysses, arXiv 2309.14509; combined with a ring as in USP, arXiv 2405.07719). None: U = 1.
        inner: M, consecutive shards that share a node: a ring of two levels (:mod:`ringattn.ring.turns`). None: one node.
        outer_group: the same processes again, for messages between nodes: with NCCL a group of its own, so that they do not queue up with
            those within. Every process of the default group must have taken part in making it. None: ``group``.

    Raises ValueError for ``virtual`` or ``inner`` that do not fit.

    Attributes: ``size`` W = P * V; ``processes`` P; ``virtual`` V; ``rank`` of this process in the ring; ``shards`` this process
    holds (global shard numbers).
    """

    def __init__(
        self, group: dist.ProcessGroup | None = None, virtual: int = 1, ulysses_group: dist.ProcessGroup | None = None, *,
        inner: int | None = None, outer_group: dist.ProcessGroup | None = None,
    ) -> None:
        if isinstance(virtual, bool) or not isinstance(virtual, int) or virtual < 1:
            raise ValueError(f"virtual={virtual!r} must be an integer >= 1")
        if group is None and dist.is_available() and dist.is_initialized():
            group = dist.group.WORLD
        self.group = group
        self.virtual = virtual
        self.processes = 1 if group is None else dist.get_world_size(group)
        self.rank = 0 if group is None else dist.get_rank(group)
        if self.rank < 0:
            raise ValueError("this process is not a member of the ring's process group")
        self.size = self.processes * virtual
        self.shards = range(self.rank * virtual, (self.rank + 1) * virtual)
        problem = inner_problem(inner, self.processes, virtual)
        if problem:
            raise ValueError(f"inner={inner!r}: {problem}")
        self.inner, self.outer_group = inner, outer_group
        self.outer_transport: Any = None  # between nodes; see outer_transport_of
        self.ulysses_group = ulysses_group
        self.ulysses = 1 if ulysses_group is None else dist.get_world_size(ulysses_group)
        self.ulysses_rank = 0 if ulysses_group is None else dist.get_rank(ulysses_group)
        self.transport: Any = None  # how shards travel; see transport_of
        self.watch: Any = None  # timeouts and hang reports; see hang.watch_of
        self.timeline: Any = None  # measures transfers while it is set; see timeline.measure
        self.passes = 0  # attention passes so far, forward and backward counted
        self.schedules: OrderedDict[Any, Any] = OrderedDict()  # by content; filled by make_schedule

    @property
    def turns(self) -> Turns:
        """The order of hops."""
        return Turns(self.size, self.inner or self.size)

    def global_rank(self, process: int) -> int:
        """The rank in the default group of the ring's ``process``."""
        return process if self.group is None else dist.get_global_rank(self.group, process)

    def __repr__(self) -> str:
        inner = f", inner={self.inner}" if self.inner else ""
        return f"Ring(processes={self.processes}, virtual={self.virtual}, rank={self.rank}{inner})"


def inner_problem(inner: int | None, processes: int, virtual: int) -> str | None:
    """Why a ring cannot have nodes of ``inner`` shards, and what is allowed; None if it can."""
    if inner is None:
        return None
    size = processes * virtual
    allowed = [m for m in range(1, size + 1) if size % m == 0 and (processes == 1 or m % virtual == 0)]
    if not isinstance(inner, bool) and inner in allowed:
        return None
    whole = "" if processes == 1 or virtual == 1 else f", with all {virtual} of a process in one node"
    return f"must divide the {size} shards of the ring{whole}: one of {', '.join(map(str, allowed))}"
