"""A plan as text and as a picture. Everything fits into 80 columns (but the command line that starts it, which is one line to copy)."""

from __future__ import annotations

from pathlib import Path

from ringattn.cost import GIB, Machine, Memory
from ringattn.planner import Plan

CELLS = 56
COLORS = {
    "weights": "#4477aa", "gradients": "#66ccee", "optimizer": "#228833", "gathered": "#ccbb44", "activations": "#ee6677",
    "transient": "#aa3377", "kv_buffers": "#bbbbbb", "logits": "#997700", "batch": "#555555",
    "workspace": "#dddddd",
}
LETTERS = dict(zip(COLORS, "WGOgATKLBS", strict=True))


def memory_bar(memory: Memory, machine: Machine | None) -> list[str]:
    """A bar of letters, one part each, and a line for each part: GiB and share of what is usable."""
    whole = max(machine.usable_bytes, memory.peak) if machine else memory.peak
    bar, done = "", 0.0
    for part, size in memory.parts.items():
        done += size
        bar += LETTERS[part] * (round(done / whole * CELLS) - len(bar))
    lines = [f"  |{bar.ljust(CELLS, '.')}| {memory.peak / GIB:.1f} of {whole / GIB:.1f} GiB"]
    for part in memory.largest:
        if memory.parts[part] > 0.002 * memory.peak:
            lines.append(f"  {LETTERS[part]} {part:<12} {memory.parts[part] / GIB:8.2f} GiB  {memory.parts[part] / whole:5.1%}")
    return lines


def report(p: Plan) -> str:
    """All that the planner has to say about a plan."""
    w, t, m = p.work, p.time, p.machine
    lines = [
        f"{w.model.name}: {w.model.parameters() / 1e9:.2f}B parameters, {w.model.layers} layers, vocabulary {w.model.vocab_size}",
        f"{w.gpus} x {m.name} ({m.source or 'measured'})",
        "",
        f"context     {w.seq_len:,} tokens, {w.rows} row{'s' * (w.rows > 1)} a step, {w.micro_batches} at a time a rank",
        f"mesh        ring {w.ring} x ulysses {w.ulysses} x shard {w.shard} x replicate {w.replicate}, virtual {w.virtual}",
        f"layout      {w.layout}, exchange {w.exchange}, {w.tokens:,} tokens a rank",
        f"activation  {w.policy}, ffn_chunk {w.model.ffn_chunk}, loss_chunk {w.model.loss_chunk}",
        "",
        f"memory      {p.memory.peak / GIB:.1f} GiB a GPU at its highest ({p.memory.phase}), "
        f"{abs(m.usable_bytes - p.memory.peak) / GIB:.1f} GiB {'free' if p.fits else 'TOO MUCH'}",
        *memory_bar(p.memory, m),
        "",
        f"step        {seconds(t.total_s)}, {p.tokens_per_s:,.0f} tokens/s, MFU {p.mfu:.1%} (visible pairs)"
        + ("; launches of the host are what takes the time" if t.host_bound else ""),
    ]
    for part, time_s in sorted(t.device.items(), key=lambda item: -item[1]):
        if time_s > 0.005 * t.device_s:
            lines.append(f"  {part:<22} {seconds(time_s):>10}  {time_s / t.device_s:5.1%}")
    if w.ring > 1:
        for name, hop in (("overlap     forward hop ", t.forward_hop), ("            backward hop", t.backward_hop)):
            lines.append(f"{name} {hop.compute_s * 1e3:.2f} ms over {hop.transfer_s * 1e3:.2f} ms of messages: margin {hop.margin:.1f}")
    return "\n".join([*lines, "", "start it with", "  " + p.command])


def seconds(time_s: float) -> str:
    """A duration in the unit that suits it."""
    if time_s < 1:
        return f"{time_s * 1e3:.1f} ms"
    return f"{time_s:.2f} s" if time_s < 600 else f"{time_s / 60:.1f} min"


def draw(plans: list[Plan], path: Path) -> None:
    """Memory by part of each plan as a bar, beside what the GPU has, as a picture file."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 1.6 + 0.7 * len(plans)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    names = [f"{p.work.model.name}, {p.work.seq_len:,} tokens\n{p.work.gpus} x {p.machine.name}, {p.work.policy}" for p in plans]
    left = [0.0] * len(plans)
    for part, color in COLORS.items():
        sizes = [p.memory.parts[part] / GIB for p in plans]
        if any(size > 0.01 for size in sizes):
            axes.barh(names, sizes, left=left, color=color, label=part)
            left = [a + b for a, b in zip(left, sizes, strict=True)]
    axes.axvline(plans[0].machine.usable_bytes / GIB, color="black", linestyle="--", label="usable")
    axes.set_xlabel("GiB a GPU")
    axes.invert_yaxis()
    axes.legend(ncols=5, fontsize=8, loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False)
    figure.savefig(path, dpi=110)
