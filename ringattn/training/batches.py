"""From the data set's whole rows to what one forward pass takes on this rank.

A step has ``train.rows`` rows. Ring d of D reads rows d * R/D .. (d+1) * R/D - 1, in micro-batches of ``train.micro_rows``; all ranks of
one ring read the same rows. Labels and documents are made on whole rows, so nothing is shifted across a shard's edge; then one
permutation (the layout) cuts tokens, labels and positions alike.

Shapes: B = micro_rows, S = seq_len, P = processes of the ring.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from torch import Tensor

from ringattn.config import Config
from ringattn.data import IGNORE, Batch, Dataset
from ringattn.ring.layout import Layout
from ringattn.ring.schedule import Schedule, make_schedule
from ringattn.training.mesh import Mesh


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
    """The micro-batches of this rank, step by step; the next step's rows are read while the current one trains.

    ``windows``: the distinct windows of the model, 0 = full (:attr:`ModelConfig.distinct_windows`).
    """

    def __init__(self, dataset: Dataset, mesh: Mesh, layout: Layout, config: Config, windows: Sequence[int]) -> None:
        self.dataset, self.mesh, self.layout, self.windows = dataset, mesh, layout, windows
        self.train, self.exchange = config.train, config.parallel.exchange
        self._reader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="rows")
        self._ahead: tuple[int, Future[list[Batch]]] | None = None

    @property
    def micro_batches(self) -> int:
        """Forward passes a step on each rank."""
        return self.train.rows // (self.mesh.data_size * self.train.micro_rows)

    def rows(self, step: int) -> list[Batch]:
        """The whole rows of this ring for ``step`` (from 0), one Batch a micro-batch, on the CPU. Starts to read those of step + 1."""
        ready = self._ahead[1].result() if self._ahead is not None and self._ahead[0] == step else self._read(step)
        self._ahead = (step + 1, self._reader.submit(self._read, step + 1)) if step + 1 < self.train.steps else None
        return ready

    def validation(self, rows: int) -> Iterator[Batch]:
        """``rows`` validation rows, each read by one ring. Every ring gets as many batches, since all ranks take part in every forward
        pass; the places beyond the last row hold a row without labels, which counts nothing."""
        per_pass = self.mesh.data_size * self.train.micro_rows
        for start in range(self.mesh.data_rank * self.train.micro_rows, -(-rows // per_pass) * per_pass, per_pass):
            numbers = range(start, start + self.train.micro_rows)
            batch = self.dataset.batch(0, [min(n, rows - 1) for n in numbers], rows, "val")
            for i, number in enumerate(numbers):
                if number >= rows:
                    batch.labels[i] = IGNORE
            yield batch

    def place(self, batch: Batch) -> MicroBatch:
        """Cut whole rows into this rank's shard, move it to the device, and plan the ring's hops."""
        ring, device = self.mesh.ring, self.mesh.device
        tokens, labels, positions = (
            self.layout.shard(x, ring).to(device, non_blocking=True) for x in (batch.tokens, batch.labels, batch.positions)
        )
        schedules = [
            make_schedule(self.layout, ring, window=w or None, documents=batch.documents, exchange=self.exchange, device=device)
            for w in self.windows
        ]
        return MicroBatch(tokens, labels, positions, schedules)

    def count_valid(self, batches: Sequence[Batch]) -> int:
        """Labels to predict among the positions that this rank holds."""
        return sum(int((self.layout.shard(b.labels, self.mesh.ring) != IGNORE).sum()) for b in batches)

    def close(self) -> None:
        """Stop reading ahead."""
        self._reader.shutdown(cancel_futures=True)

    def _read(self, step: int) -> list[Batch]:
        per_ring, micro = self.train.rows // self.mesh.data_size, self.train.micro_rows
        first = self.mesh.data_rank * per_ring
        return [
            self.dataset.batch(step, range(start, start + micro), self.train.rows)
            for start in range(first, first + per_ring, micro)
        ]
