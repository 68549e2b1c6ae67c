"""AdamW with narrow moments: close to fp32's, and a resumed run is the run that never stopped."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import Ranks
from tasks import merged, trajectory
from torch import nn

from ringattn.config import ConfigError, OptimConfig
from ringattn.training.half_states import HalfStateAdamW, round_with_dither
from ringattn.training.optimizer import build_optimizer

AO = pytest.param("8bit", marks=pytest.mark.skipif(not importlib.util.find_spec("torchao"), reason="needs torchao"))


def test_dither_is_unbiased_and_a_function_of_its_inputs() -> None:
    x = torch.full((200_000,), 1 + 0.3 * 2**-7) * torch.tensor([1.0, -3.0]).repeat(100_000)  # 0.3 of the way to the next bf16
    rounded = round_with_dither(x, 5).float()
    assert set((rounded[0::2]).unique().tolist()) == {1.0, 1 + 2**-7}
    assert ((rounded / x).mean() - 1).abs() < 2e-5  # plain rounding is off by 2e-3
    assert torch.equal(round_with_dither(x, 5).float(), rounded) and not torch.equal(round_with_dither(x, 6).float(), rounded)
    special = torch.tensor([0.0, -0.0, float("inf"), float("nan"), 2.0**100, -1.5])
    torch.testing.assert_close(round_with_dither(special, 1).float(), special, equal_nan=True, rtol=0, atol=0)


def test_second_moment_keeps_following_small_changes() -> None:
    p = nn.Parameter(torch.zeros(4096))
    optimizer = HalfStateAdamW([p], lr=0.0, betas=(0.9, 0.999), eps=1e-8)
    for _ in range(1500):
        p.grad = torch.ones_like(p)
        optimizer.step()
    mean = optimizer.state[p]["exp_avg_sq"].float().mean().item()
    assert mean == pytest.approx(1 - 0.999**1500, rel=0.01)  # with plain rounding it stops near 0.25


def test_update_is_adamw() -> None:
    torch.manual_seed(0)
    ours, theirs = (nn.Parameter(torch.linspace(-1, 1, 500)) for _ in range(2))
    settings: dict[str, Any] = {"lr": 0.01, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    a, b = HalfStateAdamW([ours], **settings), torch.optim.AdamW([theirs], **settings)
    for _ in range(20):
        ours.grad = theirs.grad = torch.randn(500)
        a.step()
        b.step()
        if _ == 0:  # both moments come from fp32 gradients: the first update is exact
            torch.testing.assert_close(ours, theirs)
    assert ((ours - theirs).norm() / (theirs - torch.linspace(-1, 1, 500)).norm()).item() < 0.02
    assert a.state[ours]["exp_avg"].dtype == torch.bfloat16


@pytest.mark.ring
@pytest.mark.slow
@pytest.mark.parametrize("states", ["bf16", AO])
def test_stop_and_resume_is_bit_equal(ranks: Ranks, raw: Callable[..., Any], states: str) -> None:
    settings = raw({"optim.states": states, "checkpoint.keep": 2, "model.width": 64, "train.steps": 4, "name": "straight"})
    straight = ranks.run(2, trajectory, settings, False, limit_s=300.0)
    parts = merged(settings, {"name": "parts"})
    ranks.run(2, trajectory, merged(parts, {"train.stop_after": 2}), False, limit_s=300.0)
    again = ranks.run(2, trajectory, parts, False, limit_s=300.0)
    assert again["lines"] == straight["lines"]
    assert all(torch.equal(again["parameters"][n], p) for n, p in straight["parameters"].items())
    full = ranks.run(2, trajectory, merged(settings, {"optim.states": "fp32", "name": "fp32"}), False)
    assert straight["lines"][-1]["loss"] == pytest.approx(full["lines"][-1]["loss"], rel=0.02)


def test_eight_bits_without_torchao_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao.optim", None)
    with pytest.raises(ConfigError, match=r"optim.states=8bit: needs torchao.*pip install"):
        build_optimizer(OptimConfig(states="8bit"), nn.Linear(4, 4))
