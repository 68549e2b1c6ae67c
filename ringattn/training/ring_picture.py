"""The ring as pictures and as text, from a real schedule: who holds which positions, and who works on what at each hop.

W shards, L rows a shard.
"""

from __future__ import annotations

import numpy as np

from ringattn.ring.layout import Layout
from ringattn.ring.ring import Ring
from ringattn.ring.schedule import Schedule
from ringattn.training.charts import svg, text

SHOWN = 16  # shards and hops drawn; a larger ring is said to be larger
MAX_CHUNKS = 512  # drawn in full; beyond that the first ones, enlarged


class PicturedRing(Ring):
    """All ``size`` shards in this process, whether or not torch.distributed is up: for schedules that are only looked at."""

    def __init__(self, size: int, inner: int | None = None) -> None:
        super().__init__(virtual=size)
        self.inner = inner
        self.group, self.processes, self.rank, self.size, self.shards = None, 1, 0, size, range(size)


def colour(shard: int, size: int) -> str:
    """A shard's colour: dark enough for white letters on it, visible on light and dark paper."""
    return f"hsl({(212 + 360 * shard / size) % 360:.0f} 52% 41%)"


def shard_name(shard: int, virtual: int) -> str:
    """``rank 3``, or ``rank 1 shard 3`` where a rank plays several."""
    return f"rank {shard // virtual}" + (f" shard {shard}" if virtual > 1 else "")


def draw_holders(layout: Layout, virtual: int = 1, *, alone: bool = False) -> str:
    """Positions from left to right, a row a shard; the parts that it holds are filled."""
    size, count = layout.ring_size, len(layout.owners)
    chunks = count if count <= MAX_CHUNKS else min(count, 4 * size)
    rows, left, width = min(size, SHOWN), 110, 560
    span = width - left - 16
    end = chunks * layout.chunk_len
    title = f"who holds which positions: {layout.kind}, {size} shards of {layout.shard_len:,}"
    parts = [text(12, 20, title, kind="title")]
    for shard in range(rows):
        y = 34 + 20 * shard
        parts.append(text(left - 8, y + 12, shard_name(shard, virtual), kind="soft", anchor="end"))
        parts.append(f'<rect x="{left}" y="{y}" width="{span}" height="16" fill="var(--grid)"/>')
        for first, length in _runs(np.flatnonzero(layout.owners[:chunks] == shard)):
            x, w = left + span * first / chunks, max(1.0, span * length / chunks)
            parts.append(f'<rect x="{x:.1f}" y="{y}" width="{w:.1f}" height="16" fill="{colour(shard, size)}"/>')
    y = 34 + 20 * rows + 12
    parts += [text(left, y, "0", kind="soft"), text(left + span, y, f"{end:,}", kind="soft", anchor="end")]
    notes = [f"the first {end:,} of {layout.seq_len:,} positions, enlarged"] if chunks < count else []
    notes += [f"{size - rows} more shards not drawn"] if size > rows else []
    if notes:
        y += 16
        parts.append(text(left, y, "; ".join(notes), kind="soft"))
    return svg(width, y + 10, parts, title, alone=alone)


def draw_hops(schedule: Schedule, title: str, virtual: int = 1, *, alone: bool = False) -> str:
    """A row a shard, a column a hop: whose keys it works on, and how much of the busiest cell's work that is."""
    work, size = schedule.work, schedule.layout.ring_size
    hops, rows = min(len(work), SHOWN), min(size, SHOWN)
    left, cell, height = 110, max(40, min(92, (1000 - 126) // hops)), 26
    width = max(560, left + cell * hops + 16)
    most = max(1.0, float(work.max()))
    parts = [text(12, 20, title, kind="title")]
    for hop in range(hops):
        parts.append(text(left + cell * (hop + 0.5), 42, f"hop {hop}", kind="soft", anchor="middle"))
    for shard in range(rows):
        y = 50 + (height + 4) * shard
        parts.append(text(left - 8, y + 17, shard_name(shard, virtual), kind="soft", anchor="end"))
        for hop in range(hops):
            x, share = left + cell * hop + 2, float(work[hop, shard]) / most
            parts.append(f'<rect x="{x}" y="{y}" width="{cell - 4}" height="{height}" rx="3" fill="var(--grid)"/>')
            if share <= 0:
                parts.append(text(x + (cell - 4) / 2, y + 17, "idle", kind="soft", anchor="middle"))
                continue
            owner = schedule.origin(shard, hop)
            gathered = schedule.exchange == "allgather"
            name, shade = ("all keys", shard) if gathered else (f"keys {owner}", owner)
            bar = f'height="6" rx="2" fill="{colour(shade, size)}"'
            parts.append(f'<rect x="{x}" y="{y + height - 6}" width="{max(2.0, (cell - 4) * share):.1f}" {bar}/>')
            parts.append(text(x + (cell - 4) / 2, y + 15, f"{name}, {share:.0%}" if cell >= 84 else name.split()[-1], anchor="middle"))
    y = 50 + (height + 4) * rows + 14
    parts.append(text(left - 8, y, "then sent", kind="soft", anchor="end"))
    for hop in range(min(len(schedule.kv), hops)):
        parts.append(text(left + cell * (hop + 0.5), y, f"{schedule.kv[hop].rows:,} rows", kind="soft", anchor="middle"))
    y += 18
    parts.append(text(left, y, "; ".join(summary(schedule)), kind="soft"))
    if size > rows or len(work) > hops:
        y += 16
        parts.append(text(left, y, f"the first {rows} of {size} shards and {hops} of {len(work)} hops", kind="soft"))
    return svg(width, y + 12, parts, title, alone=alone)


def summary(schedule: Schedule) -> list[str]:
    """What there is to know about a schedule in a line."""
    size, work = schedule.layout.ring_size, schedule.work
    mean, slowest = float(work.sum()) / size, float(work.max(1).sum())
    facts = [f"{len(work)} of {size} hops" if schedule.exchange == "ring" else "all keys gathered at once"]
    if mean:
        facts.append(f"busy {mean / slowest:.0%} of the time" if slowest else "no work")
    full, sent = (size - 1) * schedule.layout.shard_len, sum(t.rows for t in schedule.kv)
    if schedule.exchange == "ring" and size > 1:
        facts.append(f"{sent / full:.0%} of the KV of a whole turn is sent")
    return facts


def hop_lines(schedule: Schedule, virtual: int = 1) -> list[str]:
    """The same as text: a line a shard, each hop as <owner of the keys>:<share of the busiest cell's work>."""
    work, size = schedule.work, schedule.layout.ring_size
    most, hops, rows = max(1.0, float(work.max())), min(len(work), SHOWN), min(size, SHOWN)
    name = len(shard_name(rows - 1, virtual))
    lines = [" " * name + "".join(f"{f'hop {h}':>9}" for h in range(hops))]
    for shard in range(rows):
        cells = []
        for hop in range(hops):
            origin = "all" if schedule.exchange == "allgather" else str(schedule.origin(shard, hop))
            cells.append(f"{origin}:{work[hop, shard] / most:.0%}" if work[hop, shard] else "-")
        lines.append(f"{shard_name(shard, virtual):<{name}}" + "".join(f"{c:>9}" for c in cells))
    if schedule.kv:
        lines.append(f"{'sent':<{name}}" + "".join(f"{t.rows:>9}" for t in schedule.kv[:hops]))
    if size > rows or len(work) > hops:
        lines.append(f"(the first {rows} of {size} shards and {hops} of {len(work)} hops)")
    return [*lines, "; ".join(summary(schedule))]


def _runs(numbers: np.ndarray) -> list[tuple[int, int]]:
    """(first, length) of each run of consecutive numbers."""
    return [(int(r[0]), len(r)) for r in np.split(numbers, np.flatnonzero(np.diff(numbers) != 1) + 1) if len(r)]
