"""Masks as intervals: for each query row, the first and last visible key position (inclusive).

Causal, sliding window, packed documents, prefix-LM, chunked attention and bidirectional spans are all intervals ``lo <= p <= hi``
whose ends never decrease along the rows. Several masks given together intersect, which keeps both properties.
A mask that is not a monotone interval is refused.

Shapes: S positions, Bb = 1 (same mask for the whole batch) or B.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

ArrayLike = Tensor | np.ndarray | Sequence[int]


def mask_intervals(
    queries: int, keys: int | None = None, *, causal: bool = True, window: int | None = None,
    documents: ArrayLike | None = None, visible: tuple[ArrayLike, ArrayLike] | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Inclusive key intervals (lo, hi), int64 [Bb, queries], of the intersection of the given masks; empty where lo > hi.

    With ``keys != queries`` the causal diagonal ends at the last key (bottom-right, as in FlashAttention >= 2.1).
    ``documents``: int [S] or [B, S], ids never decreasing, -1 at the tail is padding (such rows see nothing, nobody sees them).
    ``window``: a query sees itself and the window - 1 keys before it; needs ``causal``.
    ``visible``: (lo, hi), each int [S] or [B, S], inclusive; 0 <= lo <= keys, -1 <= hi < keys, never decreasing.

    Raises ValueError naming the argument, its value and what is allowed. Tensors on a device are copied to the host.
    """
    keys = queries if keys is None else keys
    if window is not None:
        if not causal:
            raise ValueError(f"window={window} needs causal=True: a window counts the keys before the query")
        if window < 1:
            raise ValueError(f"window={window} must be at least 1 (the query itself)")
    own = np.arange(queries, dtype=np.int64)[None] + (keys - queries)
    lo = np.zeros((1, queries), np.int64)
    hi = np.clip(own, -1, keys - 1) if causal else np.full((1, queries), keys - 1, np.int64)
    if window is not None:
        lo = np.clip(own - window + 1, 0, keys)
    if visible is not None:
        given_lo, given_hi = (_rows(x, queries, f"visible[{i}]") for i, x in enumerate(visible))
        for name, x, least, most in (("lo", given_lo, 0, keys), ("hi", given_hi, -1, keys - 1)):
            if x.size and (x.min() < least or x.max() > most):
                raise ValueError(f"visible {name} holds {x.min()}..{x.max()}, allowed are {least}..{most}")
            if (np.diff(x, axis=1) < 0).any():
                raise ValueError(f"visible {name} decreases along the sequence: only monotone intervals are supported")
        lo, hi = np.maximum(lo, given_lo), np.minimum(hi, given_hi)
    if documents is not None:
        if keys != queries:
            raise ValueError(f"documents need as many keys as queries, got {keys} keys and {queries} queries")
        start, end = document_spans(documents, queries)
        lo, hi = np.maximum(lo, start), np.minimum(hi, end)
        lo, hi = (np.where(start == keys, edge, x) for x, edge in ((lo, keys), (hi, keys - 1)))
    return np.broadcast_arrays(lo, hi)  # type: ignore[return-value]


def document_spans(documents: ArrayLike, length: int) -> tuple[np.ndarray, np.ndarray]:
    """First and last position of each position's own document, int64 [Bb, S]; padding gives (S, S - 1).

    Raises ValueError if the shape is wrong, ids decrease, or -1 stands anywhere but at the tail.
    """
    ids = _rows(documents, length, "documents")
    padding = ids < 0
    if (ids < -1).any():
        raise ValueError(f"documents holds {ids.min()}: ids are >= 0, or -1 for padding at the tail")
    if (padding[:, :-1] & ~padding[:, 1:]).any():
        raise ValueError("documents has padding (-1) before a real token: padding is allowed at the tail only")
    if ((np.diff(ids, axis=1) < 0) & ~padding[:, 1:]).any():
        raise ValueError("documents decreases along the sequence: tokens of one document must be contiguous, ids never decreasing")
    starts = np.ones_like(ids, bool)
    starts[:, 1:] = ids[:, 1:] != ids[:, :-1]
    position = np.arange(length, dtype=np.int64)[None]
    first = np.maximum.accumulate(np.where(starts, position, 0), axis=1)
    ends = np.ones_like(ids, bool)
    ends[:, :-1] = starts[:, 1:]
    last = np.minimum.accumulate(np.where(ends, position, length)[:, ::-1], axis=1)[:, ::-1]
    return np.where(padding, length, first), np.where(padding, length - 1, last)


def _rows(values: ArrayLike, length: int, name: str) -> np.ndarray:
    """``values`` as int64 [Bb, length] on the host."""
    array = values.detach().cpu().numpy() if isinstance(values, Tensor) else np.asarray(values)
    if array.dtype.kind not in "iu":
        raise ValueError(f"{name} must hold integers, got dtype {array.dtype}")
    if array.ndim not in (1, 2) or array.shape[-1] != length:
        raise ValueError(f"{name} has shape {tuple(array.shape)}, expected [{length}] or [B, {length}] over the whole sequence")
    return np.atleast_2d(array).astype(np.int64)


def dense_mask(lo: np.ndarray, hi: np.ndarray, keys: int) -> Tensor:
    """Boolean visibility [Bb, queries, keys] from inclusive intervals; for oracles and pictures (it is S x S)."""
    key = np.arange(keys)
    return torch.from_numpy((key >= lo[..., None]) & (key <= hi[..., None]))
