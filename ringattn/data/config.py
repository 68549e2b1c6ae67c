"""What a run says about its data: `DataConfig`, and `DataError`, the one error that bad data raises."""

from __future__ import annotations

import dataclasses
import math
import os
from dataclasses import dataclass
from typing import Any

from ringattn.typed import suggest

KINDS = ("stdlib", "text", "memmap")
POSITIONS = ("restart", "continue")
VERIFY = ("auto", "full", "sizes")


class DataError(ValueError):
    """Data that cannot be trained on: missing, empty, unreadable, damaged. The message reads ``key=value: what is allowed``."""

    def __init__(self, key: str, value: Any, message: str) -> None:
        super().__init__(f"{key}={value}: {message}")
        self.key, self.value, self.message = key, value, message

    def __reduce__(self) -> tuple[type[DataError], tuple[str, Any, str]]:
        return DataError, (self.key, self.value, self.message)


@dataclass
class DataConfig:
    """The `data` section of a run's config."""

    kind: str = "stdlib"  # stdlib (the source of Python's own standard library) | text | memmap (written by scripts/prepare_data.py)
    path: str = ""  # text: a file, a folder (all its files, hidden ones left out) or a glob; memmap: the folder
    positions: str = "restart"  # restart: count from 0 in each document of a row | continue: count along the row
    mask_documents: bool = True  # attention stays within a document, else it sees the whole row; no label ever crosses a document's end
    val_fraction: float = 0.01  # share of documents held out, from 0 (none) to below 1
    verify: str = "auto"  # memmap: full (read all, compare sha256) | sizes (lengths and offsets) | auto (full up to 1 GiB of tokens)

    def validate(self, problems: list[str], prefix: str = "data") -> None:
        """Append one message for each mistake that shows without opening any file."""
        for key, allowed in (("kind", KINDS), ("positions", POSITIONS), ("verify", VERIFY)):
            value = getattr(self, key)
            if value not in allowed:
                problems.append(f"{prefix}.{key}={value}: must be one of {', '.join(allowed)}{suggest(value, allowed)}")
        if not isinstance(self.path, str):
            problems.append(f"{prefix}.path={self.path}: must be a text")
        elif self.kind == "stdlib" and self.path:
            problems.append(f"{prefix}.path={self.path}: {prefix}.kind=stdlib reads no path; data=text or data=memmap does")
        elif self.kind == "text" and not self.path:
            problems.append(f"{prefix}.path='': {prefix}.kind=text needs a file, a folder or a glob of text files")
        elif self.kind == "memmap" and not self.path:
            problems.append(f"{prefix}.path='': {prefix}.kind=memmap needs a folder written by scripts/prepare_data.py")
        if not isinstance(self.mask_documents, bool):
            problems.append(f"{prefix}.mask_documents={self.mask_documents}: must be true or false")
        fraction = self.val_fraction
        if isinstance(fraction, bool) or not isinstance(fraction, int | float) or not math.isfinite(fraction) or not 0 <= fraction < 1:
            problems.append(f"{prefix}.val_fraction={fraction}: must be a number from 0 (no validation) to below 1")

    def resolve(self, base: str | os.PathLike[str]) -> DataConfig:
        """The same config with ``path`` absolute: a relative one starts at the folder ``base``, ``~`` is the home folder."""
        if not self.path:
            return self
        return dataclasses.replace(self, path=os.path.normpath(os.path.join(base, os.path.expanduser(self.path))))
