"""From the data set's whole rows to what one forward pass takes on this rank.

A step has ``train.rows`` rows. Ring d of D reads rows d * R/D .. (d+1) * R/D - 1, in micro-batches of ``train.micro_rows``; all ranks of
one ring read the same rows. Labels and documents are made on whole rows, so nothing is shifted across a shard's edge; then one
permutation (the layout, which may be another for each batch) cuts tokens, labels and positions alike.

Shapes: B = micro_rows, S = seq_len with its padding, P = ranks that share a row (ring x ulysses).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ringattn.config import TrainConfig
from ringattn.data import IGNORE, Batch, Dataset
from ringattn.ring.schedule import Schedule, make_schedule
from ringattn.training.mesh import Mesh
from ringattn.training.placement import Placed, Placement


@dataclass(frozen=True)
class MicroBatch:
    """One forward pass on this rank: int64 [B, S / P] each, on the device, and a hop schedule for each distinct window."""

    tokens: Tensor
    labels: Tensor
    positions: Tensor
    schedules: list[Schedule]

    @property
    def handles(self) -> list[int]:
        """What the model takes instead of the schedules themselves."""
        return [s.handle for s in self.schedules]

    @property
    def pairs(self) -> list[int]:
        """Visible pairs a head over the whole ring and all B rows, for each distinct window."""
        rows = self.tokens.shape[0]
        return [s.pairs * (rows // s.batch_rows) for s in self.schedules]


class Batches:
    """The micro-batches of this rank, step by step; the next step's rows are read, and their layout is planned, while the current one
    trains."""

    def __init__(self, dataset: Dataset, mesh: Mesh, placement: Placement, train: TrainConfig) -> None:
        self.dataset, self.mesh, self.placement, self.train = dataset, mesh, placement, train
        self._reader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="rows")
        self._ahead: tuple[int, Future[list[Placed]]] | None = None

    @property
    def micro_batches(self) -> int:
        """Forward passes a step on each rank."""
        return self.train.rows // (self.mesh.data_size * self.train.micro_rows)

    def rows(self, step: int) -> list[Placed]:
        """The whole rows of this ring for ``step`` (from 0), one entry a micro-batch, on the CPU. Starts to read those of step + 1."""
        ready = self._ahead[1].result() if self._ahead is not None and self._ahead[0] == step else self._plan(step)
        self._ahead = (step + 1, self._reader.submit(self._plan, step + 1)) if step + 1 < self.train.steps else None
        return ready

    def first(self, step: int) -> Placed:
        """The first micro-batch of :meth:`rows` of ``step``, which are then there when they are asked for."""
        if self._ahead is None or self._ahead[0] != step:
            self._ahead = (step, self._reader.submit(self._plan, step))
        return self._ahead[1].result()[0]

    def validation(self, rows: int) -> Iterator[Placed]:
        """``rows`` validation rows, each read by one ring. Every ring gets as many batches, since all ranks take part in every forward
        pass; the places beyond the last row hold a row without labels, which counts nothing."""
        per_pass = self.mesh.data_size * self.train.micro_rows
        for start in range(self.mesh.data_rank * self.train.micro_rows, -(-rows // per_pass) * per_pass, per_pass):
            numbers = range(start, start + self.train.micro_rows)
            batch = self.dataset.batch(0, [min(n, rows - 1) for n in numbers], rows, "val")
            for i, number in enumerate(numbers):
                if number >= rows:
                    batch.labels[i] = IGNORE
            yield self.placement.place(batch)

    def place(self, rows: Placed) -> MicroBatch:
        """Cut whole rows into this rank's shard, move it to the device, and plan the ring's hops."""
        ring, device, batch, layout = self.mesh.ring, self.mesh.device, rows.batch, rows.layout
        tokens, labels, positions = (
            layout.shard(x, ring).to(device, non_blocking=True) for x in (batch.tokens, batch.labels, batch.positions)
        )
        how: dict[str, Any] = {"exchange": self.placement.exchange, "wire": self.placement.wire, "device": device}
        schedules = [make_schedule(layout, ring, window=w or None, documents=batch.documents, **how) for w in self.placement.layers]
        return MicroBatch(tokens, labels, positions, schedules)

    def count_valid(self, rows: Sequence[Placed]) -> int:
        """Labels to predict among the positions that this rank holds."""
        return sum(int((r.layout.shard(r.batch.labels, self.mesh.ring) != IGNORE).sum()) for r in rows)

    def close(self) -> None:
        """Stop reading ahead."""
        self._reader.shutdown(cancel_futures=True)

    def _plan(self, step: int) -> list[Placed]:
        return [self.placement.place(batch) for batch in self._read(step)]

    def _read(self, step: int) -> list[Batch]:
        per_ring, micro = self.train.rows // self.mesh.data_size, self.train.micro_rows
        first = self.mesh.data_rank * per_ring
        return [
            self.dataset.batch(step, range(start, start + micro), self.train.rows)
            for start in range(first, first + per_ring, micro)
        ]
