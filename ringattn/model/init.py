"""Initial values: one table, and draws that do not depend on how the parameters are stored.

Every parameter is cut into blocks of whole rows (dim 0, about :data:`BLOCK_NUMEL` numbers) and each block has its own generator,
seeded by SHA-256 of (seed, parameter name, block index), drawing in fp64 on the CPU. So the values are the same for every dtype,
device, mesh and order of construction, and a rank draws only the blocks that its shard touches, with no communication.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from ringattn.model.config import ModelConfig

BLOCK_NUMEL = 1 << 20  # changing it changes every initial value

# (parameter name, distribution, its standard deviation or value). Each parameter must match exactly one line.
# Projections back into the residual stream are scaled by depth (GPT-2): 2 * layers of them are added up.
INITIAL_VALUES: list[tuple[str, str, Callable[[ModelConfig], float]]] = [
    (r"embedding\.weight", "normal", lambda c: c.init_std),
    (r"blocks\.\d+\.attention\.qkv\.weight", "normal", lambda c: c.init_std),
    (r"blocks\.\d+\.attention\.out\.weight", "normal", lambda c: c.init_std / math.sqrt(2 * c.layers)),
    (r"blocks\.\d+\.attention\.sinks", "constant", lambda c: 0.0),  # a sink weighs as much as one key of score 0
    (r"blocks\.\d+\.ffn\.gate_up\.weight", "normal", lambda c: c.init_std),
    (r"blocks\.\d+\.ffn\.down\.weight", "normal", lambda c: c.init_std / math.sqrt(2 * c.layers)),
    (r"(.+\.)?(norm|q_norm|k_norm|final_norm)\.weight", "constant", lambda c: 1.0),
    (r"head\.weight", "normal", lambda c: c.init_std),
]


def parameter_name(name: str) -> str:
    """The name without what activation checkpointing or torch.compile wrappers put in; wrapping must not change the values."""
    return name.replace("_checkpoint_wrapped_module.", "").replace("_orig_mod.", "")


def initial_rule(name: str, cfg: ModelConfig) -> tuple[str, float]:
    """The (distribution, std or value) of a parameter. Raises KeyError unless exactly one line of the table matches."""
    found = [(kind, value(cfg)) for pattern, kind, value in INITIAL_VALUES if re.fullmatch(pattern, name)]
    if len(found) != 1:
        raise KeyError(f"parameter {name!r} matches {len(found)} lines of INITIAL_VALUES, needs exactly 1")
    return found[0]


def _draw_rows(seed: int, name: str, shape: torch.Size, start: int, stop: int) -> np.ndarray:
    """Rows ``start`` to ``stop`` of the standard normal draw of a whole parameter, fp64 [stop - start, numbers per row]."""
    row_numel = math.prod(shape[1:])
    block_rows = max(1, BLOCK_NUMEL // row_numel)
    out = np.empty((stop - start, row_numel))
    for block in range(start // block_rows, -(-stop // block_rows)):
        digest = hashlib.sha256(f"{seed}/{name}/{block}".encode()).digest()
        generator = np.random.Generator(np.random.SFC64(np.random.SeedSequence(int.from_bytes(digest, "big"))))
        first = block * block_rows
        values = generator.standard_normal((min(block_rows, shape[0] - first), row_numel))
        lo, hi = max(start, first), min(stop, first + len(values))
        out[lo - start : hi - start] = values[lo - first : hi - first]
    return out


def _local_slices(param: DTensor) -> tuple[slice, ...]:
    """Which part of the global tensor this rank holds: each mesh axis cuts what the ones before it left, as torch.chunk does."""
    start, size = [0] * param.dim(), list(param.shape)
    coordinate = param.device_mesh.get_coordinate()
    assert coordinate is not None, "this rank is not in the parameter's mesh"
    for axis, placement in enumerate(param.placements):
        if type(placement) is Shard:
            length = size[placement.dim]
            step = -(-length // param.device_mesh.size(axis))
            begin = min(length, coordinate[axis] * step)
            start[placement.dim] += begin
            size[placement.dim] = min(length, begin + step) - begin
        elif not isinstance(placement, Replicate):
            raise NotImplementedError(f"cannot initialise a parameter placed as {placement}")
    slices = tuple(slice(a, a + n) for a, n in zip(start, size, strict=True))
    local = tuple(param.to_local().shape)
    assert local == tuple(size), f"expected a local shard {size} at {start}, found {local}"
    return slices


@torch.no_grad()
def initialise(model: nn.Module, cfg: ModelConfig, seed: int) -> None:
    """Fill every parameter of ``model``, sharded or not, from the table. Raises RuntimeError for parameters on the meta device."""
    for full_name, param in model.named_parameters():
        name = parameter_name(full_name)
        if param.is_meta:
            raise RuntimeError(f"parameter {name} is on the meta device: call model.to_empty(device=...) first")
        kind, value = initial_rule(name, cfg)
        local: Tensor = param.to_local() if isinstance(param, DTensor) else param
        if kind == "constant":
            local.fill_(value)
            continue
        slices = _local_slices(param) if isinstance(param, DTensor) else tuple(slice(0, n) for n in param.shape)
        if local.numel():
            rows = _draw_rows(seed, name, param.shape, slices[0].start, slices[0].stop)
            rows = rows.reshape(len(rows), *param.shape[1:])[(slice(None), *slices[1:])]
            local.copy_(torch.from_numpy(rows * value))
