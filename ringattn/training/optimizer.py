"""Optimizer, global-norm clipping and learning rate: three pure pieces.

The learning rate is a function of the step alone, so a resumed run needs no scheduler state. Steps count from 0 here: the update that
turns step s into s + 1 uses ``learning_rate(config, s)``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ringattn.config import Config, ConfigError, OptimConfig
from ringattn.training.half_states import HalfStateAdamW
from ringattn.training.host_states import HostStateAdamW
from ringattn.training.shards import local


def learning_rate(config: Config, step: int) -> float:
    """The learning rate of update ``step`` (0 .. train.steps - 1): linear warm-up to optim.lr, then the schedule's shape.

    cosine  half a cosine from 1 to min_ratio over the steps after the warm-up (arXiv 1608.03983, one period)
    wsd     constant, then linear to min_ratio over the last ``decay_steps`` (warmup-stable-decay, arXiv 2404.06395)
    constant
    """
    schedule, steps = config.schedule, config.train.steps
    if step < schedule.warmup_steps:
        return config.optim.lr * (step + 1) / schedule.warmup_steps
    match schedule.name:
        case "constant":
            share = 0.0  # of the way from 1 to min_ratio
        case "cosine":
            done = (step - schedule.warmup_steps) / max(1, steps - schedule.warmup_steps)
            share = 0.5 * (1 - math.cos(math.pi * min(1.0, done)))
        case "wsd":
            left = steps - step
            share = 1 - left / (schedule.decay_steps + 1) if left <= schedule.decay_steps else 0.0
    return config.optim.lr * (1 - (1 - schedule.min_ratio) * share)


def build_optimizer(config: OptimConfig, model: nn.Module) -> torch.optim.Optimizer:
    """AdamW or SGD over the (sharded) fp32 or fp64 parameters. Weight decay acts on matrices only, embedding and head among them;
    norms and sinks, which are vectors, are left alone."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    groups = [g for g in groups if g["params"]]
    fused = all(p.is_cuda for p in parameters)
    betas = (config.beta1, config.beta2)
    if config.offload:
        return HostStateAdamW(groups, lr=config.lr, betas=betas, eps=config.eps, narrow=config.states == "bf16")
    match config.name, config.states:
        case "adamw", "bf16":
            return HalfStateAdamW(groups, lr=config.lr, betas=betas, eps=config.eps)
        case "adamw", "8bit":
            return eight_bit_adamw(config, groups)
        case "adamw", _:
            return torch.optim.AdamW(groups, lr=config.lr, betas=betas, eps=config.eps, fused=fused, foreach=not fused)
        case _:
            return torch.optim.SGD(groups, lr=config.lr, momentum=config.momentum, fused=fused, foreach=not fused)


def eight_bit_adamw(config: OptimConfig, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """torchao's AdamW, whose moments take 8 bits in blocks of 256 with one scale each (arXiv 2110.02861)."""
    try:
        from torchao.optim import AdamW8bit
    except ImportError as error:
        raise ConfigError([f"optim.states=8bit: needs torchao, not importable here ({error}): pip install ringattn[ao]"]) from None
    optimizer: torch.optim.Optimizer = AdamW8bit(groups, lr=config.lr, betas=(config.beta1, config.beta2), eps=config.eps)
    return optimizer


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Every parameter group follows the one schedule."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):  # torchao's, so that its compiled update is not compiled anew for each value
            group["lr"].fill_(lr)
        else:
            group["lr"] = lr


def local_gradients(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    """This rank's shard of every gradient that exists."""
    return [local(p.grad) for p in parameters if p.grad is not None]


@torch.no_grad()
def gradient_norm(gradients: list[Tensor], sharded: dist.ProcessGroup) -> Tensor:
    """The 2-norm of the whole gradient, a scalar fp64 tensor that is equal on all ranks and not finite if any entry is not.

    ``gradients`` are this rank's shards; ``sharded`` is the group that holds them all, once (replicas hold the same again).
    """
    squares = torch.stack(torch._foreach_norm(gradients)).double().square().sum()
    dist.all_reduce(squares, group=sharded)
    return squares.sqrt()


@torch.no_grad()
def clip_gradients(gradients: list[Tensor], norm: Tensor, largest: float) -> None:
    """Scale the whole gradient down to norm ``largest`` where it is longer; without a look at the norm by the host."""
    if largest > 0:
        shrink = (largest / norm.clamp(min=1e-12)).clamp(max=1.0)
        torch._foreach_mul_(gradients, shrink.to(gradients[0].dtype))
