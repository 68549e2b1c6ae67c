"""debug.profile: a trace and a memory account of chosen steps, a file a rank, in the folder of the run.

    runs/<name>/profile/step-00000003-rank0.json.gz       for chrome://tracing or ui.perfetto.dev
                        step-00000003-rank0.txt           the operations that took most time, and most memory
                        step-00000003-rank0-memory.pickle CUDA only: every allocation, for pytorch.org/memory_viz
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

PROFILED_RANKS = 8  # the first ones: they show what all do, and a thousand traces help nobody
ALLOCATIONS = 200_000  # remembered for the snapshot


@contextmanager
def profiled(folder: Path, step: int, steps: list[int], rank: int, device: torch.device) -> Iterator[None]:
    """Profile what happens within if ``step`` (from 1, as in the metrics) is one of ``steps``, and write it under ``folder``."""
    if step not in steps or rank >= PROFILED_RANKS:
        yield
        return
    cuda = device.type == "cuda"
    if cuda:
        torch.cuda.memory._record_memory_history(max_entries=ALLOCATIONS)
    with profile(
        activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])], record_shapes=True, profile_memory=True
    ) as found:
        yield
    path = folder / "profile" / f"step-{step:08d}-rank{rank}"
    path.parent.mkdir(parents=True, exist_ok=True)
    found.export_chrome_trace(f"{path}.json.gz")
    where = "cuda" if cuda else "cpu"
    averages = found.key_averages()
    tables = (averages.table(sort_by=f"self_{where}_{what}", row_limit=40) for what in ("time_total", "memory_usage"))
    Path(f"{path}.txt").write_text("Most time\n\n{}\n\nMost memory\n\n{}\n".format(*tables))
    if cuda:
        torch.cuda.memory._dump_snapshot(f"{path}-memory.pickle")
        torch.cuda.memory._record_memory_history(enabled=None)
