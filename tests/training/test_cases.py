"""Faults that others have met and that no other page tests: DL-01 (peers of a ring read different rows), FK-18 (no GPU, no triton)."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from ranks import Ranks
from tasks import with_run

from ringattn.training.launch import Launch
from ringattn.training.run import Run

ROOT = Path(__file__).parents[2]


def rows_read(launch: Launch, raw: dict[str, Any], steps: int) -> list[tuple[int, list[str]]]:
    """(which ring, a hash of the whole rows of each step) of every rank."""

    def work(run: Run) -> list[Any]:
        hashes = []
        for step in range(steps):
            digest = hashlib.sha256()
            for batch in (placed.batch for placed in run.batches.rows(step)):
                for part in (batch.tokens, batch.labels, batch.documents, batch.positions):
                    digest.update(part.numpy().tobytes())
            hashes.append(digest.hexdigest())
        assert steps * run.config.train.rows > run.dataset.rows_per_epoch  # over the border of an epoch
        everyone: list[Any] = [None] * launch.world_size
        dist.all_gather_object(everyone, (run.mesh.data_rank, hashes))
        return everyone

    result: list[tuple[int, list[str]]] = with_run(launch, raw, work)
    return result


@pytest.mark.ring
def test_peers_of_a_ring_read_the_same_rows_and_rings_others(ranks: Ranks, raw: Callable[..., Any]) -> None:
    """DL-01: data 2 x ring 2, over an epoch's border."""
    rows = {"train.rows": 16, "train.micro_rows": 2, "train.seq_len": 768, "train.steps": 30}
    settings = raw({"parallel.ring": 2, "parallel.replicate": 2} | rows)
    everyone = ranks.run(4, rows_read, settings, 6)
    assert [ring for ring, _ in everyone] == [0, 0, 1, 1]
    (_, a), (_, b), (_, c), (_, d) = everyone
    assert a == b and c == d and not set(a) & set(c) and len(set(a)) == 6


WITHOUT = """
import importlib, pkgutil, sys
class Nothing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "triton":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Nothing())
import ringattn
names = [m.name for m in pkgutil.walk_packages(ringattn.__path__, "ringattn.")]
for name in names:
    if not any(part in name for part in ("triton_", "gluon_", "rowwise_triton")):
        importlib.import_module(name)
assert len(names) > 60
from ringattn.train import main
sys.argv[1:] = ["experiment=cpu_tiny", "train.steps=2", "train.seq_len=48", "train.val_every=0", "log.tensorboard=false", "device=cpu"]
main()
"""


def test_everything_imports_and_trains_without_gpu_and_triton(tmp_path: Path) -> None:
    """FK-18; one line names the path that attention takes. (With triton, every other test is this one.)"""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT], cwd=tmp_path, env=environment, capture_output=True,
        text=True, timeout=120, check=False,
    )
    assert done.returncode == 0 and "done at step 2" in done.stdout, done.stderr
    assert done.stdout.count("kernel torch") == 1
