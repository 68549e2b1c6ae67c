"""Sharded tensors (DTensor) and whole ones alike: this rank's part, and another tensor laid out in the same way."""

from __future__ import annotations

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec


def local(x: Tensor) -> Tensor:
    """This rank's part of a tensor."""
    return x.to_local() if isinstance(x, DTensor) else x


def like(p: Tensor, flat: Tensor) -> Tensor:
    """``flat``, as many numbers as this rank's part of ``p`` has, in the shape of ``p`` and sharded as that is; it stays where it is."""
    if not isinstance(p, DTensor):
        return flat.view(p.shape)
    meta = p._spec.tensor_meta
    assert meta is not None
    spec = DTensorSpec(p.device_mesh, p.placements, tensor_meta=meta._replace(dtype=flat.dtype))
    return DTensor(flat.view(p.to_local().shape), spec, requires_grad=False)
