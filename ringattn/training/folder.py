"""The folder of a run: ``runs/<name>/{config.yaml, metrics.jsonl, checkpoints/, tensorboard/}``, written by one rank.

Nothing that an earlier run wrote is ever overwritten unseen: where a run starts before what lies there, that is set aside first.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import yaml

from ringattn.config import Config, to_dict
from ringattn.training.checkpoint import list_steps, step_folder
from ringattn.training.metrics import FILE, read_lines


@dataclass(frozen=True)
class RunFolder:
    """Paths of a run."""

    path: Path

    @property
    def checkpoints(self) -> Path:
        """Where the checkpoints lie."""
        return self.path / "checkpoints"

    def prepare(self, config: Config, step: int, *, fresh: bool) -> list[str]:
        """Make the folder ready for a run that goes on after ``step``, and write config.yaml. Called on the main rank only.

        Checkpoints later than ``step`` (and with ``fresh``, all that an earlier run left) move to ``previous-<n>``; returns notes on that.
        """
        self.checkpoints.mkdir(parents=True, exist_ok=True)
        notes = []
        later = [step_folder(self.checkpoints, s) for s in list_steps(self.checkpoints) if s > step or fresh]
        if later or (fresh and read_lines(self.path / FILE)):
            number = next(n for n in range(1, 10_000) if not (self.path / f"previous-{n}").exists())
            aside = self.path / f"previous-{number}"
            (aside / "checkpoints").mkdir(parents=True)
            for folder in later:
                shutil.move(folder, aside / "checkpoints" / folder.name)
            for name in (FILE, "tensorboard") if fresh else (FILE,):
                if (self.path / name).exists():
                    (shutil.move if fresh else shutil.copy)(self.path / name, aside / name)
            notes.append(f"what an earlier run wrote beyond step {step} is now in {aside}")
        temporary = self.path / ".config.tmp"
        temporary.write_text(yaml.safe_dump(to_dict(config), sort_keys=False, allow_unicode=True))
        os.replace(temporary, self.path / "config.yaml")
        return notes
