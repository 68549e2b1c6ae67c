"""Configs: every mistake in one message, with the key, its value and what is allowed; good ones survive a round trip."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from tasks import BASE, merged

from ringattn.config import Config, ConfigError, from_dict, to_dict
from ringattn.overrides import prepare
from ringattn.train import config_folder
from ringattn.training.console import short
from ringattn.typed import Problems, nearest

OWN = {"data.path": "x"}


def problems(changes: dict[str, Any], world_size: int = 1) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        from_dict(merged(BASE, OWN | changes), world_size=world_size)
    return caught.value.problems


def composed(*overrides: str) -> dict[str, Any]:
    with initialize_config_dir(str(config_folder()), version_base="1.3"):
        found = Problems()
        ready = prepare(list(overrides), config_folder(), found)
        assert not found.messages
        return OmegaConf.to_container(compose("config", ready), resolve=True)  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("changes", "world_size", "expected"),
    [
        ({"train.stpes": 3}, 1, "train.stpes: unknown key, did you mean train.steps?"),
        ({"lr": 1e-3}, 1, "lr: unknown key, did you mean optim.lr?"),
        ({"trian.steps": 3}, 1, "trian.steps: unknown key, did you mean train.steps?"),
        ({"train.steps": "many"}, 1, "train.steps='many': expected a whole number"),
        ({"train.steps": 2.5}, 1, "train.steps=2.5: expected a whole number"),
        ({"train.steps": True}, 1, "train.steps=True: expected a whole number"),
        ({"train.steps": "???"}, 1, "train.steps: is missing, give train.steps=<a whole number>"),
        ({"train.steps": None}, 1, "train.steps=null: expected a whole number"),
        ({"compile": "yes"}, 1, "compile='yes': expected true or false"),
        ({"optim": 3}, 1, "optim=3: is a section, set its keys (optim.name, optim.lr, optim.weight_decay, ...) instead"),
        ({"model.windows": 64}, 1, "model.windows=64: expected a list of whole numbers"),
        ({"precision": "fp16"}, 1, "precision=fp16: is not offered by this version"),
        ({"precision": "half"}, 1, "precision='half': expected one of auto, fp64, fp32, bf16"),
        ({"parallel.layout": "diagonal"}, 1, "parallel.layout=diagonal: expected one of contiguous, zigzag, striped, chunk-striped,"),
        ({"parallel.exchange": "mesh"}, 1, "parallel.exchange=mesh: expected one of ring, allgather"),
        ({"parallel.wire": "fp8"}, 1, "parallel.wire=fp8: expected one of exact, bf16"),
        ({"parallel.ulysses": 2}, 1, "parallel.ring=null: parallel.replicate x parallel.shard x parallel.ulysses = 1 x 1 x 2 = 2 does not "
         "divide the 1 processes started"),
        ({"parallel.ulysses": 2, "parallel.ring": 2}, 2, "ring x replicate x shard x ulysses = 2 x 1 x 1 x 2 = 4, but 2 processes were"),
        ({"parallel.ulysses": 3}, 3, "parallel.ulysses=3: 4 query heads cannot be split over ulysses=3: it must divide them"),
        ({"kernel": "cuda"}, 1, "kernel=cuda: expected one of auto, gluon, triton, torch, reference"),
        ({"optim.lr": float("nan")}, 1, "optim.lr=nan: must be a finite number, 0 or more"),
        ({"optim.beta2": 1.0}, 1, "optim.beta2=1.0: must be below 1"),
        ({"name": "a/b"}, 1, "name=a/b: is a folder's name"),
        ({"parallel.ring": 3}, 4, "parallel.ring=3: ring x replicate x shard = 3 x 1 x 1 = 3, but 4 processes were started"),
        ({"parallel.shard": 3, "train.rows": 3}, 4, "parallel.ring=null: parallel.replicate x parallel.shard = 1 x 3 = 3 does not divide"),
        ({"train.rows": 6, "train.micro_rows": 2, "parallel.shard": 2}, 2, "train.rows=6: must be a multiple of parallel.replicate x "
         "parallel.shard x train.micro_rows = 1 x 2 x 2 = 4; the next that works is 8"),
        ({"train.seq_len": 0}, 4, "train.seq_len=0: must be 1 or more"),
        ({"model.heads": 3}, 1, "model.heads=3: must be a multiple of model.kv_heads=2"),
        ({"data.kind": "books"}, 1, "data.kind=books: must be one of stdlib, text, memmap"),
        ({"data.path": ""}, 1, "data.path=''"),
        ({"schedule": {"name": "wsd", "decay_steps": 9, "warmup_steps": 3}}, 1, "schedule.decay_steps=9: with schedule.warmup_steps=3"),
        ({"train.stop_after": 0}, 1, "train.stop_after=0: must be a step from 1 on, or null"),
    ],
)
def test_one_mistake_one_message(changes: dict[str, Any], world_size: int, expected: str) -> None:
    found = problems(changes, world_size)
    assert len(found) == 1 and expected in found[0], found


def test_all_mistakes_in_one_message() -> None:
    found = problems(
        {"train.stpes": 1, "optim.lr": "fast", "precision": "half", "parallel.ring": 3, "train.seq_len": 0, "train.rows": 0,
         "model.heads": 3, "data.kind": "books", "kernel": "none", "name": ""}, 2,
    )
    keys = ("train.stpes", "optim.lr", "precision", "parallel.ring", "train.seq_len", "train.rows", "model.heads", "data.kind", "kernel",
            "name")
    assert [k for k in keys if not any(p.startswith(k) for p in found)] == []
    assert len(found) == len(keys), found


def test_whole_floats_and_ints_are_what_was_meant() -> None:
    config = from_dict(merged(BASE, OWN | {"train.steps": 1e3, "optim.clip": 2, "name": 17, "log.wandb": False}))
    assert config.train.steps == 1000 and isinstance(config.train.steps, int)
    assert isinstance(config.optim.clip, float) and config.name == "17" and config.log.wandb == "off"  # YAML reads off as false


def test_round_trip() -> None:
    config = from_dict(merged(BASE, OWN))
    assert from_dict(to_dict(config)) == config


def test_nearest() -> None:
    assert nearest("optim.ler", ["optim.lr", "optim.eps"]) == "optim.lr"
    assert nearest("xyzzy", ["optim.lr"]) is None


def test_paths_start_at_the_launch_folder() -> None:
    config = from_dict(merged(BASE, {"data.path": "books", "resume": "old/run", "log.dir": "out"})).at("/launch")
    assert (config.data.path, config.resume, str(config.folder)) == ("/launch/books", "/launch/old/run", "/launch/out/t")
    assert from_dict(merged(BASE, {"data.path": "/abs"})).at("/launch").data.path == "/abs"
    assert from_dict(merged(BASE, OWN)).at("/launch").resume == "auto"


# --- the yaml files -----------------------------------------------------------------------------------------------------


def options(group: str) -> list[str]:
    return sorted(p.stem for p in (config_folder() / group).glob("*.yaml"))


@pytest.mark.parametrize("group", ["model", "data", "optim", "schedule", "checkpoint", "log", "experiment", "debug", "parallel"])
def test_every_option_of_every_group_is_valid(group: str) -> None:
    assert options(group)
    for option in options(group):
        raw = composed(f"{group}={option}")
        if raw["data"]["kind"] != "stdlib":
            raw["data"]["path"] = "x"  # left to the user
        world_size = 16 if option == "hybrid" else 1
        assert isinstance(from_dict(raw, world_size=world_size), Config), option


def test_yaml_defaults_are_the_dataclasses_defaults() -> None:
    """One truth: a key that both state has one value; what only one of them states is listed here."""
    from_yaml = to_dict(from_dict(composed()))
    from_code = to_dict(from_dict({"train": {"steps": 1000}}))
    for section in ("model", "data", "optim", "schedule"):  # groups: an option is a choice, not a default
        from_yaml.pop(section), from_code.pop(section)
    assert from_yaml == from_code


def test_later_groups_win() -> None:
    raw = composed("experiment=cpu_tiny", "debug=virtual_ring", "train.steps=7", "model.width=96")
    assert (raw["name"], raw["parallel"]["virtual"], raw["train"]["steps"], raw["model"]["width"]) == ("virtual_ring", 8, 7, 96)


# --- the command line before Hydra --------------------------------------------------------------------------------------


def line(*arguments: str) -> tuple[list[str], list[str]]:
    found = Problems()
    return prepare(list(arguments), config_folder(), found), found.messages


def test_keys_become_forced_and_groups_stay() -> None:
    mine = ["model=debug", "+x=1", "~hydra.sweep", "hydra.job.chdir=true"]
    ready, found = line("train.steps=3", *mine, "-m", "seed=1,2", "--config-name", "a")
    assert ready == ["-m", "--config-name", "a", "++train.steps=3", *mine, "++seed=1,2"]
    assert not found


def test_equal_signs_in_values_need_no_quotes() -> None:
    """HY-03."""
    for value in ("runs/epoch=3.pt", "'runs/epoch=3.pt'", "it's=fine"):
        with initialize_config_dir(str(config_folder()), version_base="1.3"):
            ready, found = line(f"resume={value}")
            assert not found
            assert compose("config", ready).resume == value.removeprefix("'").removesuffix("'")


@pytest.mark.parametrize(
    ("argument", "expected"),
    [
        ("model=125", "model=125: is no option of this group, choose from 125m,"),
        ("experiment=quikstart", "(did you mean quickstart?)"),
        ("train.steps", "train.steps: is not of the form key=value"),
        ("resume='a", "cannot be parsed"),
    ],
)
def test_what_hydra_would_stop_at(argument: str, expected: str) -> None:
    ready, found = line("seed=1", argument)
    assert ready == ["++seed=1"] and len(found) == 1 and expected in found[0]


def test_short() -> None:
    assert (short(1234567), short(20.3e9, "FLOP"), short(12.0), short(0.5)) == ("1.23M", "20.3 GFLOP", "12", "0.5")


def test_config_folder_holds_the_groups() -> None:
    assert {"model", "data", "experiment"} <= {p.name for p in Path(config_folder()).iterdir()}
