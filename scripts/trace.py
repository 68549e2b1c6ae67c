"""What one forward and backward pass of ring attention, or one step of training, does when: a chrome trace of each rank, a picture of all.

    python scripts/trace.py --processes 3                                       # gloo processes on this machine
    torchrun --standalone --nproc-per-node 2 scripts/trace.py --seq-len 65536   # GPUs
    python scripts/trace.py --layout contiguous --window 512 --exchange ring
    torchrun --standalone --nproc-per-node 2 scripts/trace.py model=1b train.seq_len=65536 train.rows=1   # a step of training

With training's keys (any of them) it is the fifth step of that run, which writes no checkpoint.
Writes to --out: rank<r>.json for chrome://tracing or ui.perfetto.dev (torch.profiler, each post and wait named by pass, hop and content),
timeline.json (milliseconds), and timeline.png: for each rank, above, computation and the waits that interrupt it; below, transfers from
post to arrival. A measurement without the profiler gives the picture, because a profiler takes time itself.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from ring_cases import Ours, Problem, add_arguments, run_processes

from ringattn.compose import compose_keys
from ringattn.config import from_dict
from ringattn.ring.timeline import Timeline, measure
from ringattn.ring.transport import Note
from ringattn.train import config_folder
from ringattn.training.loop import train_step
from ringattn.training.run import assemble
from ringattn.training.stop import StopSignals

MOST_LABELS = 40
COLORS = {"kv": "#4477aa", "dkv": "#ee8866"}


class Labels(Timeline):
    """Names posts and waits in the profiler's trace instead of measuring them."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device, [])
        self._open: list[torch.profiler.record_function] = []

    def enter(self, state: str, note: Note) -> None:
        label = torch.profiler.record_function(f"{state} {note.what}, {note.direction} hop {note.hop}")
        label.__enter__()
        self._open.append(label)

    def leave(self, state: str, note: Note) -> None:
        self._open.pop().__exit__(None, None, None)


class TrainingStep:
    """A run of training: ``step()`` is one optimizer step of it."""

    def __init__(self, keys: list[str], device: torch.device, out: Path) -> None:
        quiet = {"checkpoint.keep": 0, "train.val_every": 0, "log.report": False, "log.tensorboard": False, "log.console": "off"}
        quiet |= {"log.every": 10**9, "log.dir": str(out), "name": "traced-run", "resume": "never", "device": device.type}
        set_keys = [f"{k}={str(v).lower() if isinstance(v, bool) else v}" for k, v in quiet.items()]
        if not dist.is_initialized():
            dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo", store=dist.HashStore(), rank=0, world_size=1)
        config = from_dict(compose_keys([*keys, *set_keys], config_folder()), world_size=dist.get_world_size())
        self.run = assemble(config, device)
        self.all_of_it, self.name = self.run.mesh.ring, f"a step of {config.model.name}, {self.run.mesh.ring}"
        self.seq_len = config.train.seq_len

    def step(self) -> None:
        train_step(self.run, StopSignals())
        self.run.step += 1

    def close(self) -> None:
        self.run.close()


def main(device: torch.device, args: argparse.Namespace) -> None:
    rank = dist.get_rank() if dist.is_initialized() else 0
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    case: Ours | TrainingStep
    if args.keys:
        case = TrainingStep(args.keys, device, args.out)
        title = f"{case.name}, rows of {case.seq_len} tokens"
    else:
        problem = Problem(args.seq_len, args.heads, args.kv_heads, args.head_dim, not args.full, args.window, args.documents, dtype)
        options = {name: getattr(args, name) for name in ("layout", "exchange", "transport", "virtual", "wire")}
        case = Ours(problem, device, args.kernel, **options)
        title = f"{case.name}, {args.seq_len} tokens in all, one forward and backward pass"
    for _ in range(4 if args.keys else 3):
        case.step()

    def meet() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        if dist.is_initialized():
            dist.all_reduce(torch.zeros(1, device=device))

    meet()
    with measure(case.all_of_it, device) as timeline:  # the clock starts here, on all ranks together
        case.step()
        end_ms = timeline.now_ms()
    spans = [s._asdict() | {"note": s.note._asdict()} for s in timeline.spans()]
    own = {"rank": rank, "end_ms": end_ms, "summary": timeline.summary(), "transfers": spans}

    args.out.mkdir(parents=True, exist_ok=True)
    activities = [torch.profiler.ProfilerActivity.CPU] + [torch.profiler.ProfilerActivity.CUDA] * (device.type == "cuda")
    meet()
    with torch.profiler.profile(activities=activities) as profiler:
        case.all_of_it.timeline = Labels(device)
        with torch.profiler.record_function("training step" if args.keys else "forward and backward"):
            case.step()
        case.all_of_it.timeline = None
        meet()
    profiler.export_chrome_trace(str(args.out / f"rank{rank}.json"))

    everyone: list[Any] = [own]
    if dist.is_initialized():
        everyone = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, own)
    if rank == 0:
        (args.out / "timeline.json").write_text(json.dumps(everyone, indent=1))
        picture(everyone, args.out / "timeline.png", title)
        for r in everyone:
            line = "rank {rank}: {end_ms:.2f} ms, of which {comm_exposed_ms:.3f} ms waiting; {comm_hidden_pct:.1f} % of transfers hidden"
            print(line.format(**r, **r["summary"]))
        print(f"wrote {args.out}/rank*.json, timeline.json and timeline.png")
    if isinstance(case, TrainingStep):
        case.close()


def picture(ranks: list[dict[str, Any]], path: Path, title: str) -> None:
    """Two lanes a rank: computation and waits; transfers."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.patches import Patch

    figure, axes = plt.subplots(figsize=(12, 1.2 + 1.1 * len(ranks)), layout="constrained")
    for row, r in enumerate(ranks):
        base = -2.6 * row
        axes.broken_barh([(0.0, r["end_ms"])], (base, 0.9), color="#cccccc")
        for t in r["transfers"]:
            kind = "dkv" if "dkv" in t["note"]["what"] else "kv"
            lane = base - (0.55 if kind == "kv" else 1.05)
            axes.broken_barh([(t["posted_ms"], t["usable_ms"] - t["posted_ms"])], (lane, 0.42), color=COLORS[kind], edgecolor="white")
            axes.broken_barh([(t["waited_ms"], t["usable_ms"] - t["waited_ms"])], (base, 0.9), color="#cc3311")
            middle = (t["posted_ms"] + t["usable_ms"]) / 2
            label = f"{t['note']['direction'][0]}{t['note']['hop']}"
            if len(r["transfers"]) <= MOST_LABELS:
                axes.text(middle, lane + 0.2, label, fontsize=6, ha="center", va="center", color="white")
    axes.set_yticks([-2.6 * i for i in range(len(ranks))], [f"rank {r['rank']}" for r in ranks])
    axes.set_xlabel("ms since all ranks met")
    axes.set_title(title, fontsize=10)
    names = {
        "computation": "#cccccc", "waiting": "#cc3311", "kv, from post to use (f1: forward, hop 1)": COLORS["kv"],
        "dkv, from post to use": COLORS["dkv"],
    }
    handles = [Patch(color=color, label=name) for name, color in names.items()]
    axes.legend(handles=handles, fontsize=8, ncol=4, loc="upper left", bbox_to_anchor=(0, -0.12))
    figure.savefig(path, dpi=120)
    plt.close(figure)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("keys", nargs="*", metavar="key=value", help="training's keys: trace a step of training")
    parser.add_argument("--seq-len", type=int, default=3072, help="tokens in all")
    parser.add_argument("--layout", default="zigzag")
    parser.add_argument("--exchange", default="ring")
    parser.add_argument("--transport", default="p2p")
    add_arguments(parser, heads=8, kv_heads=2, head_dim=64, out="runs/trace")
    parser.set_defaults(processes=min(2, torch.cuda.device_count() or 2))
    return parser.parse_args()


if __name__ == "__main__":
    arguments = parse()
    run_processes(main, arguments.processes, arguments)
