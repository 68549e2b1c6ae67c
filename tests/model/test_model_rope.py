"""Rotary embedding: exact phases at any position, in any order of the tokens."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from model_tools import rel
from torch import Tensor

from ringattn.model.rope import rope_phases, rotate


def gold_phases(positions: Tensor, head_dim: int, theta: float) -> tuple[np.ndarray, np.ndarray]:
    """In extended precision, each angle reduced by whole turns before its cosine is taken."""
    frequency = np.longdouble(theta) ** (-np.arange(0, head_dim, 2, dtype=np.longdouble) / head_dim)
    angle = positions.numpy().astype(np.longdouble)[..., None] * frequency
    turn = 8 * np.arctan(np.longdouble(1))
    angle = angle - np.floor(angle / turn) * turn
    return np.cos(angle).astype(np.float64), np.sin(angle).astype(np.float64)


@pytest.mark.parametrize("theta", [1e4, 5e5])
@pytest.mark.parametrize("start", [0, 10**6, 2**24 + 1, 10**8])
def test_phases_are_exact_at_any_position(start: int, theta: float) -> None:
    positions = start + torch.arange(200)
    for dtype, band in ((torch.float32, 6e-8), (torch.float64, 1e-7 if start > 10**7 else 1e-9)):
        got = rope_phases(positions, 64, theta, dtype)
        assert all(t.dtype == dtype and t.shape == (1, 200, 32) for t in got)
        for mine, want in zip(got, gold_phases(positions, 64, theta), strict=True):
            error = np.abs(mine[0].double().numpy() - want).max()
            assert error <= band
    if start >= 10**6:  # the product in fp32, as often written, is what this guards against
        naive = (positions.float()[:, None] * theta ** -(torch.arange(0, 64, 2).float() / 64)).cos()
        assert np.abs(naive.double().numpy() - gold_phases(positions, 64, theta)[0]).max() > 1e-2


def test_rotation_is_a_complex_product_in_any_order() -> None:
    x = torch.randn(2, 50, 3, 16)
    ids = torch.stack([torch.randperm(50), torch.randint(10**6, (50,))])
    want = torch.complex(x[..., :8].double(), x[..., 8:].double())
    cos, sin = (torch.from_numpy(t) for t in gold_phases(ids, 16, 1e4))
    want = want * torch.complex(cos, sin)[:, :, None]
    got = rotate(x, *rope_phases(ids, 16, 1e4, torch.float32))
    assert rel(got, torch.cat([want.real, want.imag], -1)) <= 5e-6
    in_order = rotate(x, *rope_phases(torch.arange(50), 16, 1e4, torch.float32))
    assert rel(in_order, got) > 0.1  # given ids matter


def test_one_row_of_positions_serves_all_rows() -> None:
    x, ids = torch.randn(3, 20, 2, 8), torch.randint(1000, (20,))
    got = rotate(x, *rope_phases(ids, 8, 1e4, torch.float32))
    assert torch.equal(got, rotate(x, *rope_phases(ids.expand(3, 20), 8, 1e4, torch.float32)))


def test_scores_depend_on_distance_only_even_far_out() -> None:
    q, k = torch.randn(2, 1, 1, 1, 64, dtype=torch.float64)

    def score(i: int, j: int) -> float:
        a, b = (rotate(t, *rope_phases(torch.tensor([p]), 64, 5e5, torch.float64)) for t, p in ((q, i), (k, j)))
        return float((a * b).sum())

    for distance in (0, 1, 77, 4096):
        assert math.isclose(score(distance, 0), score(3_000_000 + distance, 3_000_000), abs_tol=1e-7)


def test_norm_dtype_and_gradient() -> None:
    x = torch.randn(1, 9, 2, 8, dtype=torch.bfloat16, requires_grad=True)
    cos, sin = rope_phases(10**6 + torch.arange(9), 8, 1e4, torch.float32)
    out = rotate(x, cos, sin)
    assert out.dtype == torch.bfloat16 and rel(out.float().norm(dim=-1), x.float().norm(dim=-1)) < 5e-3
    d_out = torch.randn_like(out)
    (d_x,) = torch.autograd.grad(out, x, d_out)
    assert d_x.dtype == torch.bfloat16 and rel(d_x, rotate(d_out, cos, -sin)) < 5e-3  # the transpose turns back


@pytest.mark.parametrize("bad", [torch.arange(4, dtype=torch.int32), torch.arange(4.0), torch.zeros(1, 1, 4, dtype=torch.int64)])
def test_mistakes_are_named(bad: Tensor) -> None:
    with pytest.raises(ValueError, match="positions must be int64"):
        rope_phases(bad, 8, 1e4, torch.float32)
