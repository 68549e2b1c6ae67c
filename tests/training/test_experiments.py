"""The files in configs/experiment: documented, composable, and their sweeps run."""

from __future__ import annotations

import math
import re
import shlex
from pathlib import Path

import pytest
from ranks import Ranks
from tasks import lines_of
from test_launch import ROOT, command_line

from ringattn.compose import compose_keys
from ringattn.config import from_dict
from ringattn.train import config_folder

FOLDER = ROOT / "configs/experiment"
EXPERIMENTS = sorted(p.stem for p in FOLDER.glob("*.yaml") if p.stem != "quickstart")


def comment(name: str) -> str:
    lines = (FOLDER / f"{name}.yaml").read_text().splitlines()
    assert lines[0] == "# @package _global_"
    return "\n".join(line[2:] for line in lines[1 : next(i for i, line in enumerate(lines) if not line.startswith("#"))])


def commands(name: str) -> list[list[str]]:
    """The command lines that the comment gives, from ringattn.train on."""
    return [shlex.split(found) for found in re.findall(r"ringattn\.train (.*)$", comment(name), re.MULTILINE)]


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_opens_with_what_one_wants_to_know(name: str) -> None:
    found = re.findall(r"^(Question|Needs|Expect|Time|Start|On a CPU): \S", comment(name), re.MULTILINE)
    assert found[:5] == ["Question", "Needs", "Expect", "Time", "Start"]


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_its_commands_compose(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    processes = [math.prod(map(int, re.findall(r"--(?:nnodes|nproc-per-node) (\d+)", line))) for line in comment(name).splitlines()
                 if "ringattn.train " in line]
    for words, world_size in zip(commands(name), processes, strict=True):
        raw = compose_keys([w.split(",")[0] if re.search(r"=[\w.]+,", w) else w for w in words if w != "-m"], config_folder())
        config = from_dict(raw, world_size=world_size)
        assert config.name == name


@pytest.mark.ring
@pytest.mark.parametrize(("name", "jobs"), [
    ("sweep_layouts", ["contiguous", "zigzag", "striped", "chunk-striped"]), ("sweep_ring", ["1", "2", "4", "8"]),
])
def test_sweeps_run_small_and_learn_the_same(name: str, jobs: list[str], ranks: Ranks, tmp_path: Path) -> None:
    small = ["model.width=32", "model.layers=1", "model.head_dim=8", "model.ffn_width=64", "train.seq_len=64", "train.steps=2",
             "log.tensorboard=false"]
    words = [*commands(name)[-1], *small]
    code, _, err = ranks.run(1, command_line, str(tmp_path), *words)
    assert code == 0, err
    folders = sorted(p.name for p in (tmp_path / "runs").iterdir() if not p.name.endswith("-sweep"))
    assert folders == [f"{name}-{i}" for i in range(len(jobs))]
    key = "layout" if name == "sweep_layouts" else "virtual"
    losses = []
    for i, job in enumerate(jobs):
        folder = tmp_path / "runs" / f"{name}-{i}"
        assert re.search(rf"^  {key}: '?{job}'?$", (folder / "config.yaml").read_text(), re.MULTILINE)
        losses.append(lines_of(folder)[-1]["loss"])
        assert (folder / "report.html").exists()
    assert losses == pytest.approx([losses[0]] * len(jobs), rel=1e-4)
