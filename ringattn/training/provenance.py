"""Where a run came from: ``runs/<name>/environment.json``, written by one rank each time the run starts or goes on."""

from __future__ import annotations

import json
import os
import platform
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from importlib import metadata
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

FILE = "environment.json"
PACKAGES = ("torch", "triton", "numpy", "einops", "hydra-core", "omegaconf")
MAX_DOCUMENTS = 4096  # remembered of the first row


def write_environment(folder: Path, facts: dict[str, Any]) -> None:
    """Write ``facts`` and what can be found out here. Raises OSError where the folder cannot be written."""
    found = {
        "started": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "command": command_line(sys.orig_argv, os.environ),
        "folder": os.getcwd(),
        "host": socket.gethostname(),
        "platform": platform.platform(),
        "versions": versions(),
        "git": git_state(Path(__file__).resolve().parents[2]),
    }
    temporary = folder / ".environment.tmp"
    temporary.write_text(json.dumps(found | facts, indent=1) + "\n")
    os.replace(temporary, folder / FILE)


def command_line(words: Sequence[str], environment: Mapping[str, str]) -> str:
    """The command that started this process, with torchrun in front where torchrun was."""
    own = list(words[1:])
    while own and own[0].startswith("-") and own[0] not in ("-m", "-c"):  # the interpreter's own options
        own = own[2:] if own[0] in ("-X", "-W") else own[1:]
    if "TORCHELASTIC_RUN_ID" not in environment:
        return shlex.join(["python", *own])
    local, world = int(environment.get("LOCAL_WORLD_SIZE", "1")), int(environment.get("WORLD_SIZE", "1"))
    several = ["--nnodes", str(world // local), "--rdzv-backend", "c10d", "--rdzv-endpoint", "HOST:PORT"]
    nodes = ["--standalone"] if local == world else several
    return shlex.join(["torchrun", *nodes, "--nproc-per-node", str(local), *own])


def versions() -> dict[str, str]:
    """Versions of what the numbers depend on."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name()
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return found


def git_state(root: Path) -> dict[str, Any] | None:
    """Commit and changed files of the source tree; None for an installed package or without git."""
    if not (root / ".git").exists():
        return None
    try:
        commit, changed = (
            subprocess.run(["git", "-C", str(root), *words], capture_output=True, text=True, timeout=5, check=True).stdout
            for words in (("rev-parse", "HEAD"), ("status", "--porcelain", "--untracked-files=no"))
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return {"commit": commit.strip(), "changed": [line[3:] for line in changed.splitlines()]}


def document_lengths(ids: torch.Tensor) -> list[int] | None:
    """Lengths of one row's documents, padding (-1) as the negative last one; None if there are too many to keep. ``ids``: int [S]."""
    found = [-len(list(g)) if i < 0 else len(list(g)) for i, g in groupby(ids.tolist())]
    return found if len(found) <= MAX_DOCUMENTS else None
