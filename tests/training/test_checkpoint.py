"""Checkpoints are whole or refused by name, and loading one never runs code that came with it."""

from __future__ import annotations

import io
import json
import os
import pickle
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import Ranks
from tasks import lines_of, merged, trajectory, with_run
from torch.distributed.checkpoint.metadata import BytesStorageMetadata

from ringattn.training import checkpoint
from ringattn.training.launch import Launch
from ringattn.training.safe_reader import CheckpointError, read_index


@pytest.fixture(scope="module")
def saved(ranks: Ranks, corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two ranks with checkpoints after steps 2 and 3."""
    from tasks import BASE

    folder = tmp_path_factory.mktemp("saved")
    settings = merged(BASE, {
        "data.path": str(corpus), "log.dir": str(folder), "name": "saved", "train.steps": 3, "checkpoint.every": 2, "checkpoint.keep": 2,
    })
    ranks.run(2, trajectory, settings, False)
    return folder / "saved"


@pytest.fixture
def broken(saved: Path, tmp_path: Path) -> Path:
    """A copy to break: the folder of step 3's checkpoint."""
    shutil.copytree(saved, tmp_path / "runs" / "t")
    return checkpoint.step_folder(tmp_path / "runs" / "t" / "checkpoints", 3)


def refusal(launch: Launch, raw: dict[str, Any]) -> str:
    try:
        with_run(launch, raw, lambda run: None)
    except CheckpointError as error:
        return str(error)
    return "accepted"


def test_layout_on_disk(saved: Path) -> None:
    names = sorted(p.name for p in (saved / "checkpoints").iterdir())
    assert names == ["step-00000002", "step-00000003"]
    assert not any(c in str(name) for name in names for c in "=, ")  # HY-03: can be given on a command line as it is
    state = json.loads((saved / "checkpoints" / names[1] / "state.json").read_text())
    assert state["step"] == 3 and state["tokens"] == 3 * 4 * 96 and state["world_size"] == 2
    assert state["config"]["model"]["vocab_size"] == 258
    keys = read_index(saved / "checkpoints" / names[1]).state_dict_metadata
    wanted = {"model.blocks.0.attention.qkv.weight", "optimizer.head.weight.exp_avg", "random.rank00000.cpu", "random.rank00001.cpu"}
    assert wanted <= set(keys)


def test_newest_are_kept(ranks: Ranks, raw: Callable[..., Any]) -> None:
    settings = raw({"checkpoint.every": 1, "checkpoint.keep": 2, "train.steps": 4})
    ranks.run(1, trajectory, settings, False)
    assert checkpoint.list_steps(Path(settings["log"]["dir"]) / "t" / "checkpoints") == [4, 3]


class Evil:
    """Unpickling this makes a folder."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.mark),)


def seal(checkpoint: Path) -> None:
    """Make sizes and checksums fit what the files hold now, as a forger would."""
    state = json.loads((checkpoint / "state.json").read_text())
    contents = {name: (checkpoint / name).read_bytes() for name in state["files"]}
    state["files"] = {name: [len(content), zlib.crc32(content)] for name, content in contents.items()}
    (checkpoint / "state.json").write_text(json.dumps(state))


def test_code_in_the_index_is_not_run(broken: Path, tmp_path: Path, ranks: Ranks, raw: Callable[..., Any]) -> None:
    index = read_index(broken)
    index.planner_data = Evil(tmp_path / "mark")
    (broken / ".metadata").write_bytes(pickle.dumps(index))
    seal(broken)
    message = ranks.run(2, refusal, raw())
    assert str(broken) in message and "mkdir" in message
    assert not (tmp_path / "mark").exists()
    pickle.loads((broken / ".metadata").read_bytes())  # the trap is a real one
    assert (tmp_path / "mark").exists()


GADGETS = [b"cos\nsystem\n(S'true'\ntR.", b"cbuiltins\neval\n(S'1'\ntR.", b"ctorch\nload\n.", b"ctorch.hub\nload\n."]


@pytest.mark.parametrize("gadget", GADGETS)
def test_gadgets_are_refused(gadget: bytes, broken: Path) -> None:
    (broken / ".metadata").write_bytes(gadget)
    with pytest.raises(CheckpointError, match="not loaded"):
        read_index(broken)


def test_pickled_entries_and_foreign_files_are_refused(broken: Path) -> None:
    index = read_index(broken)
    index.state_dict_metadata["model.extra"] = BytesStorageMetadata()
    (broken / ".metadata").write_bytes(pickle.dumps(index))
    with pytest.raises(CheckpointError, match=r"model\.extra is not a tensor"):
        read_index(broken)
    del index.state_dict_metadata["model.extra"]
    next(iter(index.storage_data.values())).relative_path = "../step-00000002/__0_0.distcp"
    (broken / ".metadata").write_bytes(pickle.dumps(index))
    with pytest.raises(CheckpointError, match="no file of this folder"):
        read_index(broken)


def test_pickled_tensor_bytes_are_refused(broken: Path, tmp_path: Path, ranks: Ranks, raw: Callable[..., Any]) -> None:
    """The tensor files themselves hold pickles: torch reads them with weights_only, which refuses this one."""
    index = read_index(broken)
    payload = io.BytesIO()
    torch.save(Evil(tmp_path / "mark"), payload)
    where = next(iter(index.storage_data.values()))
    file = broken / where.relative_path
    content = bytearray(file.read_bytes())
    where.offset, where.length = len(content), len(payload.getvalue())
    file.write_bytes(content + payload.getvalue())
    (broken / ".metadata").write_bytes(pickle.dumps(index))
    seal(broken)
    message = ranks.run(2, refusal, raw())
    assert "is damaged" in message and not (tmp_path / "mark").exists()


def test_one_flipped_bit_is_refused(broken: Path, ranks: Ranks, raw: Callable[..., Any]) -> None:
    file = max(broken.glob("*.distcp"), key=lambda p: p.stat().st_size)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    message = ranks.run(2, refusal, raw())
    assert "is damaged" in message and file.name in message


def flip_bits(folder: Path) -> None:
    file = folder / "__0_0.distcp"
    content = bytearray(file.read_bytes())
    for i in range(0, len(content), 64):
        content[i] ^= 0x10
    file.write_bytes(content)


def cut(folder: Path) -> None:
    file = folder / "__1_0.distcp"
    file.write_bytes(file.read_bytes()[:-100])


def next_format(folder: Path) -> None:
    state = json.loads((folder / "state.json").read_text())
    (folder / "state.json").write_text(json.dumps(state | {"format": 99}))


DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "bits": (flip_bits, "is damaged"),
    "cut": (cut, "__1_0.distcp has"),
    "gone": (lambda f: (f / "__1_0.distcp").unlink(), "__1_0.distcp is missing"),
    "no index": (lambda f: (f / ".metadata").unlink(), ".metadata is missing"),
    "no state": (lambda f: (f / "state.json").unlink(), "incomplete or not one of this program"),
    "half a state": (lambda f: (f / "state.json").write_text('{"step": 3'), "state.json is damaged"),
    "format": (next_format, "format 99"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_refused_by_name(damage: str, broken: Path, ranks: Ranks, raw: Callable[..., Any]) -> None:
    spoil, expected = DAMAGE[damage]
    spoil(broken)
    message = ranks.run(2, refusal, raw({"name": "other", "resume": str(broken)}))
    assert str(broken) in message and expected in message, message


@pytest.mark.parametrize("damage", ["cut", "no state", "format"])
def test_auto_goes_on_from_the_newest_complete_one(damage: str, broken: Path, ranks: Ranks, raw: Callable[..., Any]) -> None:
    wanted = lines_of(broken.parent.parent)
    DAMAGE[damage][0](broken)
    (broken.parent / ".tmp-step-00000009").mkdir()  # left by a crash
    result = ranks.run(2, trajectory, raw({"train.steps": 3, "checkpoint.keep": 2, "checkpoint.every": 2}), False)
    assert result["lines"] == wanted
    assert sorted(p.name for p in broken.parent.iterdir()) == ["step-00000002", "step-00000003"]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"model.width": 64}, "model.width 32 -> 64"),
        ({"model.layers": 3, "model.tied": True}, "model.layers 2 -> 3, model.tied False -> True"),
        ({"optim.name": "sgd", "optim.momentum": 0.9}, "momentum_buffer is missing"),
        ({"data.kind": "stdlib", "data.path": ""}, "was trained on the corpus"),
    ],
)
def test_foreign_checkpoints_are_refused(
    change: dict[str, Any], expected: str, broken: Path, ranks: Ranks, raw: Callable[..., Any]
) -> None:
    before = sorted(p.name for p in broken.parent.parent.rglob("*"))
    message = ranks.run(2, refusal, raw(change))
    assert str(broken) in message and expected in message, message
    assert sorted(p.name for p in broken.parent.parent.rglob("*")) == before  # nothing was written


def test_a_path_without_a_checkpoint_is_refused(ranks: Ranks, raw: Callable[..., Any], tmp_path: Path) -> None:
    assert "holds no complete checkpoint" in ranks.run(1, refusal, raw({"resume": str(tmp_path / "nowhere")}))
