"""Loss and every gradient are those of one process, however the batch is split: fp64 to 1e-10 over 50 steps, fp32 to rounding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import Ranks
from tasks import trajectory

pytestmark = [pytest.mark.ring, pytest.mark.slow]

# world size, config of the mesh
TOPOLOGIES = {
    "1": (1, {}),
    "ring 2": (2, {"parallel.ring": 2}),
    "ring 3": (3, {"parallel.ring": 3, "parallel.layout": "striped"}),
    "ring 4": (4, {"parallel.ring": 4}),
    "virtual 4": (1, {"parallel.virtual": 4}),
    "2 x virtual 2": (2, {"parallel.ring": 2, "parallel.virtual": 2, "parallel.layout": "contiguous"}),
    "ring 2, gathered": (2, {"parallel.ring": 2, "parallel.exchange": "allgather"}),
    "replicate 2 x ring 2": (4, {"parallel.replicate": 2, "parallel.ring": 2}),
    "shard 2 x ring 2": (4, {"parallel.shard": 2, "parallel.ring": 2, "parallel.reshard_after_forward": False}),
}
# optimizer and clipping; then how the same step is cut into micro-batches
OPTIMIZERS = {
    "adamw, clip": {"optim.name": "adamw", "optim.clip": 0.5},
    "sgd": {"optim.name": "sgd", "optim.lr": 0.03, "optim.momentum": 0.9, "optim.weight_decay": 0.01, "optim.clip": 0.0},
}
ACCUMULATION = {
    "adamw, clip": {"train.micro_rows": 1, "parallel.grad_sync": "last"},
    "sgd": {"train.micro_rows": 2, "parallel.grad_sync": "each"},
}
STEPS = {"adamw, clip": 50, "sgd": 20}  # SGD hides nothing, so it needs fewer
WHOLE = ("ring 2", "ring 4")  # the others stop after 15 of the steps
SHORT_OPTIMIZERS = {
    "adamw": {"optim.name": "adamw", "optim.clip": 0.0},
    "sgd, clip": {"optim.name": "sgd", "optim.lr": 0.3, "optim.momentum": 0.0, "optim.clip": 0.5},
}


@pytest.fixture(scope="module")
def references() -> dict[str, Any]:
    return {}


def compare(result: dict[str, Any], reference: dict[str, Any], *, loss: float, gradient: float) -> None:
    assert len(result["lines"]) == len(reference["lines"])
    for line, wanted in zip(result["lines"], reference["lines"], strict=True):
        assert line["targets"] == wanted["targets"] and line["tokens"] == wanted["tokens"]
        assert line["loss"] == pytest.approx(wanted["loss"], rel=loss, abs=0), line["step"]
        assert line["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=10 * gradient, abs=0), line["step"]
    assert result["gradients"].keys() == reference["gradients"].keys() and reference["gradients"]
    for name, wanted_steps in reference["gradients"].items():
        for step, (got, wanted) in enumerate(zip(result["gradients"][name], wanted_steps, strict=True)):
            error = ((got - wanted).norm() / wanted.norm()).item()
            assert error <= gradient, f"step {step}, {name}: {error:.2e}"


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_fp64_trajectories(topology: str, optimizer: str, ranks: Ranks, raw: Callable[..., Any], references: dict[str, Any]) -> None:
    world_size, mesh = TOPOLOGIES[topology]
    common = {"precision": "fp64", "train.steps": STEPS[optimizer], "schedule.warmup_steps": 10, **OPTIMIZERS[optimizer]}
    if optimizer not in references:  # one process, the whole step at once
        references[optimizer] = ranks.run(1, trajectory, raw(common | {"train.micro_rows": 4}))
        assert references[optimizer]["lines"][-1]["loss"] < references[optimizer]["lines"][0]["loss"]
    steps = STEPS[optimizer] if topology in WHOLE else 15
    changes = mesh | ACCUMULATION[optimizer] | {"name": "split", "train.stop_after": steps}
    result = ranks.run(world_size, trajectory, raw(common | changes))
    compare(result, first_steps(references[optimizer], steps), loss=1e-10, gradient=1e-10)


def first_steps(result: dict[str, Any], steps: int) -> dict[str, Any]:
    """The same run stopped earlier."""
    return {"lines": result["lines"][:steps], "gradients": {name: grads[:steps] for name, grads in result["gradients"].items()}}


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_fp32_5_steps(topology: str, ranks: Ranks, raw: Callable[..., Any], references: dict[str, Any]) -> None:
    world_size, mesh = TOPOLOGIES[topology]
    for optimizer, settings in SHORT_OPTIMIZERS.items():
        common = {"train.steps": 5, "schedule.warmup_steps": 3, **settings}
        if optimizer not in references:
            references[optimizer] = ranks.run(1, trajectory, raw(common | {"train.micro_rows": 4, "name": optimizer.partition(",")[0]}))
        rows = {"train.micro_rows": 1} if optimizer == "adamw" else {"train.micro_rows": 2}
        result = ranks.run(world_size, trajectory, raw(common | mesh | rows | {"name": f"split-{optimizer.partition(',')[0]}"}))
        compare(result, references[optimizer], loss=1e-6, gradient=1e-5)


# rows of 97 tokens in packed documents, which no ring here can split: padded
PLACEMENTS = {
    "ulysses 2": (2, {"parallel.ulysses": 2, "activation": "attention_saved"}),
    "ring 2 x ulysses 2": (4, {"parallel.ring": 2, "parallel.ulysses": 2, "parallel.layout": "striped"}),
    "ulysses 4 for 2 KV heads": (4, {"parallel.ulysses": 4, "parallel.virtual": 2}),
    "replicate 2 x ulysses 2, gathered": (4, {"parallel.replicate": 2, "parallel.ulysses": 2, "parallel.exchange": "allgather"}),
    "balanced, 2 x virtual 2": (2, {"parallel.virtual": 2, "parallel.layout": "balanced"}),
    "auto, ring 2 x ulysses 2": (4, {"parallel.ulysses": 2, "parallel.layout": "auto", "train.micro_rows": 2}),
    "auto, ring 3": (3, {"parallel.layout": "auto", "data.mask_documents": True}),
    "zigzag, ring 4": (4, {"parallel.layout": "zigzag"}),
    "two levels, 2 x 2": (4, {"parallel.inner": 2}),
    "two levels, 2 nodes of 1 x virtual 2": (2, {"parallel.inner": 2, "parallel.virtual": 2, "parallel.layout": "auto"}),
    "two levels, 2 nodes of ulysses 2": (4, {"parallel.inner": 1, "parallel.ulysses": 2}),
}


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_heads_planned_layouts_and_padding(placement: str, ranks: Ranks, raw: Callable[..., Any], references: dict[str, Any]) -> None:
    world_size, mesh = PLACEMENTS[placement]
    common = {"precision": "fp64", "train.steps": 5, "train.seq_len": 97, "train.val_every": 5}
    if "unpadded" not in references:
        whole = raw(common | {"train.micro_rows": 4, "parallel.layout": "contiguous", "name": "whole"})
        references["unpadded"] = ranks.run(1, trajectory, whole)
    result = ranks.run(world_size, trajectory, raw(common | mesh | {"name": "split"}))
    compare(result, references["unpadded"], loss=1e-10, gradient=1e-10)
    assert result["lines"][-1]["val_loss"] == pytest.approx(references["unpadded"]["lines"][-1]["val_loss"], rel=1e-10)
    assert all(line.get("ring_balance", 1.0) >= 1.0 for line in result["lines"])
    assert ("ring_balance" in result["lines"][0]) == (placement not in ("ulysses 2", "replicate 2 x ulysses 2, gathered"))


def test_gradients_depend_on_every_rank(ranks: Ranks, raw: Callable[..., Any]) -> None:
    """The comparison can fail: a run that reads other rows differs by far more than the bounds."""
    one = ranks.run(1, trajectory, raw({"train.steps": 1}))
    other = ranks.run(1, trajectory, raw({"train.steps": 1, "seed": 1, "name": "other"}))
    with pytest.raises(AssertionError):
        compare(other, one, loss=1e-2, gradient=1e-2)
    assert all(torch.isfinite(g).all() for steps in other["gradients"].values() for g in steps)
