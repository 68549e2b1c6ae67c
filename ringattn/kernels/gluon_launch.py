"""Launching compiled kernels from the host in little time.

Triton's own call works out the type and the specialisation of every argument anew, which for a kernel with several TMA
descriptors costs more than the launch itself. Here it does so once for each combination of what it would find (``_trait``); after
that the compiled kernel is called directly, by Triton's documented ``compiled[grid](*args)``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ringattn.kernels.replay import Launched


class TensorMap:
    """A TMA descriptor to be made at launch: ``base`` seen with ``shape`` and ``strides`` (elements), moved in blocks.

    Looks like Triton's Gluon TensorDescriptor to the launcher, without its checks (16-byte aligned base, strides of 16-byte
    multiples, last stride 1), which the first launch of each kind still makes.
    """

    __slots__ = ("base", "block_shape", "layout", "padding", "shape", "strides")

    def __init__(self, base: Tensor, shape: list[int], strides: list[int], block_shape: list[int], layout: Any) -> None:
        self.base, self.shape, self.strides, self.block_shape, self.layout = base, shape, strides, block_shape, layout
        self.padding = "zero"

    def checked(self) -> Any:
        """The same as Triton's own object. Raises AssertionError if TMA cannot address it."""
        from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

        return TensorDescriptor(self.base, self.shape, self.strides, self.block_shape, self.layout)


class Launcher:
    """Calls kernels by their compiled form. One per kernel object; holds compiled code only."""

    def __init__(self) -> None:
        self._compiled: dict[tuple[Any, ...], Any] = {}

    def __call__(self, kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], constants: dict[str, int | bool]) -> Launched | None:
        """Run ``kernel[grid](*args, **constants)`` on the current device and stream with 4 warps; what was launched, for ``Replays``.

        ``args``: the first arguments in order; ``constants``: all that remain, compile-time.
        """
        key = (kernel, torch.cuda.current_device(), *constants.values(), *map(_trait, args))
        compiled = self._compiled.get(key)
        rest = [constants[name] for name in kernel.arg_names[len(args) :]]
        size = (*grid, 1, 1)[:3]
        if compiled is None:
            checked = [x.checked() if type(x) is TensorMap else x for x in args]
            compiled = kernel[grid](*checked, **constants, num_warps=4)
            if compiled is None:  # the interpreter
                return None
            self._compiled[key] = compiled
        else:
            compiled[size](*args, *rest)
        return Launched(compiled, size, (*args, *rest))


def _trait(x: Any) -> Any:
    """All of an argument that Triton compiles for: width, divisibility by 16 and being 1; dtype and alignment; the block of a map."""
    kind = type(x)
    if kind is int:
        return 1 if x == 1 else (x % 16 == 0) * 2 + (x >= 2**31) * 4
    if kind is TensorMap:
        return x.base.dtype, *x.block_shape
    if kind is float:
        return None
    return x.dtype, x.data_ptr() % 16
