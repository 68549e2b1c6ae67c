"""The same on GPUs: NCCL rings, bf16 with fp32 master weights, checkpoints that move between numbers of GPUs, compile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import Ranks
from tasks import merged, trajectory

pytestmark = [pytest.mark.gpu, pytest.mark.ring]

CUDA = {"device": "cuda", "model.head_dim": 64, "model.width": 128, "train.seq_len": 768, "train.rows": 4, "train.val_every": 2}
GPUS = min(4, torch.cuda.device_count())


def compare(got: dict[str, Any], wanted: dict[str, Any], loss: float, gradient: float) -> None:
    for line, other in zip(got["lines"], wanted["lines"], strict=True):
        assert line["targets"] == other["targets"]
        assert line["loss"] == pytest.approx(other["loss"], rel=loss), line["step"]
    for name, steps in wanted["gradients"].items():
        a, b = got["gradients"][name][0], steps[0]
        assert ((a - b).norm() / b.norm()).item() <= gradient, name


@pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")
def test_ring_of_gpus_equals_one_gpu(ranks: Ranks, raw: Callable[..., Any]) -> None:
    for precision, kernel, loss, gradient in (("fp32", "torch", 1e-5, 1e-4), ("bf16", "auto", 1e-2, 3e-2)):
        settings = raw(CUDA | {"precision": precision, "kernel": kernel, "train.steps": 3, "name": f"one-{precision}"})
        one = ranks.run(1, trajectory, settings)
        for mesh in ({"parallel.ring": GPUS}, {"parallel.replicate": GPUS}, {"parallel.shard": GPUS}, {"activation": "attention_saved"}):
            name = f"{precision}-" + "-".join(mesh)
            compare(ranks.run(GPUS, trajectory, merged(settings, mesh | {"name": name})), one, loss, gradient)


def test_resume_on_gpus_is_bit_equal(ranks: Ranks, raw: Callable[..., Any]) -> None:
    settings = raw(CUDA | {"precision": "bf16", "checkpoint.keep": 2, "train.steps": 4, "deterministic": True, "kernel": "torch"})
    straight = ranks.run(GPUS, trajectory, settings, False)
    parts = merged(settings, {"name": "parts"})
    ranks.run(GPUS, trajectory, merged(parts, {"train.stop_after": 2}), False)
    assert ranks.run(GPUS, trajectory, parts, False)["lines"] == straight["lines"]
    moved = merged(settings, {"name": "moved"})
    ranks.run(GPUS, trajectory, merged(moved, {"train.stop_after": 2}), False)
    lines = ranks.run(1, trajectory, moved, False)["lines"]
    assert lines[-1]["loss"] == pytest.approx(straight["lines"][-1]["loss"], rel=1e-2)


@pytest.mark.slow
def test_compiled_blocks_on_gpus(ranks: Ranks, raw: Callable[..., Any]) -> None:
    settings = raw(CUDA | {"precision": "bf16", "train.steps": 3})
    eager = ranks.run(GPUS, trajectory, settings)
    compiled = ranks.run(GPUS, trajectory, merged(settings, {"compile": True, "name": "compiled"}), limit_s=300.0)
    compare(compiled, eager, 1e-2, 3e-2)
