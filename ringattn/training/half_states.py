"""AdamW whose two moments are kept in bf16: 4 bytes of state a parameter instead of 8.

Each update computes in fp32 and rounds the moments with a dither, so that changes far below bf16's resolution still count on
average: with plain rounding a second moment with beta2 = 0.999 would stop following its gradients. The dither is a hash of the value's
own bits, of its place in the tensor and of the step: no random generator, so a resumed run and replicas of a shard round alike. It
depends on the shard a parameter lies in, so another mesh rounds differently.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ringattn.cost import STATE_BUCKET
from ringattn.training.shards import local


def round_with_dither(x: Tensor, step: int, start: int = 0) -> Tensor:
    """fp32 ``x`` to bf16, up or down with a chance that depends on how near each is. ``start``: place of its first number in the tensor
    that it is a slice of."""
    bits = x.contiguous().view(torch.int32)
    place = torch.arange(start, start + bits.numel(), dtype=torch.int32, device=x.device).view(bits.shape)
    noise = place.mul_(-1640531527).add_(step * 40503 & 0x7FFFFFFF).bitwise_xor_(bits)  # integer products wrap around
    noise = noise.bitwise_xor_(noise >> 15).mul_(-2048144789)
    noise = noise.bitwise_xor_(noise >> 13).mul_(-1028477387)
    noise = (noise >> 16).bitwise_and_(0xFFFF)
    rounded = noise.add_(bits).bitwise_and_(-65536).view(torch.float32)
    return torch.where(x.isfinite(), rounded, x).to(torch.bfloat16)


def _narrow(optimizer: torch.optim.Optimizer) -> None:
    """PyTorch loads moments in the parameter's dtype; the values are bf16's, so nothing is lost on the way back."""
    for state in optimizer.state.values():
        state |= {name: state[name].to(torch.bfloat16) for name in ("exp_avg", "exp_avg_sq") if name in state}


def update_half(
    value: Tensor, gradient: Tensor, first: Tensor, second: Tensor, step: int, group: dict[str, Any], start: int = 0
) -> None:
    """Update a parameter's ``value`` and its bf16 moments in place: AdamW's update number ``step`` (from 1) with the settings of
    ``group``. Where they are a slice of the parameter, flattened, ``start`` is the place of its first number."""
    beta1, beta2 = group["betas"]
    m = first.float().lerp_(gradient.float(), 1 - beta1)
    v = second.float().mul_(beta2).addcmul_(gradient.float(), gradient.float(), value=1 - beta2)
    first.copy_(round_with_dither(m, 2 * step, start))
    second.copy_(round_with_dither(v, 2 * step + 1, start))
    value.mul_(1 - group["lr"] * group["weight_decay"])
    scale = v.sqrt_().div_(math.sqrt(1 - beta2**step)).add_(group["eps"])
    value.addcdiv_(m, scale, value=-group["lr"] / (1 - beta1**step))


class HalfStateAdamW(torch.optim.Optimizer):
    """AdamW (arXiv 1711.05101) with bf16 ``exp_avg`` and ``exp_avg_sq``; parameters are contiguous and may be sharded (DTensor)."""

    def __init__(self, params: Any, lr: float, betas: tuple[float, float], eps: float, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self.register_load_state_dict_post_hook(_narrow)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """One update. ``closure`` is called first, as by every optimizer of PyTorch's."""
        loss = None if closure is None else closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["step"] = torch.zeros((), dtype=torch.float32)
                    state["exp_avg"] = torch.zeros_like(p, dtype=torch.bfloat16)
                    state["exp_avg_sq"] = torch.zeros_like(p, dtype=torch.bfloat16)
                state["step"] += 1
                step = int(state["step"])
                # in slices, which bounds the fp32 temporaries; the same bits whatever their size
                flat = (local(t).view(-1) for t in (p, p.grad, state["exp_avg"], state["exp_avg_sq"]))
                for i, (x, g, m, v) in enumerate(zip(*(t.split(STATE_BUCKET) for t in flat), strict=True)):
                    update_half(x, g, m, v, step, group, i * STATE_BUCKET)
        return loss
