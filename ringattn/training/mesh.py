"""The mesh replicate x shard x ring x ulysses: ranks as one tensor, every group a slice of it.

    ranks = arange(world).view(replicate, shard, ring, ulysses)

The ranks that exchange heads (ulysses) are neighbours, and so are, where those are few, ring neighbours: on one host where possible.
Two views of this one order are all that the rest needs: [replicate, shard x ring x ulysses] for the parameters (sharded over the second,
replicated over the first) and [replicate x shard, ring, ulysses] for the data (the ranks of a ring, with the ulysses axis that each of
its shards is split over, read the same rows).
"""

from __future__ import annotations

import datetime
import socket
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ringattn.config import Config, ConfigError
from ringattn.ring.ring import Ring
from ringattn.ring.transport import use_transport


@dataclass(frozen=True)
class Mesh:
    """This rank's place in the mesh.

    ``parameters``: the mesh for FSDP, [shard x ring x ulysses] or [replicate, ...]. ``sharded``: the process group that holds one whole
    copy of the parameters. ``ring``: the ring of this rank. ``data_rank`` of ``data_size``: which ring this is, of how many.
    ``host_ranks``: ranks on this host, which share its memory.
    """

    device: torch.device
    rank: int
    world_size: int
    parameters: DeviceMesh
    sharded: dist.ProcessGroup
    ring: Ring
    data_rank: int
    data_size: int
    host_ranks: int

    @property
    def is_main(self) -> bool:
        """Whether this rank writes files and speaks to the user."""
        return self.rank == 0

    @property
    def row_ranks(self) -> int:
        """Ranks that share a row."""
        return self.ring.processes * self.ring.ulysses


def outer_group(config: Config, rings: torch.Tensor, device: torch.device) -> dist.ProcessGroup | None:
    """The group for messages between nodes, of the ring that this rank is in; None in a ring of one level. ``rings``: ranks [data, ring,
    ulysses]. Every rank calls this."""
    p, own = config.parallel, None
    if p.inner is None or p.inner == rings.shape[1] * p.virtual:
        return None
    for members in rings.transpose(1, 2).flatten(0, 1).tolist():
        group = dist.new_group(members, timeout=datetime.timedelta(seconds=p.timeout_s))
        own = group if dist.get_rank() in members else own
    dist.all_reduce(torch.zeros(1, device=device), group=own)
    return own


def build_mesh(config: Config, device: torch.device) -> Mesh:
    """Slice the default process group into the mesh of ``config.parallel``. Every rank calls this.

    Raises ConfigError where the ring cannot use the transport asked for.
    """
    p, world_size = config.parallel, dist.get_world_size()
    ring_processes = config.ring_processes(world_size)
    parameters = init_device_mesh(device.type, (p.replicate, p.shard * ring_processes * p.ulysses), mesh_dim_names=("replicate", "sharded"))
    axes = ("data", "ring", "ulysses")
    rings = init_device_mesh(device.type, (p.replicate * p.shard, ring_processes, p.ulysses), mesh_dim_names=axes)
    ring_group = rings["ring"].get_group()
    heads_group = rings["ulysses"].get_group() if p.ulysses > 1 else None
    # A first transfer between two ranks would wait for a communicator that the others have not begun to make: make it here, all together.
    dist.all_reduce(torch.zeros(1, device=device), group=ring_group)
    if heads_group is not None:
        dist.all_reduce(torch.zeros(1, device=device), group=heads_group)
    ring = Ring(ring_group, p.virtual, heads_group, inner=p.inner, outer_group=outer_group(config, rings.mesh, device))
    try:
        use_transport(ring, p.transport, device)
    except ValueError as error:
        raise ConfigError([f"parallel.{error}"]) from None
    hosts = [""] * world_size
    dist.all_gather_object(hosts, socket.gethostname())
    return Mesh(
        device=device, rank=dist.get_rank(), world_size=world_size,
        parameters=parameters if p.replicate > 1 else parameters["sharded"],
        sharded=parameters["sharded"].get_group(),
        ring=ring,
        data_rank=rings.get_local_rank("data"), data_size=p.replicate * p.shard,
        host_ranks=hosts.count(socket.gethostname()),
    )
