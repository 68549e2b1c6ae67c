"""The numbers of a run: one exchange between ranks a step, one line a step in ``metrics.jsonl``, the same in TensorBoard.

A line holds ``step`` (finished steps), ``loss`` (nats a target), ``grad_norm`` (before clipping), ``lr``, ``targets`` (labels of the
step), ``tokens`` (positions read since the start of the run, over all ranks), and after a validation ``val_loss`` and
``val_nats_per_byte``. These are a pure function of the config (and of the topology, in their last bits). The fields of TIMINGS are not.
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

from ringattn.training.mesh import Mesh

TIMINGS = ("tokens_per_s", "step_s", "mem_gib", "mfu")
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
    """Writer of metrics.jsonl and TensorBoard. Only the main rank's writes."""

    def __init__(self, folder: Path, *, step: int, enabled: bool, tensorboard: bool) -> None:
        self.last: dict[str, Any] = {}
        self._file, self._board = None, None
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
        if self._board is not None:
            for key, value in record.items():
                if key != "step":
                    self._board.add_scalar(("timing/" if key in TIMINGS else "train/") + key, value, record["step"])

    def close(self) -> None:
        """Flush and close."""
        if self._file is not None:
            self._file.close()
        if self._board is not None:
            self._board.close()


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
