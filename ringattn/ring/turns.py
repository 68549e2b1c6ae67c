"""The order of hops: who works on whose keys when.

The W shards of a ring lie in nodes of M. A flat ring is one node: at hop d shard q works on the keys of shard q - d (mod W). A ring of
two levels takes turns: in turn t the keys of the node t places before are here, and pass once round the inner ring of M shards; at its
step i shard (n, r) works on the keys of shard (n - t, r - i), numbers taken modulo the nodes and modulo M. So a message between nodes has
a whole turn to travel in. A hop is known by its *offset* d = t * M + i; with one node that is the flat ring's.

    origin   the shard whose keys shard q has at offset d
    holder   the shard that has the keys of shard o at offset d
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np


class Turns(NamedTuple):
    """``size`` W shards in nodes of ``node`` M."""

    size: int
    node: int

    def origin(self, q: int, offset: int) -> int:
        """The shard whose keys shard ``q`` has at ``offset``."""
        t, i = divmod(offset, self.node)
        n, r = divmod(q, self.node)
        return (n - t) * self.node % self.size + (r - i) % self.node

    def holder(self, o: int, offset: int) -> int:
        """The shard that has the keys of shard ``o`` at ``offset``."""
        t, i = divmod(offset, self.node)
        n, r = divmod(o, self.node)
        return (n + t) * self.node % self.size + (r + i) % self.node

    def hop_indices(self) -> tuple[np.ndarray, np.ndarray]:
        """Indices that turn a [q, o] matrix into [offset, q]."""
        q, d = np.arange(self.size), np.arange(self.size)[:, None]
        (n, r), (t, i) = np.divmod(q, self.node), np.divmod(d, self.node)
        origins = (n - t) * self.node % self.size + (r - i) % self.node
        return np.broadcast_to(q, origins.shape), origins

    def start(self, offset: int) -> int:
        """The offset at which the turn of ``offset`` begins."""
        return offset - offset % self.node

    def with_starts(self, live: Iterable[int]) -> tuple[int, ...]:
        """Offsets of the hops that are taken, ascending: 0, those with work, and the start of every turn with work."""
        some = set(live) | {0}
        return tuple(sorted(some | {self.start(d) for d in some}))

    def split(self, offsets: Sequence[int]) -> tuple[range, ...]:
        """The hops (indices into ``offsets``) of each turn that is taken."""
        firsts = [i for i, d in enumerate(offsets) if d % self.node == 0]
        return tuple(range(a, b) for a, b in zip(firsts, [*firsts[1:], len(offsets)], strict=True))
