"""Learning rates as functions of the step, decay groups, and clipping by the global norm."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tasks import BASE, merged
from torch import nn

from ringattn.config import Config, OptimConfig, from_dict
from ringattn.training.optimizer import build_optimizer, clip_gradients, learning_rate


def config(**changes: object) -> Config:
    settings = {"train.steps": 100, "optim.lr": 2.0, "data.path": "x", "schedule.warmup_steps": 10, "schedule.min_ratio": 0.1}
    return from_dict(merged(BASE, settings | {f"schedule.{k}": v for k, v in changes.items()}))


def rates(c: Config) -> np.ndarray:
    return np.array([learning_rate(c, s) for s in range(c.train.steps)])


@pytest.mark.parametrize("name", ["cosine", "wsd", "constant"])
def test_warm_up_is_linear_and_reaches_the_peak(name: str) -> None:
    lr = rates(config(name=name))
    assert lr[:10] == pytest.approx(np.arange(1, 11) * 0.2)
    assert lr.max() == pytest.approx(2.0) and lr.min() > 0


def test_shapes() -> None:
    assert (rates(config(name="constant"))[10:] == 2.0).all()
    cosine = rates(config(name="cosine"))[10:]
    assert cosine[0] == 2.0 and (np.diff(cosine) < 0).sum() == 89 and cosine[45] == pytest.approx(1.1) and 0.2 < cosine[-1] < 0.21
    wsd = rates(config(name="wsd", decay_steps=20))
    assert (wsd[10:80] == 2.0).all() and np.diff(wsd[79:]) == pytest.approx(np.full(20, -1.8 / 21))
    assert (rates(config(name="cosine", warmup_steps=0))[:1] == 2.0).all()


def test_rate_depends_on_the_step_only() -> None:
    c = config(name="wsd", decay_steps=20)
    assert [learning_rate(c, s) for s in (95, 3, 50)] == [rates(c)[s] for s in (95, 3, 50)]


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_decay_acts_on_matrices_only(name: str) -> None:
    model = nn.ModuleDict({"embedding": nn.Embedding(5, 4), "linear": nn.Linear(4, 3), "norm": nn.RMSNorm(4)})
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    optimizer = build_optimizer(OptimConfig(name=name, lr=0.5, weight_decay=0.25, momentum=0.0), model)  # type: ignore[arg-type]
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    for n, p in model.named_parameters():
        factor = 1 - 0.5 * 0.25 if p.ndim >= 2 else 1.0
        torch.testing.assert_close(p.detach(), before[n] * factor)


def test_clipping() -> None:
    gradients = [torch.randn(3, 4), torch.randn(5)]
    before = [g.clone() for g in gradients]
    norm = torch.cat([g.flatten() for g in gradients]).double().norm()
    clip_gradients(gradients, norm, 2 * norm.item())
    assert all(torch.equal(a, b) for a, b in zip(gradients, before, strict=True))
    clip_gradients(gradients, norm, 0.0)
    assert all(torch.equal(a, b) for a, b in zip(gradients, before, strict=True))
    clip_gradients(gradients, norm, norm.item() / 3)
    for a, b in zip(gradients, before, strict=True):
        torch.testing.assert_close(a, b / 3)
