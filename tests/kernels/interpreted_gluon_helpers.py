"""Checks of the helper kernels in Triton's interpreter. Run by test_gluon_helpers.py in a process with TRITON_INTERPRET=1: seed."""

from __future__ import annotations

import sys

import numpy as np
import torch

from ringattn.kernels import gluon_helpers
from ringattn.kernels.contract import KEY_BLOCK, Bounds
from ringattn.kernels.gluon_plan import make_plan


def draw_bounds(rng: np.random.Generator, batch: int, queries: int, keys: int) -> Bounds:
    """Monotone intervals with empty rows, and often with keys that nobody sees."""
    lo = np.sort(rng.integers(0, keys + 1, (batch, queries)), 1)
    if rng.integers(2):
        lo = np.sort(rng.choice(lo[0], (batch, queries)) // 400 * 400, 1)
    width = rng.integers(-50, rng.integers(1, keys), (batch, queries))
    return Bounds.from_rows(lo, np.maximum(lo, np.maximum.accumulate(np.clip(lo + width, 0, keys), 1)), keys)


def check_plan(rng: np.random.Generator) -> None:
    batch, queries, keys = int(rng.integers(1, 3)), int(rng.integers(1, 900)), int(rng.integers(1, 5000))
    rows = int(rng.choice([128, 192]))
    bounds = draw_bounds(rng, batch, queries, keys)
    plan = make_plan(bounds, rows, gluon_helpers)
    lo, hi = bounds.lo.numpy(), bounds.hi.numpy()
    tiles = -(-keys // KEY_BLOCK)
    for b in range(batch):
        seen = np.zeros((queries, tiles * KEY_BLOCK), bool)
        for i in range(queries):
            seen[i, lo[b, i] : hi[b, i]] = True
        by_tile = seen.reshape(queries, tiles, KEY_BLOCK).any(2)  # [query, tile]
        live = by_tile.any(0)
        for t in range(-(-queries // rows)):
            count, end, hole = plan.query[b, t, :3].tolist()
            visits = [end - 1 - i if hole < 0 else int(plan.live[b, hole - i]) for i in range(count)]
            needed = set(np.flatnonzero(by_tile[t * rows : (t + 1) * rows].any(0)).tolist())
            assert visits == sorted(set(visits), reverse=True)
            assert needed <= set(visits) and all(live[visits]), (needed, visits)
            span = lo[b, t * rows] // KEY_BLOCK, -(-hi[b, min((t + 1) * rows, queries) - 1] // KEY_BLOCK)
            assert all(span[0] <= v < span[1] for v in visits)
        for t in range(tiles):
            rows_seen = np.flatnonzero(by_tile[:, t])
            expected = [rows_seen[0], rows_seen[-1] + 1] if live[t] else [0, 0]
            # Rows in between may see nothing of the tile; the range is the hull.
            assert plan.key_rows[b, t].tolist() == expected, (t, plan.key_rows[b, t], expected)
        table = plan.keys[b].numpy()
        q_lo, q_hi = table[:, 0].ravel(), table[:, 1].ravel()
        assert (q_lo[:keys] == bounds.q_lo[b].numpy()).all() and (q_hi[:keys] == bounds.q_hi[b].numpy()).all()
        assert (q_lo[keys:] >= queries).all() and (q_hi[keys:] == 0).all()


def check_rows_and_dq(rng: np.random.Generator) -> None:
    batch, queries, heads, width = 2, int(rng.integers(1, 150)), 3, int(rng.choice([64, 128]))
    rows = -(-queries // 128) * 128
    out, dout = torch.randn(batch, queries, heads, width), torch.randn(batch, heads, queries, width).transpose(1, 2)
    lse, dlse = torch.randn(batch, heads, queries), torch.randn(batch, queries, heads).transpose(1, 2)
    lse[0, 1, 0] = -torch.inf
    lse2, delta = torch.full((2, batch, heads, rows), torch.nan).unbind(0)
    workspace = torch.full((batch, heads, rows, width), torch.nan)
    for with_dlse in (False, True):
        gluon_helpers.rows_kernel[(rows // 32, batch * heads)](
            out, dout, lse, dlse, lse2, delta, workspace, queries, rows, heads,
            *out.stride(), *dout.stride(), *lse.stride(), *dlse.stride(), D=width, TILE=32, WITH_DLSE=with_dlse,
        )  # fmt: skip
        expected = (out * dout).sum(-1).transpose(1, 2) - dlse * with_dlse
        torch.testing.assert_close(delta[:, :, :queries], expected, rtol=1e-5, atol=1e-5)
        assert (delta[:, :, queries:] == 0).all() and (lse2[:, :, queries:] == torch.inf).all() and lse2[0, 1, 0] == torch.inf
        wanted = torch.where(lse == -torch.inf, torch.inf, lse / np.log(2))
        torch.testing.assert_close(lse2[:, :, :queries], wanted)
        assert (workspace == 0).all()

    gradient = torch.randn(batch, queries, heads, width)
    place = torch.arange(width)
    column = place // 32 * 32 + place % 8 // 2 * 8 + place % 32 // 8 * 2 + place % 2  # place 8a + 2b + e holds column 8b + 2a + e
    for add in (False, True):
        workspace.zero_()
        workspace[:, :, :queries] = gradient.transpose(1, 2)[..., column]
        before = torch.randn(batch, queries, heads, width)
        dq = before.clone()
        gluon_helpers.finish_dq[(rows // 32, batch * heads)](
            workspace, dq, 0.5, queries, rows, heads, *dq.stride()[:3], D=width, TILE=32, ADD=add
        )
        torch.testing.assert_close(dq, gradient * 0.5 + before * add)
        assert (workspace == 0).all()


if __name__ == "__main__":
    generator = np.random.default_rng(int(sys.argv[1]))
    torch.manual_seed(int(sys.argv[1]))
    for _ in range(12):
        check_plan(generator)
    check_rows_and_dq(generator)
