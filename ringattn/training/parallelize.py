"""From a model's config to a sharded model that is ready to train. This page is the order of composition, with the reason for each step.

    1. meta        build without memory: a whole model need not fit into one process
    2. attend      the ring is closed over, so the model itself knows nothing of it
    3. activation  checkpointing inside of everything else: what is recomputed must see gathered parameters (4 and 5 are around it)
    4. compile     one graph a block, checkpointing included, FSDP's hooks not: they stay eager around the compiled forward; and so does
                   offloading, which takes what the graph as a whole saves
    5. shard       FSDP2 over shard x ring x ulysses, HSDP over replicate: every rank of a ring holds a share of the parameters, since
                   each of them sees other tokens and so contributes its own part of the gradient
    6. values      memory for this rank's shards only, then the one table of initial values, equal for every sharding

Steps 3 and 4 replace ``block.forward``, not the module: no wrapper prefix ever enters a parameter's name, so that a checkpoint of any
combination loads into any other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from ringattn import cost
from ringattn.config import Config, ConfigError
from ringattn.kernels.select import select_kernel
from ringattn.model.config import ModelConfig
from ringattn.model.transformer import FREE_TO_SAVE, Attend, Block, Transformer
from ringattn.ring.attention import attend
from ringattn.ring.ring import Ring
from ringattn.training.mesh import Mesh
from ringattn.training.offload import Offload, host_budget


def precision(config: Config, device: torch.device) -> tuple[torch.dtype, torch.dtype]:
    """(dtype of parameters and their gradients, dtype of the computation): bf16 keeps fp32 master weights and fp32 reductions."""
    match config.precision:
        case "fp64":
            return torch.float64, torch.float64
        case "auto" if device.type == "cuda":
            return torch.float32, torch.bfloat16
        case "bf16":
            return torch.float32, torch.bfloat16
        case _:
            return torch.float32, torch.float32


def build_model(config: Config, model_config: ModelConfig, mesh: Mesh, kernel: str) -> Transformer:
    """The model of ``config`` on this rank's share of ``mesh``, initialised from ``config.seed``. Every rank calls this."""
    master, compute = precision(config, mesh.device)
    with torch.device("meta"):
        model = Transformer(model_config, attend=ring_attend(model_config, kernel, config.deterministic, mesh.ring)).to(master)
    offload = None
    if config.activation == "offload":
        work = cost.work_of(config, model_config, mesh.world_size, compute_bytes=compute.itemsize)
        offload = Offload(model_config.layers, mesh.device, host_budget(config, mesh.host_ranks) - cost.host_state_bytes(work))
    for i, block in enumerate(model.blocks):
        assert isinstance(block, Block)
        forward = recompute(block.forward, config.activation)
        forward = torch.compile(forward) if config.compile else forward
        block.forward = forward if offload is None else offload.wrap(forward, block, i)  # type: ignore[method-assign]
    shard(model, config, mesh, compute if compute != master else None)
    model.to_empty(device=mesh.device)
    model.initialise(config.seed)
    return model


def ring_attend(model_config: ModelConfig, kernel: str, deterministic: bool, ring: Ring) -> Attend:
    """The attention function of every layer: the mask and the ring's hops are in the schedule that ``handle`` names."""
    softcap = model_config.softcap or None

    def attend_ring(q: Tensor, k: Tensor, v: Tensor, handle: int, sinks: Tensor | None) -> Tensor:
        return attend(q, k, v, handle, ring=ring, softcap=softcap, sinks=sinks, kernel=kernel, deterministic=deterministic)

    return attend_ring


def recompute(forward: Callable[..., Tensor], activation: str) -> Callable[..., Tensor]:
    """Activation checkpointing of one block.

    block            keep the block's input only; the backward pass runs the whole forward again, the ring's hops included
    offload          nothing is recomputed; what is saved goes to the host (:mod:`ringattn.training.offload`)
    attention_saved  also keep what attention (and the blockwise feed-forward) put out, so that the ring never turns a second time
    """
    if activation in ("none", "offload"):
        return forward
    saved = {torch.ops.ringattn.ring_forward.default, *FREE_TO_SAVE}

    def policy(_context: Any, op: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if op in saved else CheckpointPolicy.PREFER_RECOMPUTE

    # Nothing in a block is random, so no generator state needs to be kept for the second run.
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
    if activation == "attention_saved":
        options["context_fn"] = lambda: create_selective_checkpoint_contexts(policy)

    def checkpointed(*inputs: Any) -> Tensor:
        return checkpoint(forward, *inputs, **options)

    return checkpointed


def shard(model: Transformer, config: Config, mesh: Mesh, compute: torch.dtype | None) -> None:
    """FSDP2, one unit a block; embedding, final norm and head form the root unit.

    Gradients are *summed* over the mesh (the loss is already divided by the global count of targets), exactly: FSDP's default is a
    mean. ``compute``: cast gathered parameters to this dtype and reduce their gradients in fp32; None leaves dtypes alone.
    """
    # Inputs are not cast: the rotary phases must stay fp32.
    reduce = torch.float32 if compute is not None else None
    policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=reduce, cast_forward_inputs=False)
    for block in model.blocks:
        fully_shard(block, mesh=mesh.parameters, mp_policy=policy, reshard_after_forward=config.parallel.reshard_after_forward)
    fully_shard(model, mesh=mesh.parameters, mp_policy=policy, reshard_after_forward=False)  # its head is needed again at once
    for module in fsdp_units(model):
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)


def fsdp_units(model: nn.Module) -> list[FSDPModule]:
    """Every FSDP unit of the model, the root first."""
    return [m for m in model.modules() if isinstance(m, FSDPModule)]


def set_gradient_sync(model: nn.Module, now: bool) -> None:
    """Whether the next backward pass reduces gradients over the mesh, or only adds them up on this rank."""
    assert isinstance(model, FSDPModule)
    model.set_requires_gradient_sync(now)


def free_gathered(model: nn.Module) -> None:
    """Leave only this rank's shards: after a forward pass without a backward pass the root unit still holds its parameters whole."""
    for unit in fsdp_units(model):
        unit.reshard()


def choose_kernel(config: Config, model_config: ModelConfig, device: torch.device) -> str:
    """The name of the attention kernel that ``config`` gets on this device.

    Raises ConfigError where the named kernel cannot take the model's dtype, head dim or features.
    """
    m, (_, compute) = model_config, precision(config, device)
    q, k = (torch.empty(1, 1, heads, m.head_dim, dtype=compute, device=device) for heads in (m.heads, m.kv_heads))
    sinks = q.new_empty(m.heads) if m.sinks else None
    try:
        return select_kernel(config.kernel, q, k, softcap=m.softcap or None, sinks=sinks, deterministic=config.deterministic).name
    except (ValueError, ImportError) as error:
        reason = str(error).removeprefix(f"kernel={config.kernel!r}: ")
        raise ConfigError([f"kernel={config.kernel}: {reason}; kernel=auto takes the fastest that works here"]) from None


def agree_on_kernel(config: Config, model_config: ModelConfig, mesh: Mesh) -> str:
    """The one attention kernel of this run. Ranks that chose differently would disagree in their bits: that is refused.

    Raises ConfigError for that, and what :func:`choose_kernel` raises. Every rank calls this.
    """
    refused: list[ConfigError] = []
    try:
        name = choose_kernel(config, model_config, mesh.device)
    except ConfigError as error:
        name = "none"
        refused.append(error)
    names: list[Any] = [None] * mesh.world_size
    dist.all_gather_object(names, name)
    if refused:
        raise refused[0]
    if len(set(names)) > 1:
        chosen = ", ".join(f"rank {r}: {n}" for r, n in enumerate(names) if n != names[0] or r == 0)
        raise ConfigError([f"kernel={config.kernel}: the ranks would run different kernels ({chosen}); name one that all of them have"])
    return name
