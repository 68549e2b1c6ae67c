"""debug.nan: which module's output or gradient was the first that is not finite, on which rank, in which step.

Every module is looked at after its forward and after its backward pass, and the attention function with its q, k and v as well. Findings
are numbered in the order of the looks, which is the same on all ranks, so the least number of all ranks is where it began: what
the ring then spread to others comes later. Nothing is raised until the step's end, so that all ranks stop together.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from ringattn.model.transformer import Attention
from ringattn.training.shards import local
from ringattn.training.stop import Diverged


@dataclass(frozen=True)
class Finding:
    """``number`` of the look at which it was seen, and what was seen."""

    number: int
    what: str


class NanWatch:
    """Looks at every module of ``model``; :meth:`report` after each step says what was found. Costs a host sync a module, and may
    change the last bits of gradients: the hooks stand between a tensor's users, whose gradients are then added in another order."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._looks = 0
        self._first: Finding | None = None
        # A module with a backward hook returns a view. FSDP warns that adding to one in place would go wrong: nothing here does.
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
        for name, module in model.named_modules():
            if name:
                module.register_forward_hook(self._after_forward(name))
            # (what has no input with a gradient passes none back; units of FSDP are made of modules that have hooks)
            if name != "embedding" and not isinstance(module, FSDPModule):
                module.register_full_backward_hook(self._after_backward(name))
            if isinstance(module, Attention):
                module.attend = self._around(f"{name}.attend", module.attend)

    def report(self, step: int) -> None:
        """Raise Diverged on all ranks if one of them found something in ``step``. Every rank calls this."""
        own = self._first or self._bad_parameter_gradient()
        everyone: list[Finding | None] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, own)
        self._first, self._looks = None, 0
        found = [(f.number, rank, f.what) for rank, f in enumerate(everyone) if f is not None]
        if not found:
            return
        first = min(number for number, _, _ in found)
        lines = [f"\n  rank {rank}: {what}" for number, rank, what in found if number == first]
        later = len({rank for number, rank, _ in found if number > first})
        spread = f"\n  ({later} more rank{'s' if later > 1 else ''} saw something not finite after that)" if later else ""
        raise Diverged(f"step {step}: debug.nan: this went bad first:{''.join(lines[:8])}{spread}\n  Nothing was written by this step.")

    def _look(self, tensors: dict[str, Any], place: str, blame: Callable[[str], str]) -> None:
        """One numbered look; ``blame`` puts the first bad tensor's name and place into words."""
        self._looks += 1
        if self._first is not None:
            return
        for name, x in tensors.items():
            if isinstance(x, Tensor) and x.is_floating_point() and not finite(x):
                self._first = Finding(self._looks, f"{blame(name)} {place}: {describe(x)}")
                return

    def _after_forward(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
            if self._first is None and isinstance(output, Tensor) and not finite(output):
                state = ", ".join(f"its {what} {'are finite' if fine else 'are not finite either'}" for what, fine in (
                    ("inputs", all(finite(x) for x in inputs if isinstance(x, Tensor) and x.is_floating_point())),
                    ("weights", all(finite(p) for p in module.parameters())),
                ))  # fmt: skip
                self._first = Finding(self._looks + 1, f"the output of {name}: {describe(output)}; {state}")
            self._looks += 1

        return hook

    def _after_backward(self, name: str) -> Callable[..., None]:
        def hook(_module: nn.Module, passed_on: tuple[Any, ...] | Tensor, given: tuple[Any, ...] | Tensor) -> None:
            received = all(finite(x) for x in _tensors(given))
            tensors = {f"gradient {i}": x for i, x in enumerate(_tensors(passed_on))}
            came = "it was given a finite one" if received else "the one it was given is not finite either"
            self._look(tensors, f"{name} ({came})", lambda _: "the gradient passed back by")

        return hook

    def _around(self, name: str, attend: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def watched(q: Tensor, k: Tensor, v: Tensor, handle: int, sinks: Tensor | None) -> Tensor:
            inputs = {"q": q, "k": k, "v": v}
            self._look(inputs, f"given to {name}", lambda which: which)
            for which, x in inputs.items():
                if x.requires_grad:
                    x.register_hook(self._gradient_hook(f"{name}, d{which}"))
            out = attend(q, k, v, handle, sinks)
            self._look({"out": out}, name, lambda _: "the output of")
            return out

        return watched

    def _gradient_hook(self, name: str) -> Callable[[Tensor], None]:
        return lambda gradient: self._look({"": gradient}, name, lambda _: "the gradient passed back by")

    def _bad_parameter_gradient(self) -> Finding | None:
        """What no module passed on: a gradient that is bad in a parameter alone."""
        for name, p in self._model.named_parameters():
            if p.grad is not None and not finite(p.grad):
                return Finding(self._looks + 1, f"the gradient of the parameter {name}: {describe(p.grad)}")
        return None


def _tensors(values: tuple[Any, ...] | Tensor | None) -> Sequence[Tensor]:
    return [x for x in (values if isinstance(values, tuple) else (values,)) if isinstance(x, Tensor)]


def finite(x: Tensor) -> bool:
    """Whether all that this rank holds of it is finite."""
    return bool(torch.isfinite(local(x.detach())).all())


def describe(x: Tensor) -> str:
    """How much of a tensor is not finite."""
    values = local(x.detach())
    nan, inf = int(values.isnan().sum()), int(values.isinf().sum())
    dtype = str(values.dtype).removeprefix("torch.")
    return f"{nan} NaN and {inf} infinite of {values.numel()} values, shape {list(values.shape)}, {dtype}"
