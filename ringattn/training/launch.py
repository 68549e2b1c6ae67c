"""How a process finds the others: torchrun's environment, or nothing at all for a single process.

One process without torchrun gets a process group of its own as well (an in-memory store, world size 1), so sharding, checkpoints and
the loop have one code path. A store outlives the process group, so that a sweep can open one group after another.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TextIO

import torch
import torch.distributed as dist

from ringattn.config import Config, ConfigError


@dataclass(frozen=True)
class Launch:
    """This process's place among ``world_size``: global ``rank``, ``local_rank`` of ``local_world_size`` on this host, and their store."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    store: Any = None

    @staticmethod
    def from_environment() -> Launch:
        """Read what torchrun (or another launcher that speaks its environment variables) says; without it, a world of one."""
        env = os.environ
        world_size = int(env.get("WORLD_SIZE", "1"))
        if world_size == 1:
            return Launch(0, 1, 0, 1, dist.HashStore())
        local_world_size = int(env.get("LOCAL_WORLD_SIZE", world_size))
        check_main_address(one_host=local_world_size == world_size)
        store, rank, world_size = next(iter(dist.rendezvous("env://")))
        return Launch(rank, world_size, int(env.get("LOCAL_RANK", rank % local_world_size)), local_world_size, store)

    def say_once(self, message: str, stream: TextIO, patience_s: float = 20.0) -> None:
        """Rank 0 prints what all ranks have to say; the others wait for that, because a launcher ends all ranks when the first one
        exits, and rank 0 for them, because the store may live in its process. A rank that waits in vain has met a problem of its own,
        and says it itself."""
        if self.rank == 0:
            print(message, file=stream, flush=True)
            if self.world_size > 1:
                self.store.set("ringattn/said", "yes")
                with contextlib.suppress(RuntimeError):  # some rank has not got here: it has a problem of its own
                    heard = [f"ringattn/heard{rank}" for rank in range(1, self.world_size)]
                    self.store.wait(heard, datetime.timedelta(seconds=min(5.0, patience_s)))
            return
        try:
            self.store.wait(["ringattn/said"], datetime.timedelta(seconds=patience_s))
            self.store.set(f"ringattn/heard{self.rank}", "yes")
        except RuntimeError:  # a timeout, or a store that is gone
            print(f"rank {self.rank}: {message}", file=stream, flush=True)


def check_main_address(*, one_host: bool) -> None:
    """A host whose own name means nothing to it is no obstacle to a run on that one host: its ranks then meet on the loopback.

    Raises ConfigError where several hosts are to meet at a name that cannot be resolved (torch would try for minutes).
    """
    name = os.environ.get("MASTER_ADDR", "")
    try:
        socket.getaddrinfo(name, None)
    except OSError as error:
        if not one_host:
            advice = "give torchrun --local-addr an address of the first host"
            raise ConfigError([f"MASTER_ADDR={name}: cannot be resolved ({error}); {advice}"]) from None
        os.environ["MASTER_ADDR"] = "127.0.0.1"


def choose_device(config: Config, launch: Launch) -> torch.device:
    """cuda:<local rank> or cpu. Raises ConfigError where a host has fewer GPUs than ranks."""
    if config.device == "cpu" or (config.device == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if launch.local_world_size > torch.cuda.device_count():
        raise ConfigError([
            f"device={config.device}: {launch.local_world_size} ranks on {socket.gethostname()} but only {torch.cuda.device_count()} GPUs; "
            "start fewer ranks, use parallel.virtual for a larger ring, or device=cpu"
        ])
    return torch.device("cuda", launch.local_rank)


def limit_threads(launch: Launch, device: torch.device) -> None:
    """Share the cores among the ranks of a host where nobody (torchrun does) has set the number of threads."""
    if device.type == "cpu" and "OMP_NUM_THREADS" not in os.environ:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        torch.set_num_threads(max(1, cores // launch.local_world_size))


@contextmanager
def process_group(config: Config, launch: Launch, job: int = 0) -> Iterator[torch.device]:
    """Open the default process group for one job, hand out this rank's device, and close the group whatever happens.

    gloo carries CPU tensors (and counts, plans and names), NCCL those on GPUs. ``job`` keeps the keys of a sweep's jobs apart in the store.
    """
    device = choose_device(config, launch)
    limit_threads(launch, device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        store=dist.PrefixStore(f"ringattn/job{job}", launch.store),
        rank=launch.rank, world_size=launch.world_size,
        timeout=datetime.timedelta(seconds=config.parallel.timeout_s),
    )
    clean = device.type == "cpu"  # after an error on a GPU, closing could wait for ranks that never come: the process ends anyway
    try:
        yield device
        clean = True
    finally:
        if clean:
            dist.destroy_process_group()
