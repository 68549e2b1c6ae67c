"""Runs a function in several gloo processes and returns what each returned. A hang or a crash of any rank fails the test."""

from __future__ import annotations

import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def _entry(rank: int, world: int, folder: str, fn: Callable[..., Any], args: tuple, limit_s: float) -> None:
    torch.set_num_threads(1)  # bit equality: every rank and every virtual run uses one thread
    try:
        store = dist.FileStore(f"{folder}/store", world)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=limit_s))
        torch.save(fn(*args), f"{folder}/{rank}.pt")
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        Path(f"{folder}/{rank}.err").write_text(traceback.format_exc())
        raise


def run_ranks(world: int, fn: Callable[..., Any], *args: Any, limit_s: float = 120.0) -> list[Any]:
    """``fn(*args)`` on ``world`` ranks with the default group up; results in rank order. ``fn`` must be importable."""
    with tempfile.TemporaryDirectory() as folder:
        context = mp.spawn(_entry, (world, folder, fn, args, limit_s), world, join=False)
        try:
            deadline = time.monotonic() + limit_s
            while not context.join(timeout=max(0.1, deadline - time.monotonic())):  # returns at each exit of a rank
                if time.monotonic() > deadline:
                    raise TimeoutError(f"ranks still running after {limit_s} s")
        except Exception as error:
            errors = "\n".join(f"rank {p.stem}: {p.read_text()}" for p in sorted(Path(folder).glob("*.err")))
            raise AssertionError(f"a rank failed: {error}\n{errors}") from None
        finally:
            for process in context.processes:
                process.kill()
        return [torch.load(f"{folder}/{rank}.pt", weights_only=False) for rank in range(world)]
