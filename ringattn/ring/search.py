"""Search for owners of equal chunks that make a ring's lock-step time small: swaps, from coarse chunks to fine ones.

At every hop the ring waits for its slowest shard, so what counts is T = sum over hops of the greatest work, not the work's total.
Stripes of several widths are starting points: wide ones keep documents whole (few live hops), narrow ones spread long documents.
A swap of two chunks between two shards is taken while it makes T smaller, measured with a p-norm in the place of the maximum
(p = 4, 8, 32), because at the maximum itself almost no single swap helps. Coarse levels move whole documents, fine ones level out.

The result is the same on every process and machine: sums are over integers that a float64 holds exactly, so no order of summation
can change them; the rest is multiplication, division and square roots, and ties go to the lower index.

N chunks, W shards, n = N / W chunks a shard.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from ringattn.ring.turns import Turns

NORMS = (4, 8, 32)
MAX_SWAPS = 64  # of one search
CANDIDATES = 24  # swaps measured for each one taken
GAIN = 1e-4  # least relative gain worth a swap
EXACT_BITS = 36  # all work together is scaled to less than 2^36: products with 10-bit weights stay below 2^53


@dataclass(frozen=True, eq=False)
class Problem:
    """``work``: [N, N] float64 integers, queries of chunk i with keys of chunk j; ``fixed``: more for chunk i with every shard of
    which it sees anything."""

    work: np.ndarray
    fixed: float
    turns: Turns

    def merged(self, factor: int) -> Problem:
        """The same with chunks ``factor`` times as long."""
        n = len(self.work) // factor
        return Problem(self.work.reshape(n, factor, n, factor).sum((1, 3)), self.fixed * factor, self.turns)


def search(work: np.ndarray, fixed: float, turns: Turns, factors: list[int]) -> np.ndarray:
    """Owners int64 [N] of least lock-step time that was found, n chunks for each shard of a ring with these ``turns``.

    ``factors``: their product is n; level k has factors[0] * .. * factors[k] chunks a shard. At each level the best two so far
    and a new stripe go on.
    """
    ring_size = turns.size
    scale = 2.0 ** min(0, EXACT_BITS - math.frexp(work.sum() + fixed * len(work) * ring_size)[1])
    problems = [Problem(np.floor(work * scale), float(np.floor(fixed * scale)), turns)]
    for factor in factors[:0:-1]:
        problems.insert(0, problems[0].merged(factor))
    pool: list[np.ndarray] = []
    for level, problem in enumerate(problems):
        pool = [np.repeat(owners, factors[level]) for owners in pool]
        pool.append(np.arange(len(problem.work)) % ring_size)
        found = [_swap(problem, owners) for owners in pool]
        pool = [owners for _, owners in sorted(found, key=lambda x: x[0])[:2]]
    return pool[0]


def _power(x: np.ndarray, p: int) -> np.ndarray:
    """x^p for p a power of two."""
    for _ in range(p.bit_length() - 1):
        x = x * x
    return x


def _norm(hops: np.ndarray, p: int) -> np.ndarray:
    """Sum over hops of the p-norm over shards (p a power of two): [..., hop, q] -> [...]."""
    total = _power(hops, p).sum(-1)
    for _ in range(p.bit_length() - 1):
        total = np.sqrt(total)
    return total.sum(-1)


def _weights(hops: np.ndarray, p: int) -> np.ndarray:
    """How much each entry matters to its hop's p-norm, as integers 0..1023: [hop, q] -> [hop, q]."""
    power = _power(hops / np.maximum(hops.max(1, keepdims=True), 1.0), p)
    return np.floor(1023 * power / np.maximum(power.sum(1, keepdims=True), 1.0))


def _swap(problem: Problem, owners: np.ndarray) -> tuple[float, np.ndarray]:
    """Take swaps while they gain; returns the least lock-step time on the way and its owners."""
    work, fixed, w = problem.work, problem.fixed, problem.turns.size
    keys = np.ascontiguousarray(work.T)  # keys[j, i]: row chunk i with key chunk j
    sees = (keys > 0).astype(np.float64)
    owners = owners.copy()
    slots = np.argsort(owners, kind="stable").reshape(w, -1)  # chunks of each shard
    shards = np.arange(w)
    # work of row chunk i with the keys of shard o, how many chunks of o it sees, work of key chunk j with the rows of shard q
    by_keys, seen, by_rows = (x[slots].sum(1) for x in (keys, sees, work))  # [W, N] each
    total = by_keys + fixed * (seen > 0)
    matrix = total[:, slots].sum(2).T  # [q, o]
    hop = problem.turns.hop_indices()
    unit = max(1.0, matrix.sum() / w / w)
    one, other = np.triu_indices(w, 1)
    keep = min(3, slots.shape[1])
    best = (float(matrix[hop].max(1).sum()), owners.copy())
    for p in NORMS:
        now = _norm(matrix[hop] / unit, p)
        for _ in range(MAX_SWAPS):
            # first order: what each chunk costs where it is and where it might go
            weight = np.zeros((w, w))
            weight[hop] = _weights(matrix[hop], p)
            # (einsum, because threads of a BLAS cost more than they save on arrays this small)
            cost = (np.einsum("oi,qo->iq", total, weight) + np.einsum("qj,qo->jo", by_rows, weight))[slots]  # [W, n, W]
            change = cost - cost[shards, :, shards][:, :, None]
            leaves = np.argsort(change, axis=1, kind="stable")[:, :keep]  # [W, keep, W]
            i, j = leaves[one, :, other], leaves[other, :, one]
            gain = change[one[:, None], i, other[:, None]][:, :, None] + change[other[:, None], j, one[:, None]][:, None]
            pair, x, y = np.unravel_index(np.argsort(gain, axis=None, kind="stable")[:CANDIDATES], gain.shape)
            a, b = one[pair], other[pair]
            i, j = slots[a, i[pair, x]], slots[b, j[pair, y]]
            # exact: chunk i leaves shard a for b, chunk j leaves b for a
            some = np.arange(len(a))
            more, more_seen = keys[j] - keys[i], sees[j] - sees[i]
            new_a = by_keys[a] + more + fixed * (seen[a] + more_seen > 0)
            new_b = by_keys[b] - more + fixed * (seen[b] - more_seen > 0)
            then = np.repeat(matrix[None], len(a), 0)
            then[some, :, a], then[some, :, b] = new_a[:, slots].sum(2), new_b[:, slots].sum(2)
            row_i, row_j = total[:, i].T, total[:, j].T
            row_i[some, a], row_i[some, b], row_j[some, a], row_j[some, b] = new_a[some, i], new_b[some, i], new_a[some, j], new_b[some, j]
            then[some, a] += row_j - row_i
            then[some, b] += row_i - row_j
            norms = _norm(then[:, *hop] / unit, p)
            k = int(norms.argmin())
            if norms[k] >= now * (1 - GAIN):
                break
            now, matrix = norms[k], then[k]
            a, b, i, j = a[k], b[k], i[k], j[k]
            slots[a, slots[a] == i], slots[b, slots[b] == j] = j, i
            owners[i], owners[j] = b, a
            by_keys[a] += more[k]
            by_keys[b] -= more[k]
            seen[a] += more_seen[k]
            seen[b] -= more_seen[k]
            total[a], total[b] = new_a[k], new_b[k]
            by_rows[a] += work[j] - work[i]
            by_rows[b] -= work[j] - work[i]
            time = float(matrix[hop].max(1).sum())
            if time < best[0]:
                best = (time, owners.copy())
    return best
