"""Stop and resume equals never stopped: bit for bit on the same topology, to rounding on another, with the same tokens."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import Ranks
from tasks import lines_of, merged, trajectory, whole, with_run

from ringattn.training import checkpoint
from ringattn.training.launch import Launch
from ringattn.training.loop import Outcome, train
from ringattn.training.run import Run

pytestmark = pytest.mark.ring

SAVING = {"checkpoint.keep": 3, "train.steps": 8, "train.val_every": 2, "schedule.warmup_steps": 4}


def interrupted(launch: Launch, raw: dict[str, Any], stops: list[int]) -> dict[str, Any]:
    """Train in several starts, the last one to the end."""
    for stop in stops:
        trajectory(launch, merged(raw, {"train.stop_after": stop}), False)
    result: dict[str, Any] = trajectory(launch, raw, False)
    return result


PLANNED = {"parallel.ring": 1, "parallel.ulysses": 2, "parallel.virtual": 3, "parallel.layout": "auto", "train.seq_len": 97}
NARROW = {"parallel.ring": 2, "parallel.layout": "balanced", "parallel.wire": "bf16"}


@pytest.mark.parametrize(("mesh", "optimizer"), [
    ({}, "adamw"), ({}, "sgd"), ({"parallel.ring": 2}, "adamw"), ({"parallel.ring": 2}, "sgd"), (PLANNED, "adamw"), (NARROW, "adamw"),
], ids=["1-adamw", "1-sgd", "ring 2-adamw", "ring 2-sgd", "planned and ulysses", "bf16 wire"])  # fmt: skip
def test_stop_and_resume_twice_is_bit_equal(mesh: dict[str, Any], optimizer: str, ranks: Ranks, raw: Callable[..., Any]) -> None:
    world_size = mesh.get("parallel.ring", 1) * mesh.get("parallel.ulysses", 1)
    settings = SAVING | mesh | {"optim.name": optimizer, "optim.momentum": 0.9}
    straight = ranks.run(world_size, trajectory, raw(settings), False)
    parts = ranks.run(world_size, interrupted, raw(settings | {"name": "parts"}), [3, 5])
    assert [line["step"] for line in parts["lines"]] == list(range(1, 9))
    assert parts["lines"] == straight["lines"]  # losses, norms, learning rates, tokens, validation: every bit
    for name, value in straight["parameters"].items():
        assert torch.equal(parts["parameters"][name], value), name


@pytest.mark.parametrize(
    ("save_on", "save_mesh", "load_on", "load_mesh"),
    [
        (2, {"parallel.ring": 2}, 3, {"parallel.ring": 3}),
        (4, {"parallel.replicate": 2, "parallel.ring": 2}, 1, {}),
        (1, {}, 4, {"parallel.shard": 2, "parallel.ring": 2}),
    ],
)
def test_resume_on_another_topology(
    save_on: int, save_mesh: dict[str, Any], load_on: int, load_mesh: dict[str, Any], ranks: Ranks, raw: Callable[..., Any]
) -> None:
    straight = ranks.run(save_on, trajectory, raw(SAVING | save_mesh), False)
    ranks.run(save_on, trajectory, raw(SAVING | save_mesh | {"name": "moved", "train.stop_after": 4}), False)
    moved = ranks.run(load_on, trajectory, raw(SAVING | load_mesh | {"name": "moved"}), False)
    for line, wanted in zip(moved["lines"], straight["lines"], strict=True):
        assert (line["tokens"], line["targets"]) == (wanted["tokens"], wanted["targets"])
        assert line["loss"] == pytest.approx(wanted["loss"], rel=1e-5)
        assert ("val_loss" in line) == ("val_loss" in wanted)
        assert line.get("val_loss", 0.0) == pytest.approx(wanted.get("val_loss", 0.0), rel=1e-5)


def digest(launch: Launch, raw: dict[str, Any]) -> dict[str, Any]:
    """Whole parameters and optimizer state right after loading, and whether every rank has loaded (CK-08)."""

    def work(run: Run) -> dict[str, Any]:
        names = {id(p): n for n, p in run.model.named_parameters()}
        state = {
            f"{names[id(p)]}.{key}": whole(value) for p, entries in run.optimizer.state.items() for key, value in entries.items()
        }
        return {"step": run.step, "parameters": {n: whole(p) for n, p in run.model.named_parameters()}, "state": state}

    result: dict[str, Any] = with_run(launch, raw, work)
    return result


def test_moments_survive_any_mesh(ranks: Ranks, raw: Callable[..., Any]) -> None:
    """CK-01 and CK-05: full parameters and moments are equal exactly on 1, 2, 3 and 4 ranks, and the moments are there at all."""
    settings = {"checkpoint.keep": 1, "train.steps": 3}
    ranks.run(4, trajectory, raw(settings | {"parallel.replicate": 2, "parallel.ring": 2}), False)
    meshes: list[tuple[int, dict[str, Any]]] = [(4, {"parallel.replicate": 2}), (2, {}), (1, {}), (3, {}), (4, {})]
    loaded = [ranks.run(n, digest, raw(settings | mesh)) for n, mesh in meshes]
    first = loaded[0]
    assert first["step"] == 3
    moments = [v for k, v in first["state"].items() if k.endswith("exp_avg")]
    assert len(moments) == len(first["parameters"]) and all(m.abs().sum() > 0 for m in moments)
    assert all(v.item() == 3 for k, v in first["state"].items() if k.endswith("step"))
    for other in loaded[1:]:
        for part in ("parameters", "state"):
            assert other[part].keys() == first[part].keys()
            assert all(torch.equal(other[part][k], v) for k, v in first[part].items())


def four_ways(launch: Launch, raw: dict[str, Any]) -> list[list[str]]:
    """CK-07: save with each combination of compile and recompute, load with each."""
    ways = [{"compile": c, "activation": a} for c in (False, True) for a in ("none", "attention_saved")]
    keys = []
    for i, way in enumerate(ways):
        saved = merged(raw, way | {"name": f"way{i}", "train.stop_after": 1, "checkpoint.keep": 1})
        trajectory(launch, saved, False)
        folder = Path(saved["log"]["dir"]) / f"way{i}"
        keys.append(sorted(checkpoint.read_index(checkpoint.step_folder(folder / "checkpoints", 1)).state_dict_metadata))
        losses = [
            trajectory(launch, merged(raw, w | {"name": f"way{i}to{j}", "resume": str(folder), "train.stop_after": 2}), False)["lines"]
            for j, w in enumerate(ways)
        ]
        assert all(line[-1]["step"] == 2 and abs(line[-1]["loss"] - losses[0][-1]["loss"]) < 1e-5 for line in losses)
    return keys


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("c++") is None, reason="torch.compile needs a C++ compiler on the CPU")
def test_keys_do_not_depend_on_compile_or_recompute(ranks: Ranks, raw: Callable[..., Any]) -> None:
    keys = ranks.run(1, four_ways, raw({"train.seq_len": 24, "train.rows": 1}), limit_s=300.0)
    assert all(k == keys[0] for k in keys)
    assert not any("_orig_mod" in k or "_checkpoint_wrapped" in k for k in keys[0])


def test_random_generators(ranks: Ranks, raw: Callable[..., Any]) -> None:
    """Each rank gets its own generator back on the same world, and a fresh one, different on each rank, on another."""
    settings = {"checkpoint.keep": 1, "train.steps": 2}
    assert ranks.run(2, draws_after_resume, raw(settings), True) == "as saved"
    assert ranks.run(3, draws_after_resume, raw(settings), False) == "different"


def draws_after_resume(launch: Launch, raw: dict[str, Any], save_first: bool) -> str:
    import torch.distributed as dist

    def save(run: Run) -> torch.Tensor:
        torch.manual_seed(100 + launch.rank)
        torch.rand(launch.rank + 1)
        train(run)
        return torch.rand(3)

    before = with_run(launch, raw, save) if save_first else None

    def draw(run: Run) -> list[Any]:
        everyone: list[Any] = [None] * launch.world_size
        own = torch.rand(3)
        dist.all_gather_object(everyone, (own, before is not None and torch.equal(own, before)))
        return everyone

    everyone = with_run(launch, raw, draw)
    if save_first:
        return "as saved" if all(same for _, same in everyone) else "changed"
    return "equal" if any(torch.equal(a, b) for i, (a, _) in enumerate(everyone) for b, _ in everyone[:i]) else "different"


def test_metrics_are_cut_to_the_resumed_step(ranks: Ranks, raw: Callable[..., Any]) -> None:
    """Lines beyond the checkpoint (a crash after it) are replaced, not repeated; half a line at the end is dropped."""
    settings = raw({"checkpoint.keep": 2, "checkpoint.every": 2, "train.steps": 4})
    folder = Path(settings["log"]["dir"]) / "t"
    ranks.run(1, trajectory, merged(settings, {"train.stop_after": 3}), False)
    straight = lines_of(folder)
    last = checkpoint.step_folder(folder / "checkpoints", 3)
    (last / "state.json").unlink()  # as if the process had died after step 3
    with open(folder / "metrics.jsonl", "a") as file:
        file.write('{"step": 4, "lo')
    ranks.run(1, trajectory, settings, False)
    assert [line["step"] for line in lines_of(folder)] == [1, 2, 3, 4]
    assert lines_of(folder)[:3] == straight


def test_resume_never_and_explicit_paths_lose_nothing(ranks: Ranks, raw: Callable[..., Any]) -> None:
    settings = raw({"checkpoint.keep": 5, "checkpoint.every": 1, "train.steps": 3})
    folder = Path(settings["log"]["dir"]) / "t"
    ranks.run(1, trajectory, settings, False)
    old = lines_of(folder)
    again = ranks.run(1, trajectory, merged(settings, {"resume": "never", "train.stop_after": 2}), False)
    assert again["lines"] == old[:2]
    assert lines_of(folder / "previous-1") == old and len(list((folder / "previous-1" / "checkpoints").iterdir())) == 3
    assert checkpoint.list_steps(folder / "checkpoints") == [2, 1]
    one = str(checkpoint.step_folder(folder / "checkpoints", 1))
    back = ranks.run(1, trajectory, merged(settings, {"resume": one}), False)
    assert back["lines"] == old and checkpoint.list_steps(folder / "checkpoints") == [3, 2, 1]
    assert checkpoint.list_steps(folder / "previous-2" / "checkpoints") == [2]


def signalled(launch: Launch, raw: dict[str, Any]) -> int:
    """SIGTERM reaches one rank while the second step is on its way; all must stop after the same step, with a checkpoint."""

    def send(step: int, _model: torch.nn.Module) -> None:
        if step == 1 and launch.rank == launch.world_size - 1:
            os.kill(os.getpid(), signal.SIGTERM)

    assert threading.current_thread() is threading.main_thread()
    return int(with_run(launch, raw, lambda run: train(run, before_update=send)))


def test_a_signal_saves_and_stops_all_ranks(ranks: Ranks, raw: Callable[..., Any]) -> None:
    settings = raw({"checkpoint.keep": 1, "train.steps": 50})
    assert ranks.run(2, signalled, settings) == Outcome.STOPPED == 75
    folder = Path(settings["log"]["dir"]) / "t"
    steps = [line["step"] for line in lines_of(folder)]
    assert steps == [1, 2, 3] and checkpoint.list_steps(folder / "checkpoints") == [3]
    state = json.loads((checkpoint.step_folder(folder / "checkpoints", 3) / "state.json").read_text())
    assert state["step"] == 3 and state["tokens"] == 3 * 4 * 96
