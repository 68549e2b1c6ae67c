"""Checkpoints: sharded, complete or not there at all, and loadable on any number of ranks.

    runs/<name>/checkpoints/step-00000500/   __<rank>_0.distcp   the tensors, written by all ranks at once (torch.distributed.checkpoint)
                                             .metadata           torch's index of them
                                             state.json          step, tokens seen, corpus, config, and size and CRC-32 of every file

A checkpoint is written under a temporary name, synced to disk, and renamed by one rank after all have finished: a folder called
step-... is complete. Everything but state.json is a tensor, under the parameter's own name (``model.<name>``,
``optimizer.<name>.exp_avg``), so a different mesh, and other settings of ``compile`` and ``activation``, load it. Each rank's random
generator has a key of its own. Several hosts need a shared file system.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from ringattn.training.safe_reader import INDEX, CheckpointError, SafeReader, SaveError, read_index
from ringattn.training.together import everywhere, on_main

FORMAT = 1  # raised when an older reader could not understand a newer checkpoint
STATE = "state.json"


@dataclass(frozen=True)
class Progress:
    """What a checkpoint says besides tensors. ``step``: finished steps. ``tokens``: read by then, over all ranks. ``corpus``: name,
    fingerprint and stream fingerprint of the data. ``config``: the run's config as a dictionary, ``model.vocab_size`` filled in."""

    step: int
    tokens: int
    corpus: dict[str, str]
    config: dict[str, Any]
    world_size: int
    format: int = FORMAT


def step_folder(folder: Path, step: int) -> Path:
    """Where the checkpoint of ``step`` lies under the run's ``checkpoints`` folder."""
    return folder / f"step-{step:08d}"


def list_steps(folder: Path) -> list[int]:
    """The steps that have a checkpoint folder, newest first."""
    names = [p.name for p in folder.iterdir() if p.is_dir()] if folder.is_dir() else []
    return sorted((int(n[5:]) for n in names if re.fullmatch(r"step-\d{8,}", n)), reverse=True)


# --- writing ------------------------------------------------------------------------------------------------------------


def save(folder: Path, progress: Progress, model: nn.Module, optimizer: torch.optim.Optimizer, *, keep: int) -> Path:
    """Write the checkpoint of ``progress.step`` under ``folder`` and leave the newest ``keep``. Every rank calls this.

    Raises SaveError, on all ranks, if it cannot be written; what there is of it is removed.
    """
    final, main = step_folder(folder, progress.step), dist.get_rank() == 0
    temporary = folder / f".tmp-{final.name}"

    def begin() -> None:
        for stale in folder.glob(".tmp-*"):
            shutil.rmtree(stale)
        temporary.mkdir(parents=True)

    def finish(checksums: dict[str, int]) -> None:
        files = {name: [(temporary / name).stat().st_size, checksum] for name, checksum in checksums.items()}
        with open(temporary / STATE, "w") as file:
            json.dump({**progress.__dict__, "torch": torch.__version__, "files": files}, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        _sync_folder(temporary)
        if final.exists():  # the same step again, from an explicit resume: the new one replaces it
            _remove(final)
        os.rename(temporary, final)
        _sync_folder(folder)
        for step in list_steps(folder)[keep:]:
            _remove(step_folder(folder, step))

    try:
        on_main(begin)
        dcp.save(_tensors(model, optimizer), storage_writer=dcp.FileSystemWriter(temporary, sync_files=True))
        names = on_main(lambda: sorted(p.name for p in temporary.iterdir()))
        checksums = _checksums(temporary, names)
        on_main(lambda: finish(checksums))
    except (CheckpointException, OSError, CheckpointError) as error:
        if main:
            shutil.rmtree(temporary, ignore_errors=True)
        newest = next((s for s in list_steps(folder) if s != progress.step), None)
        whole = "there is no complete one" if newest is None else f"the newest complete one is {step_folder(folder, newest).name}"
        raise SaveError(f"checkpoint {final}: cannot be written ({_reason(error)}); {whole}") from None
    return final


def _reason(error: BaseException) -> str:
    """The cause in a line. A CheckpointException holds those of the ranks."""
    failures: dict[int, Any] = getattr(error, "failures", {})
    if failures:
        rank, cause = next(iter(failures.items()))
        return f"rank {rank}: {_reason(cause[0] if isinstance(cause, tuple) else cause)}"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror + (f": {error.filename}" if error.filename else "")
    return (str(error).splitlines() or [type(error).__name__])[0]


def _tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """All that is saved: tensors only. The optimizer's hyperparameters are the config's business, so only its state is taken."""
    rank = f"rank{dist.get_rank():05d}"
    random = {f"{rank}.cpu": torch.get_rng_state()}
    if torch.cuda.is_initialized():
        random[f"{rank}.cuda"] = torch.cuda.get_rng_state()
    return {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)["state"], "random": random}


def _checksums(folder: Path, names: list[str]) -> dict[str, int]:
    """CRC-32 of the files ``names``, the same list on all ranks, of ``folder``. The ranks share the work; each gets the whole answer.

    Raises CheckpointError on all ranks if one of them cannot read a file.
    """
    own: dict[str, int] = {}

    def read() -> None:
        for name in names[dist.get_rank() :: dist.get_world_size()]:
            own[name] = 0
            with open(folder / name, "rb") as file:
                while block := file.read(1 << 24):
                    own[name] = zlib.crc32(block, own[name])

    everywhere(read)
    everyone: list[dict[str, int]] = [{}] * dist.get_world_size()
    dist.all_gather_object(everyone, own)
    return {name: checksum for part in everyone for name, checksum in part.items()}


def _remove(folder: Path) -> None:
    """Remove a checkpoint; it stops being called one first, so that no half of it is ever taken for a whole."""
    doomed = folder.with_name(f".tmp-old-{folder.name}")
    os.rename(folder, doomed)
    shutil.rmtree(doomed)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# --- finding ------------------------------------------------------------------------------------------------------------


def _read_state(checkpoint: Path) -> tuple[dict[str, Any], dict[str, tuple[int, int]]]:
    """state.json without its table of files, and that table: size in bytes and CRC-32 of each. Raises CheckpointError."""
    try:
        state = json.loads((checkpoint / STATE).read_text())
        files = {name: (int(size), int(checksum)) for name, (size, checksum) in state.pop("files").items()}
        version = state["format"]
    except FileNotFoundError:
        raise CheckpointError(f"checkpoint {checkpoint}: is incomplete or not one of this program, it has no {STATE}") from None
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        raise CheckpointError(f"checkpoint {checkpoint}: {STATE} is damaged ({type(error).__name__}: {error})") from None
    if version != FORMAT:
        raise CheckpointError(f"checkpoint {checkpoint}: has format {version}, this version reads format {FORMAT}")
    return state, files


def read_progress(checkpoint: Path) -> Progress:
    """What a complete checkpoint says about itself. Raises CheckpointError, naming it, if it is incomplete or of an unknown format."""
    state, files = _read_state(checkpoint)
    for name, (size, _) in {INDEX: (-1, 0), **files}.items():
        path = checkpoint / name
        found = path.stat().st_size if path.is_file() else None
        if found is None:
            raise CheckpointError(f"checkpoint {checkpoint}: is incomplete, {name} is missing")
        if size not in (-1, found):
            raise CheckpointError(f"checkpoint {checkpoint}: is damaged, {name} has {found} bytes instead of {size}")
    try:
        return Progress(**{k: state[k] for k in Progress.__dataclass_fields__})
    except KeyError as error:
        raise CheckpointError(f"checkpoint {checkpoint}: {STATE} does not say {error}") from None


def find(resume: str, folder: Path) -> tuple[Path | None, list[str]]:
    """The checkpoint that ``resume`` means for the run whose checkpoints are in ``folder``, and notes for the user.

    auto: the newest complete one, None if there is none. never: None. A path: that checkpoint, or the newest complete one of that run.
    Raises CheckpointError if a path holds none, or if there are some for auto but none is whole: a long run must not silently begin anew.
    """
    if resume == "never":
        return None, []
    if resume != "auto":
        given = Path(resume)
        if (given / STATE).exists() or re.fullmatch(r"step-\d{8,}", given.name):
            read_progress(given)
            return given, []
        folder = given / "checkpoints" if (given / "checkpoints").is_dir() else given
    notes = []
    for step in list_steps(folder):
        try:
            read_progress(step_folder(folder, step))
        except CheckpointError as error:
            notes.append(f"passed over {error}")
            continue
        return step_folder(folder, step), notes
    if resume != "auto":
        raise CheckpointError(f"resume={resume}: holds no complete checkpoint" + "".join(f"; {n}" for n in notes))
    if notes:
        raise CheckpointError(f"resume=auto: no checkpoint in {folder} can be used; give resume=never to start afresh; {'; '.join(notes)}")
    return None, []


# --- loading ------------------------------------------------------------------------------------------------------------


def load(checkpoint: Path, model: nn.Module, optimizer: torch.optim.Optimizer, *, seed: int) -> list[str]:
    """Load tensors into model and optimizer, whatever mesh wrote them. Every rank calls this; returns notes for the user.

    Raises CheckpointError, on all ranks, if a tensor is missing, has another shape, is not this model's, or cannot be read.
    """
    progress, index = read_progress(checkpoint), read_index(checkpoint)
    expected = _read_state(checkpoint)[1]
    found = _checksums(checkpoint, sorted(expected))
    for name, (_, checksum) in expected.items():
        if found[name] != checksum:
            raise CheckpointError(f"checkpoint {checkpoint}: is damaged, {name} does not hold what was written (its CRC-32 differs)")
    state, notes = _tensors(model, optimizer), []
    own_random = state.pop("random")
    if progress.world_size == dist.get_world_size() and all(f"random.{k}" in index.state_dict_metadata for k in own_random):
        state["random"] = own_random
    else:
        torch.manual_seed(((seed + 1) * 1_000_003 + progress.step * 65_537 + dist.get_rank()) % 2**63)
        notes.append(f"saved by {progress.world_size} ranks, loaded by {dist.get_world_size()}: random generators start anew")
    _compare(checkpoint, state, index.state_dict_metadata)
    try:
        dcp.load(state, storage_reader=SafeReader(checkpoint, index))
    except (Exception, CheckpointException) as error:  # the latter is no Exception
        reason = next(iter(getattr(error, "failures", {}).values()), (error,))[0]
        raise CheckpointError(f"checkpoint {checkpoint}: is damaged ({type(reason).__name__}: {str(reason).splitlines()[0]})") from error
    set_model_state_dict(model, state["model"])
    groups = get_optimizer_state_dict(model, optimizer)["param_groups"]
    set_optimizer_state_dict(model, optimizer, {"state": state["optimizer"], "param_groups": groups})
    for key, value in state.get("random", {}).items():
        (torch.set_rng_state if key.endswith("cpu") else torch.cuda.set_rng_state)(value)
    return notes


def _compare(checkpoint: Path, state: dict[str, Any], saved: dict[str, Any]) -> None:
    """Refuse a checkpoint whose tensors are not exactly those of this model and optimizer."""
    wanted: dict[str, tuple[int, ...]] = {}
    for section, holder in state.items():
        for name, value in holder.items():
            tensors = value.items() if isinstance(value, dict) else [("", value)]
            wanted |= {f"{section}.{name}" + (f".{k}" if k else ""): tuple(t.shape) for k, t in tensors if isinstance(t, torch.Tensor)}
    problems = [f"{k} is missing" for k in wanted if k not in saved]
    problems += [f"{k} is not of this model or optimizer" for k in saved if k not in wanted and not k.startswith("random.")]
    problems += [
        f"{k} has shape {list(saved[k].size)} instead of {list(shape)}"
        for k, shape in wanted.items() if k in saved and tuple(saved[k].size) != shape
    ]
    if problems:
        more = f" and {len(problems) - 3} more" if len(problems) > 3 else ""
        raise CheckpointError(f"checkpoint {checkpoint}: does not fit this model: {'; '.join(problems[:3])}{more}")
