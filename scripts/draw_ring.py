"""Draws docs/images/ring.png: who holds which positions, and what each shard works on at each hop, from a real schedule.

    python scripts/draw_ring.py [--out docs/images/ring.png]
"""

from __future__ import annotations

import argparse
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.patches import FancyArrowPatch, Rectangle

from ringattn import Layout, Ring, make_schedule

COLOURS = ["#4477aa", "#ee6677", "#228833", "#ccbb44"]
W, SEQ_LEN = 4, 64


def draw_holders(axes: Axes, layout: Layout) -> None:
    """Shards on a circle, each with the chunks of the sequence that it holds, KV travelling clockwise."""
    chunks = layout.owners
    length = 1.0 / len(chunks)
    for c, owner in enumerate(chunks):
        axes.add_patch(Rectangle((-1.0 + 2.0 * c * length, 1.55), 2.0 * length, 0.16, facecolor=COLOURS[owner], edgecolor="white"))
        axes.text(-1.0 + 2.0 * (c + 0.5) * length, 1.63, str(c), ha="center", va="center", color="white", fontsize=9)
    axes.text(0, 1.8, "the sequence, in chunks", ha="center", fontsize=10)
    angles = [np.pi / 2 - 2 * np.pi * w / W for w in range(W)]
    for w, angle in enumerate(angles):
        x, y = np.cos(angle), np.sin(angle)
        axes.add_patch(Rectangle((x - 0.38, y - 0.17), 0.76, 0.34, facecolor=COLOURS[w], edgecolor="none", zorder=3))
        held = " and ".join(str(c) for c in np.flatnonzero(layout.owners == w))
        axes.text(x, y + 0.055, f"GPU {w}", ha="center", va="center", color="white", fontsize=10, weight="bold", zorder=4)
        axes.text(x, y - 0.075, f"chunks {held}", ha="center", va="center", color="white", fontsize=8, zorder=4)
        start, end = angle - 0.42, angle - 2 * np.pi / W + 0.42
        arrow = FancyArrowPatch(
            (np.cos(start), np.sin(start)), (np.cos(end), np.sin(end)), connectionstyle="arc3,rad=-0.25",
            arrowstyle="-|>", mutation_scale=16, color="#555555", linewidth=1.6,
        )
        axes.add_patch(arrow)
    axes.text(0, 0, "K and V\ntravel", ha="center", va="center", fontsize=10, color="#555555")
    axes.set_xlim(-1.45, 1.45)
    axes.set_ylim(-1.3, 2.0)
    axes.set_aspect("equal")
    axes.axis("off")


def draw_hops(axes: Axes, layout: Layout) -> None:
    """One row a GPU, one column a hop: whose keys it works on, and which pairs are visible."""
    schedule = make_schedule(layout, Ring(virtual=W))
    for hop, offset in enumerate(schedule.offsets):
        for w in range(W):
            bounds, origin = schedule.bounds[hop][w], (w - offset) % W
            assert bounds is not None
            key = np.arange(layout.shard_len)
            seen = (key >= bounds.lo[0].numpy()[:, None]) & (key < bounds.hi[0].numpy()[:, None])
            picture = np.where(seen[..., None], to_rgb(COLOURS[origin]), to_rgb("#e8e8e8"))
            axes.imshow(picture, extent=(hop + 0.08, hop + 0.6, w + 0.88, w + 0.12), interpolation="nearest", aspect="auto")
            share = bounds.pairs / layout.shard_len**2
            axes.text(hop + 0.63, w + 0.5, f"keys of\nGPU {origin}\n{share:.0%}", va="center", fontsize=8)
    axes.set_xlim(0, len(schedule.offsets))
    axes.set_ylim(W, 0)
    axes.set_xticks([i + 0.5 for i in range(len(schedule.offsets))], [f"hop {i}" for i in range(len(schedule.offsets))])
    axes.set_yticks([w + 0.5 for w in range(W)], [f"GPU {w}" for w in range(W)])
    axes.tick_params(length=0)
    for side in axes.spines.values():
        side.set_visible(False)
    axes.set_title("what each GPU computes, hop by hop (rows: its queries, columns: the keys at hand)", fontsize=10)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("docs/images/ring.png"))
    args = parser.parse_args()
    layout = Layout("zigzag", SEQ_LEN, W)
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.4), width_ratios=(1, 1.5), layout="constrained")
    draw_holders(left, layout)
    draw_hops(right, layout)
    figure.suptitle("Zigzag layout, causal attention: every GPU has the same work at every hop", fontsize=11)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(args.out, dpi=130)
    print(f"wrote {args.out}")


if __name__ == "__main__":
    main()
