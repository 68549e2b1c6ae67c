"""Masks as few straight lines instead of two numbers a row.

Along the rows, the ends of the visible interval are piecewise straight: constant, or one further with each row. Causal, windowed
and packed masks have one or two pieces a document, so a mask of a million positions is some kilobytes, compared, hashed, counted
and cut up by a layout in a millisecond. Bounds for a kernel are written out at the very end, for this process's shards only.

A *piece* is a run of consecutive rows in which both ends are straight with step 0 or 1. Ends are half-open: a row sees
``lo <= key < stop``; ``lo == stop`` sees nothing; ``lo <= stop`` holds in every row. Both never decrease.

S positions, W shards, L rows a shard, n pieces, Bb = 1 or B masks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from ringattn.kernels.contract import Bounds
from ringattn.kernels.intervals import ArrayLike, document_spans, mask_intervals
from ringattn.ring.chunks import Chunks
from ringattn.ring.messages import Hull


@dataclass(frozen=True, eq=False)
class Pieces:
    """Straight pieces of one mask over ``rows`` rows.

    ``start``: first row of each piece, int64 [n], ascending from 0. ``lo``, ``stop``: the ends at that row; ``lo_step``,
    ``stop_step``: 0 or 1 a row. These four are int64 [n] (keys are global positions) or [n, W] (local key indices of each shard).
    """

    rows: int
    start: np.ndarray
    lo: np.ndarray
    lo_step: np.ndarray
    stop: np.ndarray
    stop_step: np.ndarray

    @cached_property
    def count(self) -> np.ndarray:
        """Rows of each piece: int64 [n]."""
        return np.diff(self.start, append=self.rows)

    @property
    def pairs(self) -> np.ndarray:
        """Visible (row, key) pairs: int64, [] or [W]."""
        count = self.count.reshape(-1, *[1] * (self.lo.ndim - 1))
        return (count * (self.stop - self.lo) + count * (count - 1) // 2 * (self.stop_step - self.lo_step)).sum(0)

    def at(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(lo, stop) of some rows, int64 [m] or [m, W]."""
        piece = np.searchsorted(self.start, rows, "right") - 1
        further = (rows - self.start[piece]).reshape(-1, *[1] * (self.lo.ndim - 1))
        return self.lo[piece] + self.lo_step[piece] * further, self.stop[piece] + self.stop_step[piece] * further

    @cached_property
    def hulls(self) -> tuple[np.ndarray, np.ndarray]:
        """The first key that any row sees and the one after the last, of each shard: int64 [W] each, 0 and 0 if none."""
        count, gap, grows = self.count[:, None], self.stop - self.lo, self.stop_step - self.lo_step
        last_gap = gap + grows * (count - 1)
        # the first and the last row of a piece that sees anything: a gap of 0 opens after one row or has closed one row ago
        first = np.where(gap > 0, 0, 1)
        last = np.where(last_gap > 0, count - 1, count - 2)
        live = (gap > 0) | (last_gap > 0)
        shard = np.arange(self.lo.shape[1])
        early, late = live.argmax(0), len(self.start) - 1 - live[::-1].argmax(0)
        lo = self.lo[early, shard] + self.lo_step[early, shard] * first[early, shard]
        stop = self.stop[late, shard] + self.stop_step[late, shard] * last[late, shard]
        some = live.any(0)
        return lo * some, stop * some


@dataclass(frozen=True, eq=False)
class Mask:
    """What a batch sees, over global positions: ``rows`` holds the pieces of each of Bb masks. See :func:`build_mask`.

    ``ids``: the ids of the documents of each row, int64; they tell apart inputs that differ and mean the same.
    """

    seq_len: int
    rows: tuple[Pieces, ...]
    ids: tuple[np.ndarray, ...] = ()

    @cached_property
    def key(self) -> bytes:
        """Equal for equal masks from equal documents."""
        digest = hashlib.sha256(repr((self.seq_len, [len(p.start) for p in self.rows], [len(x) for x in self.ids])).encode())
        for x in self.ids:
            digest.update(x.tobytes())
        for p in self.rows:
            for x in (p.start, p.lo, p.lo_step, p.stop, p.stop_step):
                digest.update(np.ascontiguousarray(x).tobytes())
        return digest.digest()

    @property
    def pairs(self) -> int:
        """Visible (query, key) pairs, summed over the Bb masks."""
        return sum(int(p.pairs) for p in self.rows)


def build_mask(
    seq_len: int, *, causal: bool = True, window: int | None = None, documents: ArrayLike | None = None,
    visible: tuple[ArrayLike, ArrayLike] | None = None,
) -> Mask:
    """The mask of ``mask_intervals`` (same arguments, same refusals) as pieces."""
    if visible is not None:
        lo, hi = mask_intervals(seq_len, causal=causal, window=window, documents=documents, visible=visible)
        return Mask(seq_len, tuple(_compress(a, np.maximum(a, b + 1)) for a, b in zip(lo, hi, strict=True)))
    mask_intervals(1, causal=causal, window=window)  # refuses what does not fit together
    runs = _document_starts(documents, seq_len)
    rows = tuple(_document_pieces(start, padding, seq_len, causal, window) for start, padding, _ in runs)
    return Mask(seq_len, rows, tuple(ids for _, _, ids in runs))


def _document_starts(documents: ArrayLike | None, seq_len: int) -> list[tuple[np.ndarray, int, np.ndarray]]:
    """For each of Bb rows: the first position of each document, where padding begins (S if there is none), and the documents' ids."""
    if documents is None:
        return [(np.zeros(1, np.int64), seq_len, np.zeros(1, np.int64))]
    ids = documents.detach().cpu().numpy() if isinstance(documents, Tensor) else np.asarray(documents)
    if ids.dtype.kind not in "iu" or ids.ndim not in (1, 2) or ids.shape[-1] != seq_len:
        document_spans(documents, seq_len)  # raises
    result = []
    for row in np.atleast_2d(ids):
        start = np.append(0, np.flatnonzero(row[1:] != row[:-1]) + 1)
        names, padding = row[start].astype(np.int64), seq_len
        if names[-1] == -1:
            start, names, padding = start[:-1], names[:-1], int(start[-1])
        if (names < 0).any() or (np.diff(names) <= 0).any():
            document_spans(documents, seq_len)  # raises, and says what is wrong
        result.append((start, padding, names))
    return result


def _document_pieces(first: np.ndarray, padding: int, seq_len: int, causal: bool, window: int | None) -> Pieces:
    """The pieces of documents that start at ``first``; from ``padding`` on nothing is seen (lo = stop = S)."""
    end = np.append(first[1:], padding)[: len(first)]
    zero, one = np.zeros_like(first), np.ones_like(first)
    pieces = [(first, first, zero, first + 1, one)] if causal else [(first, first, zero, end, zero)]
    if window is not None:  # the window leaves the start of the document behind
        far = first[first + window < end]
        pieces.append((far + window, far + 1, np.ones_like(far), far + window + 1, np.ones_like(far)))
    if padding < seq_len:
        pieces.append(tuple(np.array([x]) for x in (padding, seq_len, 0, seq_len, 0)))  # type: ignore[arg-type]
    columns = [np.concatenate(x) for x in zip(*pieces, strict=True)]
    order = np.argsort(columns[0], kind="stable")
    return Pieces(seq_len, *(x[order] for x in columns))


def _compress(lo: np.ndarray, stop: np.ndarray) -> Pieces:
    """The pieces of arbitrary ends [S]. A row that neither goes on by a step of 0 or 1 nor keeps the step starts a piece."""
    starts = np.zeros(len(lo), bool)
    starts[0] = True
    for x in (lo, stop):
        step = np.diff(x)
        starts[1:] |= step > 1
        starts[2:] |= (step[1:] != step[:-1]) & (step[:-1] <= 1)
    start = np.flatnonzero(starts)
    ahead = np.minimum(start + 1, len(lo) - 1)
    same = ~starts[ahead]
    return Pieces(len(lo), start, lo[start], (lo[ahead] - lo[start]) * same, stop[start], (stop[ahead] - stop[start]) * same)


def split_pieces(chunks: Chunks, mask: Pieces) -> list[Pieces]:
    """The mask as each shard sees it: for each of W shards of queries, the pieces of its local rows against all W shards of keys."""
    return _split_striped(chunks, mask) if chunks.striped else _split_chunks(chunks, mask)


def _split_striped(chunks: Chunks, mask: Pieces) -> list[Pieces]:
    """One local row is W positions, and W positions further is one local key further: a straight piece stays one."""
    w, result = chunks.ring_size, []
    local = chunks.count_below(np.append(mask.start, mask.rows))
    for q in range(w):
        some = local[1:, q] > local[:-1, q]
        start = local[:-1, q][some]
        further = q + w * start - mask.start[some]
        ends = []
        for x, step in ((mask.lo[some], mask.lo_step[some]), (mask.stop[some], mask.stop_step[some])):
            ends += [chunks.count_below(x + step * further), np.repeat(step[:, None], w, 1)]
        result.append(Pieces(chunks.shard_len, start, *ends))
    return result


def _split_chunks(chunks: Chunks, mask: Pieces) -> list[Pieces]:
    """Cut where a chunk of queries ends, and where an end of the interval passes into another chunk of keys."""
    length = chunks.chunk_len
    cuts = [mask.start, np.arange(0, mask.rows, length)]
    for x, step in ((mask.lo, mask.lo_step), (mask.stop, mask.stop_step)):
        # an end that has just passed the first position of a chunk; mostly (causal, whole chunks of window) that is a cut already
        first = mask.start + (1 - x) % length
        moving = (step == 1) & (first % length != 0) & (first < mask.start + mask.count)
        if moving.any():
            times = -(-(mask.start + mask.count - first)[moving] // length)
            before = np.repeat(np.cumsum(times) - times, times)
            cuts.append(np.repeat(first[moving], times) + (np.arange(times.sum()) - before) * length)
    start = np.sort(np.concatenate(cuts), kind="stable")  # of few ascending runs
    start = start[np.diff(start, prepend=-1) > 0]
    piece = np.searchsorted(mask.start, start, "right") - 1
    further = start - mask.start[piece]
    owner = chunks.owners[start // length]
    local = chunks.held[start // length, owner] * length + start % length
    order = np.argsort(owner, kind="stable")
    ends = []
    for x, step in ((mask.lo, mask.lo_step), (mask.stop, mask.stop_step)):
        now = (x[piece] + step[piece] * further)[order]
        own = chunks.owners_and_end[now // length][:, None] == np.arange(chunks.ring_size)
        ends += [chunks.held[now // length] * length + own * (now % length)[:, None], own * step[piece][order][:, None]]
    parts = np.cumsum(np.bincount(owner, minlength=chunks.ring_size))[:-1]
    split = [np.split(x, parts) for x in (local[order], *ends)]
    return [Pieces(chunks.shard_len, *columns) for columns in zip(*split, strict=True)]


def key_hulls(rows: Sequence[Sequence[Pieces]]) -> list[list[Hull]]:
    """hulls[q][o]: the least range of local key rows of shard o that holds every key visible to shard q, over the Bb masks.

    ``rows[b][q]`` as :func:`split_pieces` gives them.
    """
    result = []
    for masks in zip(*rows, strict=True):
        lo, stop = (np.stack(x) for x in zip(*(p.hulls for p in masks), strict=True))
        lo = np.where(stop > lo, lo, masks[0].rows).min(0)  # an empty hull must not count as one at 0
        result.append([(int(a), int(b)) if b else (0, 0) for a, b in zip(lo, stop.max(0), strict=True)])
    return result


def write_bounds(wanted: Sequence[tuple[Sequence[Pieces], int]], device: torch.device | str = "cpu") -> list[Bounds]:
    """Kernel bounds of each (pieces of the Bb masks as one shard of queries sees them, shard of keys), in one copy to ``device``.

    Equal ones share their tensors: the unmasked hops of a causal zigzag are two, however many shards there are.
    """
    device = torch.device(device)
    keys = [
        tuple(x.tobytes() for p in rows for x in (p.start, p.lo[:, o], p.lo_step[:, o], p.stop[:, o], p.stop_step[:, o]))
        for rows, o in wanted
    ]
    distinct = dict(zip(keys, wanted, strict=True))
    sizes = [len(rows) * rows[0].rows for rows, _ in distinct.values()]
    flat = torch.empty(4 * sum(sizes), dtype=torch.int32, pin_memory=device.type == "cuda")
    for out, (rows, o) in zip(np.split(flat.numpy(), np.cumsum(sizes)[:-1] * 4), distinct.values(), strict=True):
        columns = out.reshape(4, len(rows), -1)
        for b, p in enumerate(rows):
            for i, (x, step) in enumerate(((p.lo[:, o], p.lo_step[:, o]), (p.stop[:, o], p.stop_step[:, o]))):
                _write(columns[i, b], p.start, x, step)
                # the first query row that sees a key is the number of rows that stop at or before it, and so on
                _write(columns[3 - i, b], *_count_at_most(p, x, step))
    made, done = {}, flat.to(device, non_blocking=True).split([4 * n for n in sizes])
    for (key, (rows, o)), part in zip(distinct.items(), done, strict=True):
        pairs = sum(int(p.pairs[o]) for p in rows)
        lo, hi, q_lo, q_hi = part.view(4, len(rows), -1).unbind(0)
        made[key] = Bounds(lo, hi, q_lo, q_hi, pairs, pairs == len(rows) * rows[0].rows ** 2)
    return [made[key] for key in keys]


def _count_at_most(pieces: Pieces, x: np.ndarray, step: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """For each key j, how many rows have an end ``x`` <= j, as pieces over the keys: (first key, value there, step)."""
    done = pieces.start + pieces.count
    keys = np.stack([x, x + step * (pieces.count - 1)], 1).ravel()
    values = np.stack([np.where(step == 1, pieces.start + 1, done), done], 1).ravel()
    steps = np.stack([step, np.zeros_like(step)], 1).ravel()
    return np.append(0, keys), np.append(0, values), np.append(0, steps)


def _write(out: np.ndarray, start: np.ndarray, value: np.ndarray, step: np.ndarray) -> None:
    """out[i] = value + step * (i - start), of the last piece that starts at or before i; int32 [n], pieces may be empty."""
    count = np.diff(np.minimum(start, len(out)), append=len(out))
    out[:] = np.repeat((value - step * start).astype(np.int32), count)
    if step.any():
        moved = np.repeat(step.astype(np.int32), count)
        moved *= np.arange(len(out), dtype=np.int32)
        out += moved
