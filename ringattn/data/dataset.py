"""Batches as a pure function of (seed, step, row number, corpus).

Row ``row`` of step ``step`` is row ``step * rows_per_step + row`` of an endless stream of rows: epoch after epoch, each in its own
order. Nothing is kept between calls but two epochs' tables, so any process, in any order, before or after a restart, reads the same
rows, and the split of a step over ranks is only a choice of row numbers. All ranks of one ring ask for the same rows.
Shapes: B rows asked for, S tokens a row (whole rows, before any sharding).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from ringattn.data.config import DataConfig, DataError
from ringattn.data.corpus import Corpus, read_stdlib, read_text
from ringattn.data.memmap import open_memmap
from ringattn.data.rows import NOTHING, Pieces, Stream, cut, gather, mark, shuffle, split

STREAM_VERSION = 1  # raised when the same settings would give other rows
VALIDATION_SEED = 0  # validation rows are the same for every run's seed
KEPT_EPOCHS = 2

Split = Literal["train", "val"]


@dataclass(frozen=True)
class Batch:
    """Whole rows on the CPU.

    ``tokens``, ``labels``: int64 [B, S]; label IGNORE (-100) predicts nothing. ``documents``: int32 [B, S], 0, 1, 2, ... along each row
    and -1 for padding at its tail. ``positions``: int64 [B, S], for RoPE.
    """

    tokens: Tensor
    labels: Tensor
    documents: Tensor
    positions: Tensor


class Dataset:
    """Packed rows of ``seq_len`` tokens from a corpus; make one by `build_dataset`.

    ``tokens``, ``val_tokens``: tokens on either side of the split. ``rows_per_epoch``, ``val_rows``: distinct rows of either side.
    ``fingerprint``: sha256 of the corpus. ``stream_fingerprint``: sha256 of all that decides the rows: equal in two runs if and only
    if they read the same rows.
    """

    def __init__(self, corpus: Corpus, cfg: DataConfig, *, seq_len: int, seed: int) -> None:
        for key, value, lowest in (("train.seq_len", seq_len, 1), ("seed", seed, 0)):
            if value < lowest:
                raise DataError(key, value, f"must be at least {lowest}")
        self.corpus, self.cfg, self.seq_len, self.seed = corpus, cfg, seq_len, seed
        self.name, self.vocab_size, self.fingerprint = corpus.name, corpus.vocab_size, corpus.fingerprint
        self.bytes_per_token = corpus.bytes_per_token
        self._lengths = corpus.lengths
        self._train, val = split(corpus, cfg.val_fraction)
        self.tokens, self.val_tokens = int(self._lengths[self._train].sum()), int(self._lengths[val].sum())
        self.rows_per_epoch, self.val_rows = -(-self.tokens // seq_len), -(-self.val_tokens // seq_len)
        self._val = shuffle(val, self._lengths, seq_len, VALIDATION_SEED, 0) if len(val) else None
        self._epochs: dict[int, Stream] = {}
        settings = [STREAM_VERSION, corpus.fingerprint, seq_len, seed, cfg.val_fraction, cfg.positions, cfg.mask_documents]
        self.stream_fingerprint = hashlib.sha256(json.dumps(settings).encode()).hexdigest()

    def batch(self, step: int, rows: Sequence[int], rows_per_step: int, split: Split = "train") -> Batch:
        """The rows ``rows`` (each from 0 to ``rows_per_step - 1``) of step ``step`` (from 0), in the order given.

        The training stream never ends. Validation rows have a fixed order, the same for every seed, a fair sample from the first row
        on; a row past the last of them is padding only, so that an evaluation of ceil(val_rows / rows_per_step) steps counts each once.
        """
        if step < 0 or rows_per_step < 1:
            raise ValueError(f"step={step}, rows_per_step={rows_per_step}: must be at least 0 and 1")
        if split not in ("train", "val"):
            raise ValueError(f"split={split}: must be train or val")
        parts = []
        for row in rows:
            if not 0 <= row < rows_per_step:
                raise ValueError(f"row={row}: must be from 0 to {rows_per_step - 1}, rows_per_step being {rows_per_step}")
            pieces = self._pieces(step * rows_per_step + row, split)
            marks = mark(pieces, self.seq_len, positions=self.cfg.positions, mask_documents=self.cfg.mask_documents)
            parts.append((*gather(self.corpus, pieces, self.seq_len), *marks))
        if not parts:
            raise ValueError("rows: must name at least one row")
        tokens, labels, documents, positions = (torch.from_numpy(np.stack(part)) for part in zip(*parts, strict=True))
        return Batch(tokens, labels, documents, positions)

    def _pieces(self, number: int, split: Split) -> Pieces:
        """Row ``number`` of the split's stream."""
        if split == "train":
            epoch, row = divmod(number, self.rows_per_epoch)
            return cut(self._epoch(epoch), self.corpus.offsets, row, self.seq_len)
        if self._val is None:
            raise DataError("data.val_fraction", self.cfg.val_fraction, "holds out no documents, so there is no validation split")
        return cut(self._val, self.corpus.offsets, number, self.seq_len) if number < self.val_rows else NOTHING

    def _epoch(self, epoch: int) -> Stream:
        """The epoch's stream; the most recently used ones are kept, as an epoch's border falls within a step."""
        stream = self._epochs.pop(epoch, None)
        if stream is None:
            stream = shuffle(self._train, self._lengths, self.seq_len, self.seed, epoch)
        self._epochs[epoch] = stream
        while len(self._epochs) > KEPT_EPOCHS:
            self._epochs.pop(next(iter(self._epochs)), None)
        return stream


def read_corpus(cfg: DataConfig) -> Corpus:
    """The corpus that the config names. A relative path starts at the current folder (`DataConfig.resolve` fixes another)."""
    match cfg.kind:
        case "stdlib":
            return read_stdlib()
        case "text":
            return read_text(cfg.path)
        case "memmap":
            return open_memmap(cfg.path, cfg.verify)
        case _:
            raise DataError("data.kind", cfg.kind, "must be one of stdlib, text, memmap")


def build_dataset(cfg: DataConfig, *, seq_len: int, seed: int) -> Dataset:
    """The data set of a run. Raises DataError (a ValueError) for data that cannot be trained on; nothing is written anywhere."""
    problems: list[str] = []
    cfg.validate(problems)
    if problems:
        raise ValueError("\n".join(problems))
    return Dataset(read_corpus(cfg), cfg, seq_len=seq_len, seed=seed)
