"""What the ranks of a test do, and the small run that all of them share."""

from __future__ import annotations

import copy
import json
import shutil
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ringattn.config import from_dict
from ringattn.planner import merged
from ringattn.ring import attention, transport
from ringattn.training import offload
from ringattn.training.launch import Launch, process_group
from ringattn.training.loop import train
from ringattn.training.metrics import deterministic, read_lines
from ringattn.training.run import Run, assemble

BASE: dict[str, Any] = {
    "name": "t",
    "precision": "fp32",
    "train": {"steps": 6, "seq_len": 96, "rows": 4, "micro_rows": 1, "val_every": 0, "val_rows": 3},
    # two windows, QK-norm, sinks, an untied head: every kind of parameter; 258 rows do not divide by 3 or 4
    "model": {
        "name": "tiny", "width": 32, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 8, "ffn_width": 48, "windows": [0, 20],
        "qk_norm": True, "sinks": True, "tied": False, "loss_chunk": 40,
    },
    "data": {"kind": "text", "val_fraction": 0.2},
    "optim": {"name": "adamw", "lr": 3e-3},
    "schedule": {"warmup_steps": 3},
    "checkpoint": {"every": 0, "keep": 0},
    "log": {"console": "off", "tensorboard": False},
}


def write_corpus(folder: Path) -> None:
    """Real text in ragged documents of 3 to about 200 bytes: paragraphs of Python's own sources."""
    paragraphs = Path(shutil.__file__).read_text().split("\n\n")[:150]
    paragraphs += [line for line in Path(copy.__file__).read_text().split("\n") if line.strip()][:60]
    folder.mkdir(parents=True, exist_ok=True)
    for i, text in enumerate(p[:200] for p in paragraphs if len(p) >= 3):
        (folder / f"{i:03d}.txt").write_text(text)


def with_run(launch: Launch, raw: dict[str, Any], work: Callable[[Run], Any]) -> Any:
    """Assemble a run from a raw config, hand it to ``work``, and clean up."""
    config = from_dict(raw, world_size=launch.world_size)
    job = launch.store.add(f"jobs of rank {launch.rank}", 1)  # the same number on all ranks, as each counts its own
    with process_group(config, launch, job) as device:
        run = assemble(config, device)
        try:
            return work(run)
        finally:
            run.close()


def whole(tensor: Tensor) -> Tensor:
    """A copy of the full tensor on the CPU; every rank takes part."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().cpu().clone()


def gathered(steps: list[Tensor], like: Tensor) -> list[Tensor]:
    """The whole tensors of which every rank holds its shard in ``steps``, sharded as ``like`` is: one exchange for all steps."""
    stack = torch.stack(steps, dim=-1)  # steps last: the sharded dimension stays the first
    if isinstance(like, DTensor):
        shape = torch.Size((*like.shape, len(steps)))
        stride = torch.empty(shape, device="meta").stride()
        stack = DTensor.from_local(stack, like.device_mesh, like.placements, run_check=False, shape=shape, stride=stride).full_tensor()
    return [step.clone() for step in stack.cpu().unbind(-1)]


def trajectory(launch: Launch, raw: dict[str, Any], gradients: bool = True) -> dict[str, Any]:
    """Train; the metrics of each step without timings, each step's whole gradients, and the final parameters."""
    seen: dict[str, list[Tensor]] = defaultdict(list)

    def record(_step: int, model: torch.nn.Module) -> None:
        for name, p in model.named_parameters():
            seen[name].append((p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad).clone())

    def work(run: Run) -> dict[str, Any]:
        outcome = train(run, before_update=record if gradients else None)
        parameters = {name: whole(p) for name, p in run.model.named_parameters()}
        lines = [deterministic(line) for line in read_lines(run.folder.path / "metrics.jsonl")]
        grads = {name: gathered(seen[name], p) for name, p in run.model.named_parameters()} if gradients else {}
        return {"lines": lines, "gradients": grads, "parameters": parameters, "outcome": int(outcome)}

    result: dict[str, Any] = with_run(launch, raw, work)
    return result


def lines_of(folder: Path) -> list[dict[str, Any]]:
    """metrics.jsonl without timings."""
    return [deterministic(json.loads(line)) for line in (folder / "metrics.jsonl").read_text().splitlines()]


POLICIES = ("none", "block", "attention_saved", "offload")


def with_policies(launch: Launch, raw: dict[str, Any]) -> dict[str, Any]:
    """One run of each activation policy: losses, the first step's whole gradients, calls of ring attention (both ways) and transfers."""
    found = {}
    for policy in POLICIES:
        calls = {"attention": 0, "transfers": 0}

        def counted(function: Callable[..., Any], kind: str, calls: dict[str, int] = calls) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                calls[kind] += 1
                return function(*args, **kwargs)

            return call

        find, post = attention.find_schedule, transport.PointToPoint.post
        attention.find_schedule = counted(find, "attention")
        transport.PointToPoint.post = counted(post, "transfers")  # type: ignore[method-assign]
        smallest, offload.SMALLEST = offload.SMALLEST, 1
        try:
            result = trajectory(launch, merged(raw, {"activation": policy, "name": policy}))
        finally:
            attention.find_schedule, transport.PointToPoint.post = find, post  # type: ignore[method-assign]
            offload.SMALLEST = smallest
        gradients = {name: steps[0] for name, steps in result["gradients"].items()}
        found[policy] = calls | {"loss": [line["loss"] for line in result["lines"]], "gradients": gradients}
    return found
