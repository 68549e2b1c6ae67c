"""What the user sees: a header, then a progress line. Only the main rank speaks.

On a terminal the line moves; elsewhere (a file, a pipe, a log of a cluster) it is one plain line every ``log.every`` steps, without
control characters. Everything fits into 80 columns.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
from rich.console import Console as RichConsole
from rich.panel import Panel
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.table import Table
from rich.text import Text

from ringattn.config import LogConfig
from ringattn.ring.layout import Layout

WIDTH = 80
SHOWN_SHARDS = 8


def short(number: float, unit: str = "") -> str:
    """A number in a few characters: 1234567 -> 1.23M."""
    for size, prefix in ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= size:
            return f"{number / size:.3g}{' ' if unit else ''}{prefix}{unit}"
    return f"{number:.3g}{' ' + unit if unit else ''}"


def binary(size: float) -> str:
    """Bytes in MiB or GiB."""
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.0f} MiB"


def clock(seconds: float) -> str:
    """A duration: 4:05 or 1:04:05."""
    whole = max(0, round(seconds))
    hours, minutes = whole // 3600, whole // 60 % 60
    return f"{hours}:{minutes:02d}:{whole % 60:02d}" if hours else f"{minutes}:{whole % 60:02d}"


def picture(layout: Layout, virtual: int, *, fancy: bool = True) -> list[str]:
    """Which rank of a ring holds which positions: one line a shard, a bar of the whole sequence and the ranges held (ends included)."""
    full, empty = ("█", "░") if fancy else ("#", ".")
    cells = min(32 // (2 * layout.ring_size) * 2 * layout.ring_size or 32, layout.seq_len)  # whole chunks a cell where they fit
    sizes = np.bincount(np.arange(layout.seq_len) * cells // layout.seq_len, minlength=cells)
    lines = []
    for shard in range(min(layout.ring_size, SHOWN_SHARDS)):
        held = layout.shard_positions(shard)
        if layout.kind == "striped" and layout.ring_size > 1:
            filled = [i % layout.ring_size == shard for i in range(cells)]
            text = f"every {layout.ring_size}th from {held[0]}"
        else:  # a cell is full if this shard holds most of it
            filled = list(2 * np.bincount(held * cells // layout.seq_len, minlength=cells) > sizes)
            runs = np.split(held, np.flatnonzero(np.diff(held) != 1) + 1)
            text = ", ".join(f"{r[0]}-{r[-1]}" for r in runs)
        u, process = layout.ulysses, shard // virtual
        place = (f"rank {process}" if u == 1 else f"ranks {process * u}-{process * u + u - 1}") + (f" shard {shard}" if virtual > 1 else "")
        lines.append(f"{place}  {''.join(full if f else empty for f in filled)}  {text}")
    if layout.ring_size > SHOWN_SHARDS:
        lines.append(f"... and {layout.ring_size - SHOWN_SHARDS} more {'shards' if virtual > 1 else 'ranks'}")
    return lines


class Console:
    """The main rank's voice; on other ranks, and with ``log.console=off``, silent."""

    def __init__(self, log: LogConfig, *, enabled: bool) -> None:
        self._rich = RichConsole(quiet=not enabled or log.console == "off", highlight=False, soft_wrap=False)
        if not self._rich.is_terminal:
            self._rich = RichConsole(quiet=self._rich.quiet, highlight=False, width=WIDTH, color_system=None, force_terminal=False)
        self._moving = self._rich.is_terminal and log.console == "auto" and not self._rich.quiet
        self._every = log.every
        self._progress: Progress | None = None
        self._task = TaskID(0)
        self._pace_s: float | None = None  # smoothed seconds a step
        self._spoke_at = time.monotonic()

    @property
    def fancy(self) -> bool:
        """Whether block characters can be shown."""
        return "utf" in self._rich.encoding.lower()

    def header(self, title: str, rows: list[tuple[str, str]], ring: list[str]) -> None:
        """The panel at the start: (name, value) rows, then the picture of the ring."""
        grid = Table.grid(padding=(0, 2))
        grid.add_column(style="bold", no_wrap=True)
        grid.add_column(overflow="fold")
        for name, value in rows:
            grid.add_row(name, Text(value))
        for i, line in enumerate(ring):
            grid.add_row("ring" if i == 0 else "", Text(line, no_wrap=True, overflow="ellipsis"))
        self._rich.print(Panel(grid, title=title, title_align="left", width=min(self._rich.width, 100)))

    def note(self, text: str) -> None:
        """A line that stays."""
        self._rich.print(Text(text), soft_wrap=True)

    def start(self, step: int, last_step: int) -> None:
        """Begin the progress line: ``step`` of ``last_step`` are done."""
        if self._moving:
            columns = (TextColumn("{task.completed}/{task.total}"), BarColumn(bar_width=14), TextColumn("{task.description}"))
            self._progress = Progress(*columns, console=self._rich, auto_refresh=False)
            self._progress.start()
            self._task = self._progress.add_task("first step ...", total=last_step, completed=step)

    def step(self, record: dict[str, Any], last_step: int) -> None:
        """Show one step's metrics."""
        seconds = record["step_s"]
        self._pace_s = seconds if self._pace_s is None else 0.9 * self._pace_s + 0.1 * seconds
        left = f"{clock((last_step - record['step']) * self._pace_s)} left"
        numbers = f"loss {record['loss']:.4f}  {short(record['tokens_per_s'])} tok/s  {record['mem_gib']:.2f} GiB"
        if self._progress is not None:
            self._progress.update(self._task, completed=record["step"], description=f"{numbers}  {left}")
            self._progress.refresh()
        elif record["step"] % self._every == 0 or record["step"] == last_step:
            self.note(f"step {record['step']:>6}/{last_step}  {numbers}  norm {record['grad_norm']:.2f}  {left}")

    def validation(self, record: dict[str, Any], rows: int) -> None:
        """Show a validation."""
        per_byte = "" if record["val_nats_per_byte"] == record["val_loss"] else f" ({record['val_nats_per_byte']:.4f} nats a byte)"
        self.note(f"step {record['step']:>6}  validation loss {record['val_loss']:.4f}{per_byte} over {rows} rows")

    def stop(self) -> None:
        """End the progress line."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None
