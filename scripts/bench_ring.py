"""Times ring attention, forward and backward, beside its peers, on one GPU, several GPUs, or CPU processes, all in one run, taking turns.

    torchrun --standalone --nproc-per-node 2 scripts/bench_ring.py --lengths 16384,32768,131072 --exchanges ring,allgather \
        --transports p2p,push --ulysses 1,2 --ring-flash-attn FOLDER
    python scripts/bench_ring.py --virtual 4                         # one device, a virtual ring of 4
    python scripts/bench_ring.py --processes 2 --lengths 2048        # gloo processes on this machine

Ours is every combination of --layouts, --exchanges, --transports, --ulysses and --nodes. Peers: torch context_parallel (both its
rotations), and ring-flash-attn where it is importable or --ring-flash-attn names the folder that holds it. A candidate that fails on any
rank is reported and left out. Prints for each total length: milliseconds (median over turns of the slowest rank), % = time of the whole
problem on one device with our kernel / N / time, TF/s a device (visible pairs, backward 2.5 x forward), exposed and hidden communication,
the host's time to enqueue a step, and extra peak memory. Writes ring.json and ring.png to --out.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from ring_cases import Base, Ours, Problem, RingFlashAttention, Single, TorchContextParallel, add_arguments, run_processes

from ringattn.ring.timeline import measure

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


class Ranks:
    """What the ranks tell each other between measurements. Alone, everything is its own answer."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.size = dist.get_world_size() if dist.is_initialized() else 1
        self.first = not dist.is_initialized() or dist.get_rank() == 0

    def gather(self, value: Any) -> list[Any]:
        """The value of each rank."""
        everyone = [value] * self.size
        if self.size > 1:
            dist.all_gather_object(everyone, value)
        return everyone

    def start_together(self) -> None:
        """Meet on the device, so that a step's first transfer finds its peer ready."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        if self.size > 1:
            dist.all_reduce(torch.zeros(1, device=self.device))


def seconds_of(run: Callable[[], Any], device: torch.device) -> tuple[float, float]:
    """(seconds on the device, seconds until the host was free again)."""
    if device.type == "cuda":
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        begun = time.perf_counter()
        run()
        host = time.perf_counter() - begun
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3, host
    begun = time.perf_counter()
    run()
    return time.perf_counter() - begun, time.perf_counter() - begun


def builders(args: argparse.Namespace, problem: Problem, device: torch.device, ranks: Ranks) -> dict[str, Callable[[], Base]]:
    """How to make each candidate, by the name it is reported under should that fail."""
    made: dict[str, Callable[[], Base]] = {"one device": lambda: Single(problem, device, args.kernel)}
    options = itertools.product(args.exchanges, args.layouts, args.transports, args.ulysses, args.nodes)
    for exchange, layout, transport, ulysses, inner in options:
        first = (args.exchanges[0], args.layouts[0], args.transports[0])
        if (exchange == "allgather" and transport != first[2]) or ulysses > ranks.size:
            continue
        if inner and (exchange == "allgather" or transport != "p2p" or ulysses > 1 or inner >= ranks.size * args.virtual):
            continue  # two levels are for the ring itself
        if 1 < ulysses == ranks.size and (exchange, layout, transport) != first:
            continue  # no ring is left: all of these are the same
        choice = {"layout": layout, "exchange": exchange, "transport": transport, "ulysses": ulysses, "virtual": args.virtual}
        choice |= {"wire": args.wire, "inner": inner}
        made[Ours.describe(**choice)] = lambda choice=choice: Ours(problem, device, args.kernel, **choice)
    if ranks.size > 1 and "torch" in args.peers:
        for method in ("allgather", "alltoall"):
            made[f"torch CP {method}"] = lambda method=method: TorchContextParallel(problem, device, method)
    if ranks.size > 1 and "ring-flash-attn" in args.peers:
        for variant in ("zigzag", "contiguous"):
            made[f"ring-flash-attn {variant}"] = lambda variant=variant: RingFlashAttention(problem, device, variant, args.ring_flash_attn)
    return made


def prepare(made: dict[str, Callable[[], Base]], ranks: Ranks, out_of_time: Callable[[], bool]) -> tuple[list[Base], dict[str, str]]:
    """The candidates that work on all ranks, warmed up, and the reasons of the others."""
    ready, failed = [], {}
    for name, make in made.items():
        if out_of_time():
            failed[name] = "out of time"
            continue
        candidate, reason = None, ""
        try:
            candidate = make()
        except Exception as error:
            reason = f"{type(error).__name__}: {error}".split("\n")[0][:160]
        reasons = [r for r in ranks.gather(reason) if r]  # before the first step: a rank that cannot must not leave others waiting
        if not reasons and candidate is not None:
            try:
                with candidate.around():
                    for _ in range(2):
                        candidate.step()
                ranks.start_together()
            except Exception as error:
                reason = f"{type(error).__name__}: {error}".split("\n")[0][:160]
            reasons = [r for r in ranks.gather(reason) if r]
        if reasons or candidate is None:
            failed[name] = reasons[0]
            del candidate
            if ranks.device.type == "cuda":
                torch.cuda.empty_cache()
        else:
            ready.append(candidate)
    return ready, failed


def bench(args: argparse.Namespace, problem: Problem, ranks: Ranks, out_of_time: Callable[[], bool]) -> list[dict[str, Any]]:
    """A row for each candidate."""
    device = ranks.device
    candidates, failed = prepare(builders(args, problem, device, ranks), ranks, out_of_time)
    times: dict[str, list[tuple[float, float]]] = {c.name: [] for c in candidates}
    for turn in range(args.repeats):
        if turn and out_of_time():
            break
        for c in candidates:
            with c.around():
                ranks.start_together()
                taken, host = seconds_of(lambda c=c: [c.step() for _ in range(args.inner)], device)
            times[c.name].append((taken / args.inner, host / args.inner))
    rows = []
    for c in candidates:
        row: dict[str, Any] = {"candidate": c.name, "seq_len": problem.seq_len, "devices": ranks.size}
        slowest = [max(t) for t in zip(*ranks.gather([t for t, _ in times[c.name]]), strict=True)]
        row |= {"ms": statistics.median(slowest) * 1e3, "ms_all": [t * 1e3 for t in slowest]}
        row["host_ms"] = max(ranks.gather(statistics.median(h for _, h in times[c.name]))) * 1e3
        row["tflops"] = problem.flops / (1 if isinstance(c, Single) else ranks.size) / row["ms"] / 1e9
        if device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        with c.around(), contextlib.nullcontext() if c.ring is None else measure(c.ring, device) as timeline:
            ranks.start_together()
            c.step()
        if device.type == "cuda":
            row["peak_extra_mib"] = max(ranks.gather((torch.cuda.max_memory_allocated() - before) / 2**20))
        if timeline is not None:
            summaries = ranks.gather(timeline.summary())
            row["comm_exposed_ms"] = max(s["comm_exposed_ms"] for s in summaries)
            row["comm_hidden_pct"] = min(s["comm_hidden_pct"] for s in summaries)
        rows.append(row)
    alone = next((r["ms"] for r in rows if r["candidate"] == "one device"), None)
    for row in rows:
        if alone is not None and row["candidate"] != "one device":
            row["efficiency_pct"] = 100.0 * alone / ranks.size / row["ms"]
    return rows + [{"candidate": name, "seq_len": problem.seq_len, "devices": ranks.size, "failed": why} for name, why in failed.items()]


def table(rows: list[dict[str, Any]]) -> str:
    """One line a candidate and length, the best of each length first."""
    columns = (
        ("ms", "ms", 9, 3), ("%", "efficiency_pct", 6, 1), ("TF/s", "tflops", 7, 2), ("exposed ms", "comm_exposed_ms", 10, 3),
        ("hidden %", "comm_hidden_pct", 8, 1), ("host ms", "host_ms", 8, 3), ("extra MiB", "peak_extra_mib", 9, 0),
    )
    lines = [f"{'tokens':>9} {'candidate':34} " + " ".join(f"{title:>{width}}" for title, _, width, _ in columns)]

    def number(row: dict[str, Any], key: str, width: int, digits: int) -> str:
        return f"{row[key]:{width}.{digits}f}" if key in row else " " * (width - 1) + "-"

    for row in sorted(rows, key=lambda r: (r["seq_len"], "failed" in r, -r.get("efficiency_pct", 1e9))):
        head = f"{row['seq_len']:9} {row['candidate'][:34]:34} "
        if "failed" in row:
            lines.append(head + f"left out: {row['failed']}")
            continue
        lines.append(head + " ".join(number(row, *column) for _, *column in columns))
    return "\n".join(lines)


def picture(rows: list[dict[str, Any]], path: Path, title: str) -> None:
    """% of one device's time / N over the total length, a line a candidate."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(9, 5), layout="constrained")
    done = [r for r in rows if "efficiency_pct" in r]
    for name in dict.fromkeys(r["candidate"] for r in done):
        points = [(r["seq_len"], r["efficiency_pct"]) for r in done if r["candidate"] == name]
        peer = name.startswith(("torch", "ring-flash"))
        axes.plot(*zip(*points, strict=True), marker="o", label=name, linestyle="--" if peer else "-")
    axes.axhline(100.0, color="black", linewidth=1)
    if done:
        axes.set_xscale("log")
        lengths = sorted({r["seq_len"] for r in done})
        axes.set_xticks(lengths, [f"{n // 1024}K" if n % 1024 == 0 else str(n) for n in lengths])
        axes.minorticks_off()
        axes.legend(fontsize=8)
    axes.set_xlabel("tokens in all")
    axes.set_ylabel("% of one device's time / N")
    axes.set_title(title, fontsize=10)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main(device: torch.device, args: argparse.Namespace) -> None:
    started, ranks = time.monotonic(), Ranks(device)
    small = device.type == "cpu"
    lengths = args.lengths or ([2048] if small else [16384, 32768, 131072])
    dtype = DTYPES[args.dtype or ("fp32" if small else "bf16")]

    def out_of_time() -> bool:
        return bool(ranks.gather(time.monotonic() - started > args.limit)[0])

    rows: list[dict[str, Any]] = []
    where = "CPU process" if small else torch.cuda.get_device_name()
    title = (
        f"{ranks.size} x {where}, {args.heads}:{args.kv_heads} heads of {args.head_dim}, "
        f"{str(dtype).removeprefix('torch.')}, {'full' if args.full else 'causal'}" + f", window {args.window}" * bool(args.window)
        + f", {args.documents} documents" * bool(args.documents)
    )
    for seq_len in lengths:
        if rows and out_of_time():
            rows.append({"candidate": "all", "seq_len": seq_len, "devices": ranks.size, "failed": "out of time"})
            continue
        problem = Problem(seq_len, args.heads, args.kv_heads, args.head_dim, not args.full, args.window, args.documents, dtype)
        rows += bench(args, problem, ranks, out_of_time)
        if not small:
            torch.cuda.empty_cache()
    if ranks.first:
        args.out.mkdir(parents=True, exist_ok=True)
        record = {"title": title, "torch": torch.__version__, "arguments": {k: str(v) for k, v in vars(args).items()}, "rows": rows}
        (args.out / "ring.json").write_text(json.dumps(record, indent=1))
        picture(rows, args.out / "ring.png", title)
        print(f"wrote {args.out}/ring.json and ring.png after {time.monotonic() - started:.0f} s\n{title}\n{table(rows)}", flush=True)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)

    def words(text: str) -> list[str]:
        return [w for w in text.split(",") if w]

    def numbers(text: str) -> list[int]:
        return [int(w) for w in words(text)]

    parser.add_argument("--lengths", type=numbers, default=None, help="total lengths in tokens (16384,32768,131072; on a CPU 2048)")
    add_arguments(parser, heads=16, kv_heads=16, head_dim=128, out="runs/bench_ring")
    parser.add_argument("--dtype", choices=DTYPES, default=None, help="bf16; on a CPU fp32")
    parser.add_argument("--layouts", type=words, default=["zigzag"])
    parser.add_argument("--exchanges", type=words, default=["ring"])
    parser.add_argument("--transports", type=words, default=["p2p"])
    parser.add_argument("--ulysses", type=numbers, default=[1], help="sizes of the Ulysses axis; the number of processes: no ring at all")
    parser.add_argument("--nodes", type=numbers, default=[0], help="shards a node, for rings of two levels; 0: one level")
    parser.add_argument("--peers", type=words, default=["torch", "ring-flash-attn"])
    parser.add_argument("--ring-flash-attn", default="", metavar="FOLDER", help="holds the package ring_flash_attn")
    parser.add_argument("--repeats", type=int, default=7, help="turns of each candidate")
    parser.add_argument("--inner", type=int, default=3, help="steps a turn")
    parser.add_argument("--limit", type=float, default=540.0, help="seconds after which nothing new is begun")
    return parser.parse_args()


if __name__ == "__main__":
    arguments = parse()
    run_processes(main, arguments.processes, arguments)
