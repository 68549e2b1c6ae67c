"""The numbers of a run: one exchange between ranks a step, one line a step in ``metrics.jsonl``, the same in TensorBoard.

A line holds ``step`` (finished steps), ``loss`` (nats a target), ``grad_norm`` (before clipping), ``lr``, ``targets`` (labels of the
step), ``tokens`` (positions read since the start of the run, over all ranks), and after a validation ``val_loss`` and
``val_nats_per_byte``, in a ring ``ring_balance`` (predicted time of attention in lock step over the mean of its shards; of the
slowest ring). These are a pure function of the config (and of the topology, in their last bits). The fields of TIMINGS are not.
Every ``log.every`` steps ``comm_exposed_ms`` (how long attention waited for the ring's transfers in the step, of the rank that waited
longest) and ``comm_hidden_pct`` (of all ranks' transfer time), see ringattn.ring.timeline.
"""

from __future__ import annotations

import json
import os
import resource
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ringattn.config import ConfigError, LogConfig
from ringattn.training.mesh import Mesh

TIMINGS = ("tokens_per_s", "step_s", "mem_gib", "mfu", "comm_exposed_ms", "comm_hidden_pct")
FILE = "metrics.jsonl"


def deterministic(record: dict[str, Any]) -> dict[str, Any]:
    """A line without what depends on the clock and the machine: what a resumed run repeats bit for bit."""
    return {k: v for k, v in record.items() if k not in TIMINGS}


def exchange(mesh: Mesh, values: list[torch.Tensor | float]) -> list[list[float]]:
    """Each value of every rank: result[i][r] is value i of rank r. One all-gather, then one look by the host.

    A gather, not a sum: what is added up afterwards is added in rank order, so it has the same bits on every rank and in every run.
    """
    own = torch.stack([torch.as_tensor(v, dtype=torch.float64, device=mesh.device) for v in values])
    everyone = [torch.empty_like(own) for _ in range(mesh.world_size)]
    dist.all_gather(everyone, own)
    table: list[list[float]] = torch.stack(everyone, 1).tolist()
    return table


def peak_memory_gib(device: torch.device) -> float:
    """Most memory this process has held so far: on the GPU by the allocator's count, on the CPU by the system's."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30


class Metrics:
    """Writer of metrics.jsonl, TensorBoard and W&B. Only the main rank's writes. ``step``: finished steps; ``tracker``: an open W&B run."""

    def __init__(self, folder: Path, *, step: int, enabled: bool, tensorboard: bool, tracker: Any = None) -> None:
        self.last: dict[str, Any] = {}
        self._file, self._board, self._tracker = None, None, tracker
        if not enabled:
            return
        path = folder / FILE
        keep = [line for line in read_lines(path) if line["step"] <= step]
        temporary = path.with_suffix(".tmp")
        with open(temporary, "w") as file:
            file.writelines(json.dumps(line) + "\n" for line in keep)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        self._file = open(path, "a", buffering=1)  # noqa: SIM115 - open for the length of the run, a line at a time
        if tensorboard:
            from torch.utils.tensorboard import SummaryWriter  # slow to import, and only one rank needs it

            self._board = SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1)

    def write(self, record: dict[str, Any]) -> None:
        """Add the line of one step."""
        self.last = record
        if self._file is not None:
            self._file.write(json.dumps(record) + "\n")
        named = {("timing/" if k in TIMINGS else "train/") + k: v for k, v in record.items() if k != "step"}
        if self._board is not None:
            for key, value in named.items():
                self._board.add_scalar(key, value, record["step"])
        if self._tracker is not None:
            self._tracker.log(named, step=record["step"])

    def close(self) -> None:
        """Flush and close."""
        if self._file is not None:
            self._file.close()
        if self._board is not None:
            self._board.close()
        if self._tracker is not None:
            self._tracker.finish()


def open_tracker(log: LogConfig, folder: Path, config: dict[str, Any], *, step: int) -> Any:
    """A W&B run for the run in ``folder``: the one that it had when it goes on after ``step`` > 0, else a new one. None if it is off.

    Raises ConfigError if W&B cannot start, e.g. without a login.
    """
    if log.wandb == "off":
        return None
    import wandb  # an extra, and slow to import

    remembered = folder / "wandb-id"
    identity = remembered.read_text().strip() if step and remembered.exists() else None
    try:
        tracker = wandb.init(
            project=log.wandb_project, name=folder.name, dir=str(folder), config=config, mode=log.wandb, id=identity, resume="allow",
        )
    except Exception as error:  # of many kinds
        raise ConfigError([f"log.wandb={log.wandb}: {error}; offline needs no login and no network"]) from error
    remembered.write_text(f"{tracker.id}\n")
    return tracker


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics file; a last line that a crash cut short is left out."""
    lines = []
    for text in path.read_text().splitlines() if path.exists() else []:
        try:
            line = json.loads(text)
        except ValueError:
            break
        if isinstance(line, dict) and isinstance(line.get("step"), int):
            lines.append(line)
    return lines
