"""What a run will take, said before its first step, compared after its last, and asked for help when memory runs out."""

from __future__ import annotations

import dataclasses
import itertools
import statistics
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ringattn import cost
from ringattn.config import Config, ConfigError, from_dict, to_dict
from ringattn.cost import GIB, Machine, Memory, StepTime, Work
from ringattn.data import Dataset
from ringattn.model.config import ModelConfig
from ringattn.plan_report import memory_bar, seconds
from ringattn.planner import POLICIES, merged, show
from ringattn.training import checkpoint
from ringattn.training.parallelize import precision

if TYPE_CHECKING:
    from ringattn.training.run import Run

WARM_STEPS = 2  # the first steps compile kernels and fill the allocator: they are not measured
KEPT_STEPS = 200


@dataclass(frozen=True)
class Forecast:
    """The cost model's answer for a run. ``time`` is None where the device has no profile (a CPU, another GPU)."""

    work: Work
    memory: Memory
    machine: Machine | None
    time: StepTime | None

    def lines(self) -> list[str]:
        """For the header."""
        largest = " and ".join(self.memory.largest[:2])
        said = [f"predicted {self.memory.peak / GIB:.1f} GiB a rank at its highest, most of it {largest}"]
        if self.time is not None and self.machine is not None:
            said.append(f"predicted {seconds(self.time.total_s)} a step ({self.machine.name})")
        return said

    def compare(self, step_s: list[float], peak_gib: float) -> str:
        """For the end: predicted beside measured; ``step_s`` of all steps."""
        said = f"memory a rank: predicted {self.memory.peak / GIB:.2f} GiB, measured {peak_gib:.2f}"
        warm = step_s[WARM_STEPS:]
        if self.time is None or not warm:
            return said
        measured = statistics.median(warm)
        off = self.time.total_s / measured - 1
        return f"{said}; step predicted {seconds(self.time.total_s)}, measured {seconds(measured)} ({off:+.0%})"


def visible_length(dataset: Dataset, config: Config) -> int:
    """The length of the document that a token stands in, in the mean over tokens; 0 where attention sees the whole row."""
    if not config.data.mask_documents:
        return 0
    lengths = np.minimum(np.asarray(dataset.corpus.lengths, dtype=np.float64), config.train.seq_len)
    total = lengths.sum()
    return max(1, round(float((lengths * lengths).sum() / total))) if total else 0


def forecast(
    config: Config, model: ModelConfig, *, world_size: int, compute_bytes: int, device: torch.device, documents: int = 0
) -> Forecast:
    """Predict a run on ranks like this one. ``model`` has its vocabulary."""
    work = cost.work_of(config, model, world_size, compute_bytes=compute_bytes, documents=documents)
    machine = cost.machine_of(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    eager = not config.compile and compute_bytes == 2
    return Forecast(work, cost.memory(work), machine, cost.step_time(work, machine) if machine is not None and eager else None)


# --- out of memory ------------------------------------------------------------------------------------------------------


def explain_out_of_memory(config: Config, world_size: int, device: torch.device, error: BaseException, run: Run | None) -> str:
    """The page for an out-of-memory error of this rank; ``run`` is None where it came while the run was put together."""
    usable, held = 0.0, 0.0
    if device.type == "cuda":
        # (memory_allocated is what is left after the stack unwound; the peak is what was held when it failed, or once before)
        usable = torch.cuda.get_device_properties(device).total_memory - 2**31
        held = torch.cuda.max_memory_allocated(device)
    model = run.model_config if run is not None else dataclasses.replace(config.model, vocab_size=config.model.vocab_size or 258)
    folder = config.folder / "checkpoints"
    steps = checkpoint.list_steps(folder)
    kept = f"the newest checkpoint is intact: {checkpoint.step_folder(folder, steps[0])}" if steps else "no checkpoint had been written yet"
    if not usable:  # a device that does not say: the prediction itself is what was too much
        work = cost.work_of(config, model, world_size, compute_bytes=precision(config, device)[1].itemsize)
        usable = held = 0.9 * cost.memory(work).peak
    return out_of_memory_page(
        config, model, world_size=world_size, compute_bytes=precision(config, device)[1].itemsize, usable_bytes=usable, held_bytes=held,
        error=error, safe=f"Nothing was written by this step; {kept}.",
        documents=visible_length(run.dataset, config) if run is not None else 0,
    )


# What may be changed without changing what is computed, the least disturbing first.
SMALLER: dict[str, tuple[Any, ...]] = {
    "model.loss_chunk": (1024, 0), "model.ffn_chunk": (8192, 2048), "activation": POLICIES, "train.micro_rows": (1,),
    "parallel.grad_sync": ("each",), "optim.offload": (True,),
}


def out_of_memory_page(
    config: Config, model: ModelConfig, *, world_size: int, compute_bytes: int, usable_bytes: float, held_bytes: float,
    error: BaseException, safe: str, documents: int = 0,
) -> str:
    """One page for the user: what was largest when memory ran out, and the smallest override that the planner says fits.

    ``usable_bytes``: what tensors may take on this GPU. ``held_bytes``: what they took when the allocation failed. ``safe``: a
    sentence on what is safe.
    """
    work = cost.work_of(config, model, world_size, compute_bytes=compute_bytes, documents=documents)
    moment = moment_of(error)
    memory = cost.memory(work, among=MOMENTS.get(moment, ()))
    # what was held and what was asked for: where that is more than predicted, the prediction is too low here, and so for what is proposed
    excess = max(1.0, held_bytes / cost.memory(work).peak)
    lines = [
        f"out of memory {'in the ' + moment if moment else 'while the run was set up'}: tensors held {held_bytes / GIB:.1f} GiB of "
        f"{usable_bytes / GIB:.1f} GiB usable.",
        f"  {str(error).splitlines()[0] if str(error) else type(error).__name__}",
        f"The largest parts then, by the cost model ({memory.phase}):",
        *memory_bar(memory, None),
    ]
    raw = to_dict(dataclasses.replace(config, model=model))

    def predict(change: dict[str, Any]) -> Work | None:
        return changed_work(raw, change, world_size, compute_bytes, documents)

    found = smallest_change(predict, usable_bytes / excess)
    if found is None:
        shorter = shorter_rows(predict, config.train.seq_len, usable_bytes / excess)
        lines.append("No override of activation, chunks or micro-batches makes it fit.")
        if shorter:
            lines.append(f"What fits is a shorter row: train.seq_len={shorter}; or more GPUs: scripts/plan.py gpus=... says how many.")
        else:
            lines.append("Nor does a shorter row: weights and states alone are too much. More GPUs: scripts/plan.py gpus=...")
    else:
        change, need = found
        typed = " ".join(f"{k}={show(v)}" for k, v in change.items())
        lines.append(f"The smallest override that fits, with {need / GIB:.1f} GiB predicted:\n    {typed}")
    return "\n".join([*lines, safe])


def moment_of(error: BaseException) -> str:
    """Where in a step an error was raised, from its traceback: forward pass, backward pass or update; empty if in none."""
    names = [frame.name for frame in traceback.extract_tb(error.__traceback__)]
    if any("backward" in name for name in names):
        return "backward pass"
    if "step" in names and "train_step" in names:
        return "update"
    return "forward pass" if "forward" in names or "train_step" in names else ""


# The moments of the cost model (ringattn.cost.memory) that lie in a pass.
MOMENTS = {"forward pass": ("loss",), "backward pass": ("head backward", "last block", "first block", "reduction")}
Predict = Callable[[dict[str, Any]], Work | None]  # overrides -> the work of the run with them, None where it is the same or refused


def smallest_change(predict: Predict, usable_bytes: float) -> tuple[dict[str, Any], int] | None:
    """The fewest overrides, and among as many those that cost least, whose predicted peak is below ``usable_bytes``."""
    speed = cost.find_machine("h200")
    for count in range(1, 4):
        fitting = []
        for keys in itertools.combinations(SMALLER, count):
            for values in itertools.product(*(SMALLER[k] for k in keys)):
                change = dict(zip(keys, values, strict=True))
                work = predict(change)
                if work is not None and (peak := cost.memory(work).peak) <= usable_bytes:
                    fitting.append((cost.step_time(work, speed).total_s, peak, change))
        if fitting:
            _, peak, change = min(fitting, key=lambda f: f[:2])
            return change, peak
    return None


def shorter_rows(predict: Predict, seq_len: int, usable_bytes: float) -> int:
    """The longest row, by halves, that fits with everything else as it is; 0 if none does."""
    length = seq_len // 2
    while length >= 64:
        work = predict({"train.seq_len": length})
        if work is not None and cost.memory(work).peak <= usable_bytes:
            return length
        length //= 2
    return 0


def changed_work(raw: dict[str, Any], change: dict[str, Any], world_size: int, compute_bytes: int, documents: int) -> Work | None:
    """The work of a changed config, None where it is the same or refused."""
    changed = merged(raw, change)
    if changed == raw:
        return None
    try:
        config = from_dict(changed, world_size=world_size)
    except ConfigError:
        return None
    return cost.work_of(config, config.model, world_size, compute_bytes=compute_bytes, documents=documents)
