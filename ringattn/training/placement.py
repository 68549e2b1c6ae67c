"""Who holds which positions of a batch: one layout for the whole run, or one planned for the documents of each batch.

``parallel.layout=balanced`` and ``auto`` plan anew for each micro-batch, as a pure function of its documents, so that all ranks of a
ring plan alike without a word. The plan is made by the thread that reads ahead, while the step before trains. All micro-batches of a
run have one length, whatever their layout: :meth:`ringattn.config.Config.padded_len`, rows padded at their end.

S positions of a padded row, W shards.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from ringattn.config import Config
from ringattn.data import IGNORE, Batch
from ringattn.model.config import ModelConfig
from ringattn.ring.layout import Layout, choose_layout
from ringattn.ring.ring import Ring

PLANNED = ("balanced", "auto")


@dataclass(frozen=True)
class Placed:
    """Whole rows, padded to S, and the layout that cuts them.

    ``slowest``, ``mean``: predicted time of attention in one pass over all layers, of the ring in lock step and of a shard in the
    mean, in the kernel's time for a visible pair of one head.
    """

    batch: Batch
    layout: Layout
    slowest: float
    mean: float


class Placement:
    """Chooses the layout of each batch of ``config`` on ``ring``. ``model`` has the windows of its layers.

    Attributes: ``seq_len`` S; ``layers``: how many layers have each distinct window (0 = full), in the order of their first layer;
    ``fixed``: the layout of all batches, None where each has its own.
    """

    def __init__(self, config: Config, model: ModelConfig, ring: Ring, seq_len: int) -> None:
        p = config.parallel
        self.kind, self.exchange, self.wire, self.seq_len, self.ring = p.layout, p.exchange, p.wire, seq_len, ring
        self.layers = Counter(model.layer_windows)
        self.widest = None if 0 in self.layers else max(self.layers)
        self.fixed = None if self.kind in PLANNED else Layout(self.kind, seq_len, ring.size, ring.ulysses, inner=ring.inner)

    def layout(self, documents: Tensor) -> Layout:
        """The layout for the documents [B, S] of a micro-batch."""
        if self.fixed is not None:
            return self.fixed
        size, ulysses, inner = self.ring.size, self.ring.ulysses, self.ring.inner
        if self.kind == "balanced":
            return Layout("balanced", self.seq_len, size, ulysses, documents, window=self.widest, inner=inner)
        return choose_layout(self.seq_len, size, window=self.widest, documents=documents, ulysses=ulysses, inner=inner)

    def place(self, batch: Batch) -> Placed:
        """Pad, and choose the layout."""
        batch = pad(batch, self.seq_len)
        layout = self.layout(batch.documents)
        slowest = mean = 0.0
        if self.ring.size > 1:
            for window, layers in self.layers.items():
                predicted = layout.predict(window=window or None, documents=batch.documents)
                by_shard = predicted.work.sum(1)  # in the gathered exchange each shard works at its own pace
                slowest += layers * float(by_shard.max() if self.exchange == "allgather" else predicted.lock_step)
                mean += layers * float(by_shard.mean())
        return Placed(batch, layout, slowest, mean)


def pad(batch: Batch, seq_len: int) -> Batch:
    """Rows padded at their end to ``seq_len``: token 0, no label, document -1. Nobody sees such a position, and it sees nobody."""
    more = seq_len - batch.tokens.shape[1]
    if not more:
        return batch
    padding = {"tokens": 0, "labels": IGNORE, "documents": -1, "positions": 0}
    return Batch(**{name: F.pad(getattr(batch, name), (0, more), value=value) for name, value in padding.items()})
