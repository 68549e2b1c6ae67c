"""One rank of a ring of many, alone in its process, for measuring: what such a rank takes in host time, launches and memory, but for
the wire. Its transfers go nowhere and nobody is asked to agree, so what it computes means nothing.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ringattn.ring.ring import Ring
from ringattn.ring.transport import Message, Note


def lone_rank(size: int, rank: int = 0, inner: int | None = None) -> Ring:
    """Rank ``rank`` of a ring of ``size`` processes of one shard each, ``inner`` a node."""
    ring = Ring()
    ring.inner = inner
    ring.group, ring.processes, ring.size, ring.rank, ring.shards = None, size, size, rank, range(rank, rank + 1)
    ring.transport = ring.outer_transport = Nowhere()
    doing = SimpleNamespace(since=time.monotonic())
    ring.watch = SimpleNamespace(
        doing=doing, gone="", ranks=list(range(size)), agreed=_Everything(), contents=weakref.WeakKeyDictionary(), events=[]
    )
    return ring


class Nowhere:
    """A transport to nobody. Buffers hold zeros: what never comes is at least finite."""

    name = "nowhere"

    def allocate(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """See :class:`ringattn.ring.transport.Transport`."""
        return torch.zeros(tuple(shape), dtype=dtype, device=device)

    def post(self, sends: list[Message], receives: list[Message], note: Note) -> Any:
        """Nothing is sent."""

    def wait(self, ticket: Any) -> None:
        """Nothing comes."""

    def release(self, buffer: Tensor) -> None:
        """Nothing is kept."""


class _Everything:
    def __contains__(self, _: object) -> bool:
        return True


class IdleKernel:
    """A kernel that does nothing, to measure everything else."""

    name = "idle"

    def refusal(self, *args: Any, **kwargs: Any) -> str | None:
        """It takes everything."""
        return None

    def forward(self, *args: Any, **kwargs: Any) -> None:
        """Nothing."""

    def prepare(self, out: Tensor, dout: Tensor, lse: Tensor, dlse: Tensor | None) -> Any:
        """No terms."""
        return SimpleNamespace(delta=lse)

    def backward(self, *args: Any, **kwargs: Any) -> None:
        """Nothing."""
