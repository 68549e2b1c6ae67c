"""What the Triton kernels' host side works out once for tensors of given shapes and strides: how to launch, and how tiles are read.

Tensors are [B, S, H, D], last dim contiguous. See triton_common for how the kernels read tiles.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ringattn.kernels.triton_configs import Config


@dataclass
class Plan:
    """All about a launch that does not change from one to the next on tensors of equal shapes and strides."""

    variant: Any  # which compiled kernel this is
    kind: Any  # what its configuration was chosen for
    config: Config
    grid: int
    constants: dict[str, Any]
    strides: tuple[int, ...] = ()
    maps: list[tuple[Any, ...]] | None = None  # of tiles read through descriptors: arguments of Descriptor
    line_rows: int = 0  # lines are read through descriptors too, this many rows at a time
    compiled: Any = None

    def loads(self, tiles: tuple[Tensor, ...], lines: tuple[Tensor, ...]) -> list[Any]:
        """The arguments for what is read by tiles."""
        if self.maps is None:
            return [x for t in tiles for x in (t, t)] + list(lines)
        loads: list[Any] = []
        for t, (shape, strides, first, second) in zip(tiles, self.maps, strict=True):
            loads += [Descriptor(t, shape, strides, first), second and Descriptor(t, shape, strides, second)]
        if not self.line_rows:
            return loads + list(lines)
        for t in lines:
            b, h, padded = t.shape
            loads.append(Descriptor(t, [b * h, padded], [padded, 1], [1, self.line_rows]))
        return loads


class Descriptor(TensorDescriptor):
    """A tensor descriptor without the checks of its base class: :func:`describable` has made them."""

    def __post_init__(self) -> None:
        pass


def tensor_map(t: Tensor, rows: int, w0: int, w1: int) -> tuple[list[int], list[int], list[int], list[int] | None]:
    """Shape and strides of [B, S, H, D] seen as [B, H, S, D], and the block of each part of a tile."""
    b, s, h, d = t.shape
    strides = [stride_of(t, 0, d), stride_of(t, 2, d), stride_of(t, 1, d), 1]
    return [b, h, s, d], strides, [1, 1, rows, w0], [1, 1, rows, w1] if w1 else None


def stride_of(t: Tensor, dim: int, otherwise: int) -> int:
    """A dim's stride; of a dim of one element, whose stride may be anything, ``otherwise``."""
    return t.stride(dim) if t.shape[dim] > 1 else otherwise


def row_strides(t: Tensor, vec: int) -> tuple[int, int, int]:
    """(batch, sequence, head) strides in units of ``vec`` elements; 0 for a dim of one element."""
    return stride_of(t, 0, 0) // vec, stride_of(t, 1, 0) // vec, stride_of(t, 2, 0) // vec


def vector_length(tensors: Iterable[Tensor]) -> int:
    """8 if all strides are multiples of 8 elements, else 1."""
    return 8 if all(s % 8 == 0 for t in tensors for s in row_strides(t, 1)) else 1


def alignment(tensors: Iterable[Tensor]) -> int:
    """A bit for each tensor: whether it starts at a multiple of 16 bytes, for which Triton compiles a kernel of its own.

    The kernels are declared not to care for the other pointers' alignment.
    """
    bits = 0
    for t in tensors:
        bits = bits * 2 + (t.data_ptr() % 16 == 0)
    return bits


def describable(t: Tensor) -> bool:
    """Whether the copy engine can read this tensor: 16-byte aligned, positive strides."""
    return t.data_ptr() % 16 == 0 and all(s > 0 and s * t.itemsize % 16 == 0 for s in (stride_of(t, d, 16) for d in range(3)))
