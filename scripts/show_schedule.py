"""Draws the hop schedule of a config: who holds which positions, who works on whose keys at each hop, what is sent. Starts nothing.

    python scripts/show_schedule.py parallel.ring=8 parallel.layout=zigzag train.seq_len=65536 "model.windows=[4096,0]"
    python scripts/show_schedule.py parallel.ring=8 train.seq_len=8192 --documents 3000,3000,1000 --out schedule.svg

Takes training's keys; parallel.ring (8 unless given) x parallel.virtual is the ring. Rows are padded as in training. The layouts balanced
and auto are planned for --documents (without it: one document).
A cell OWNER:SHARE says whose keys, and how much of the busiest cell's work it is. --documents: lengths; a rest is padding.
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path

import torch
import torch.nn.functional as F

from ringattn.compose import compose_keys
from ringattn.config import ConfigError, from_dict
from ringattn.ring.ring import Ring
from ringattn.ring.schedule import make_schedule
from ringattn.train import config_folder
from ringattn.training.charts import svg
from ringattn.training.console import picture
from ringattn.training.header import padding_rows
from ringattn.training.placement import Placement
from ringattn.training.ring_picture import draw_holders, draw_hops, hop_lines
from ringattn.typed import Problems


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("keys", nargs="*", metavar="key=value", help="training's keys")
    parser.add_argument("--documents", metavar="N,N,...", help="lengths of packed documents")
    parser.add_argument("--out", type=Path, help="write the picture here as well (.svg)")
    args = parser.parse_args()
    try:
        show(args.keys, args.documents, args.out)
    except (ConfigError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def show(keys: list[str], lengths: str | None, out: Path | None) -> None:
    """Print the schedule of each distinct window, and write the picture."""
    problems = Problems()
    raw = compose_keys(keys, config_folder(), problems)
    mesh = raw["parallel"]
    if mesh.get("ring") is None:
        mesh["ring"] = 8
    sizes = [mesh.get(k) for k in ("ring", "shard", "replicate", "ulysses")]
    world_size = math.prod(sizes) if all(isinstance(s, int) for s in sizes) else 1
    raw["train"]["rows"] = sizes[1] * sizes[2] if world_size > 1 else raw["train"]["rows"]  # rows do not matter here
    raw["train"]["micro_rows"] = 1
    config = from_dict(raw, world_size=world_size, problems=problems)
    p, seq_len = config.parallel, config.padded_len(world_size)
    documents = document_ids(str(config.train.seq_len) if lengths is None else lengths, config.train.seq_len)
    documents = F.pad(documents, (0, seq_len - config.train.seq_len), value=-1)
    ring = Ring(virtual=config.ring_processes(world_size) * p.virtual, inner=p.inner)
    size = ring.size
    layout = Placement(config, config.model, ring, seq_len).layout(documents)

    print(f"{layout.kind}, {seq_len:,} positions, {size} shards of {layout.shard_len:,}")
    for _, words in padding_rows(config.train.seq_len, seq_len):
        print(words)
    print("\n".join(picture(layout, p.virtual, fancy="utf" in (sys.stdout.encoding or "").lower())))
    pictures = [draw_holders(layout, p.virtual)]
    for window in config.model.distinct_windows:
        schedule = make_schedule(layout, ring, window=window or None, documents=documents, exchange=p.exchange)
        name = f"window {window:,}" if window else "full causal attention"
        print("", name, *hop_lines(schedule, p.virtual), sep="\n")
        pictures.append(draw_hops(schedule, f"who works on what: {name}", p.virtual))
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(stack(pictures, f"ring schedule: {layout.kind}"))
        print(f"\nwrote {out}")


def document_ids(lengths: str, seq_len: int) -> torch.Tensor:
    """3,2 -> 0 0 0 1 1 and -1 up to ``seq_len``. Raises ValueError if they are no lengths or too long."""
    words = lengths.split(",")
    if not all(w.strip().isdigit() and int(w) > 0 for w in words):
        raise ValueError(f"--documents={lengths}: must be lengths of at least 1, with commas between them")
    numbers = [int(w) for w in words]
    if sum(numbers) > seq_len:
        raise ValueError(f"--documents={lengths}: {sum(numbers)} tokens do not fit into train.seq_len={seq_len}")
    ids = torch.full((seq_len,), -1)
    ids[: sum(numbers)] = torch.arange(len(numbers)).repeat_interleave(torch.tensor(numbers))
    return ids


def stack(pictures: list[str], label: str) -> str:
    """SVG elements one below the other, as one file."""
    y, width, parts = 0.0, 0.0, []
    for drawn in pictures:
        w, h = map(float, drawn.split('viewBox="0 0 ', 1)[1].split('"', 1)[0].split())
        inner = drawn.split(">", 1)[1].rsplit("</svg>", 1)[0]
        parts.append(f'<g transform="translate(0 {y:g})">{inner}</g>')
        y, width = y + h + 8, max(width, w)
    return svg(width, y, parts, label, alone=True)


if __name__ == "__main__":
    sys.exit(main())
