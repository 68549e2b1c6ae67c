"""Real ranks for tests: a few processes that are started once and then run one task after another, each in a process group of its own.

A task is a function of this module's neighbours, called as ``task(launch, *args)`` on every rank; what rank 0 returns comes back.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

LIMIT_S = 180.0


def _serve(rank: int, pipe: Connection) -> None:
    import torch
    import torch.distributed as dist

    from ringattn.training.launch import Launch

    torch.set_num_threads(1)
    while True:
        task = pipe.recv()
        if task is None:
            return
        function, args, world_size, store_file = task
        store = dist.HashStore() if world_size == 1 else dist.FileStore(store_file, world_size)
        try:
            result = function(Launch(rank, world_size, rank, world_size, store), *args)
            pipe.send((True, result if rank == 0 else None))
        except BaseException:
            pipe.send((False, traceback.format_exc()))
        if dist.is_initialized():  # left open by an error on a GPU
            dist.destroy_process_group()


class Ranks:
    """Up to ``most`` processes, started when first needed."""

    def __init__(self, most: int = 4) -> None:
        self.most = most
        self._workers: list[tuple[Any, Connection]] = []

    def run(self, world_size: int, function: Callable[..., Any], *args: Any, limit_s: float = LIMIT_S) -> Any:
        """Rank 0's result of ``function(launch, *args)`` run on ``world_size`` ranks. Raises if any rank fails or hangs."""
        assert world_size <= self.most
        context = multiprocessing.get_context("spawn")
        while len(self._workers) < world_size:
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(len(self._workers), theirs), daemon=True)
            process.start()
            theirs.close()
            self._workers.append((process, ours))
        with tempfile.TemporaryDirectory() as folder:
            workers = self._workers[:world_size]
            for _, pipe in workers:
                pipe.send((function, args, world_size, f"{folder}/store"))
            results, failures = [], []
            for rank, (_, pipe) in enumerate(workers):
                try:
                    if not pipe.poll(limit_s if not failures else 5.0):
                        failures.append(f"rank {rank}: no answer in {limit_s} s")
                        continue
                    fine, result = pipe.recv()
                except EOFError:
                    fine, result = False, "the process died"
                results.append(result)
                if not fine:
                    failures.append(f"rank {rank}: {result}")
        if failures:
            self.close()  # ranks may be left waiting for each other: the next task starts with new ones
            raise AssertionError("\n".join(failures))
        return results[0]

    def close(self) -> None:
        """End the processes."""
        for process, pipe in self._workers:
            with contextlib.suppress(OSError):
                pipe.send(None)
            process.join(2.0)
            if process.is_alive():
                process.kill()
        self._workers = []
