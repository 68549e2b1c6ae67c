"""What this machine says about a config before the ranks meet: files, memory, disk, and the kernel where no GPU is needed to ask it.

:func:`check_here` adds to the problems that :func:`ringattn.config.from_dict` has found, so that all are read in one message. Nothing is
written or created.
"""

from __future__ import annotations

import glob
import os
import shutil
from pathlib import Path

import torch

from ringattn.config import Config, ConfigError
from ringattn.data import BYTE_VOCAB_SIZE
from ringattn.training.console import binary
from ringattn.training.parallelize import choose_kernel
from ringattn.typed import Problems

ROW_BYTES = 8 + 8 + 8 + 4  # a position of a whole row on the host: token, label, position, document


def check_here(config: Config, problems: Problems, base: str | os.PathLike[str]) -> None:
    """Add what cannot work on this machine. ``config`` as it was typed; relative paths start at ``base``."""
    placed = config.at(base)
    _check_files(config, placed, problems)
    _check_room(config, placed, problems)
    if problems.fine("model", "data") and config.data.kind in ("stdlib", "text") and 0 < config.model.vocab_size < BYTE_VOCAB_SIZE:
        problems.add(f"model.vocab_size={config.model.vocab_size}: data.kind={config.data.kind} has {BYTE_VOCAB_SIZE} tokens "
                     "(bytes, and the begin and end of a document); 0 takes the data's number", "model.vocab_size")  # fmt: skip
    if problems.fine("kernel", "precision", "device", "model", "deterministic"):
        _check_kernel(config, problems)


def _check_files(typed: Config, placed: Config, problems: Problems) -> None:
    data = placed.data
    reads = data.kind in ("text", "memmap") and data.path and not (data.kind == "text" and glob.has_magic(data.path))
    if problems.fine("data") and reads and not os.path.lexists(data.path):
        problems.add(f"data.path={typed.data.path}: no such file or folder: {data.path}", "data.path")
    if problems.fine("resume") and placed.resume not in ("auto", "never") and not os.path.lexists(placed.resume):
        allowed = "give auto, never, or the path of a run or a checkpoint"
        problems.add(f"resume={typed.resume}: no such folder: {placed.resume}; {allowed}", "resume")
    if problems.fine("log.dir", "name"):
        folder = _existing(placed.folder)
        if not folder.is_dir():
            problems.add(f"log.dir={typed.log.dir}: {folder} is a file, and must be a folder to write runs in", "log.dir")
        elif not os.access(folder, os.W_OK | os.X_OK):
            problems.add(f"log.dir={typed.log.dir}: {folder} cannot be written to (no permission, or a read-only file system)", "log.dir")


def _check_room(typed: Config, placed: Config, problems: Problems) -> None:
    train = typed.train
    if problems.fine("train.seq_len", "train.micro_rows"):
        needed, there = ROW_BYTES * train.seq_len * train.micro_rows, host_memory()
        if there is not None and needed > there:
            problems.add(f"train.seq_len={train.seq_len}: {train.micro_rows} whole row{'s take' if train.micro_rows > 1 else ' takes'} "
                         f"{binary(needed)} of this machine's {binary(there)}; at most {there // (ROW_BYTES * train.micro_rows)} fit",
                         "train.seq_len")  # fmt: skip
    if problems.fine("model", "optim", "log.dir", "name", "checkpoint.keep", "precision") and typed.checkpoint.keep:
        needed, folder = checkpoint_bytes(typed), _existing(placed.folder)
        free = shutil.disk_usage(folder).free
        if needed > free:
            problems.add(f"checkpoint.keep={typed.checkpoint.keep}: one checkpoint takes {binary(needed)} and {binary(free)} are free in "
                         f"{folder}; give log.dir a place with more room, or checkpoint.keep=0 for none", "checkpoint.keep")  # fmt: skip


def checkpoint_bytes(config: Config) -> int:
    """Least size of one checkpoint: parameters and the optimizer's states."""
    whole = 8 if config.precision == "fp64" else 4
    states = {"fp32": 2 * whole, "bf16": 4, "8bit": 2}[config.optim.states]
    if config.optim.name == "sgd":
        states = whole if config.optim.momentum else 0
    return config.model.parameters() * (whole + states)


def _check_kernel(config: Config, problems: Problems) -> None:
    if config.device == "cuda" or (config.device == "auto" and torch.cuda.is_available()):
        return  # the ranks ask their own GPUs once they have them
    try:
        choose_kernel(config, config.model, torch.device("cpu"))
    except ConfigError as error:
        problems.add(error.problems[0], "kernel")


def host_memory() -> int | None:
    """Bytes of memory of this machine, or None where the system does not say."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return None


def _existing(path: Path) -> Path:
    """The path, or its nearest parent that exists."""
    while not os.path.lexists(path):
        path = path.parent
    return path
