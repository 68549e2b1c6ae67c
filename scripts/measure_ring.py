"""What a ring costs and how exact it is, measured on one device (a GPU, or a CPU with smaller sizes):

    python scripts/measure_ring.py [--kernel auto] [--out runs/measure_ring]

1. error     16-bit attention over W = 1 .. 64 virtual shards against dense fp64: it must not grow with W
2. memory    peak memory of one rank of a ring of W beyond its inputs, rows a rank fixed: it must not depend on W
3. host      host time of a hop of one rank, everything but kernel and wire: the kernel does nothing, transfers go nowhere

Prints tables, writes measure_ring.json to --out. Exits with 1 where an error grows by more than a tenth or memory grows with W from 4 on
(at W = 2 one buffer of dK / dV less is needed).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ringattn import Layout, Ring, flash_attention, make_schedule, ring_attention
from ringattn.kernels.contract import Kernel
from ringattn.ring.alone import IdleKernel, lone_rank
from ringattn.ring.hops import backward_hops, forward_hops

NAMES = ("out", "dq", "dk", "dv")


def measure_errors(device: torch.device, kernel: str) -> list[dict[str, Any]]:
    """Relative errors in the norm, a row for each W."""
    seq_len = 8192 if device.type == "cuda" else 1024
    shapes = [(1, seq_len, heads, 128 if device.type == "cuda" else 32) for heads in (4, 2, 2, 4)]
    q, k, v, dout = (torch.randn(shape, device=device, dtype=torch.bfloat16) for shape in shapes)
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    gold = flash_attention(*leaves, kernel="reference")
    assert isinstance(gold, Tensor)
    wanted = [gold.detach(), *torch.autograd.grad(gold, leaves, dout.double())]
    del gold, leaves
    rows: list[dict[str, Any]] = []
    for w in (1, 2, 4, 8, 16, 32, 64):
        ring, layout = Ring(virtual=w), Layout("zigzag", seq_len, w)
        local = [layout.shard(x, ring).requires_grad_() for x in (q, k, v)]
        out = ring_attention(*local, ring=ring, layout=layout, kernel=kernel)
        assert isinstance(out, Tensor)
        grads = torch.autograd.grad(out, local, layout.shard(dout, ring))
        got = [layout.unshard(x, ring) for x in (out.detach(), *grads)]
        errors = {n: ((x.double() - y).norm() / y.norm()).item() for n, x, y in zip(NAMES, got, wanted, strict=True)}
        rows.append({"w": w, "seq_len": seq_len, **errors})
    return rows


def measure_memory(device: torch.device, kernel: str) -> list[dict[str, Any]]:
    """Peak MiB beyond the inputs, a row for each W; on a CPU nothing is measured (tests/ring/test_hops.py counts there)."""
    if device.type != "cuda":
        return []
    rows_a_rank, result = 8192, []
    shapes = [(1, rows_a_rank, heads, 128) for heads in (32, 8, 8, 32)]
    q, k, v, dout = (torch.randn(shape, device=device, dtype=torch.bfloat16) for shape in shapes)
    for w in (1, 2, 4, 8, 16):
        schedule = make_schedule(Layout("zigzag", rows_a_rank * w, w), lone_rank(w), device=device)
        row: dict[str, Any] = {"w": w, "rows_a_rank": rows_a_rank}
        arguments = (None, schedule.handle, 128**-0.5, 0.0, kernel, False)
        out, lse = torch.ops.ringattn.ring_forward(q, k, v, *arguments)
        torch.ops.ringattn.ring_backward(dout, None, q, k, v, out, lse, *arguments)  # (compiles, and fills the schedule's tables)
        for name, op, inputs in (
            ("forward", torch.ops.ringattn.ring_forward, (q, k, v)),
            ("backward", torch.ops.ringattn.ring_backward, (dout, None, q, k, v, out, lse)),
        ):
            torch.cuda.synchronize(device)
            torch.cuda.reset_peak_memory_stats(device)
            before = torch.cuda.memory_allocated(device)
            kept = op(*inputs, *arguments)
            torch.cuda.synchronize(device)
            row[f"{name}_mib"] = (torch.cuda.max_memory_allocated(device) - before) / 2**20
            del kept
        result.append(row)
        del out, lse
    return result


def measure_host(device: torch.device) -> dict[str, float]:
    """Microseconds of the host: a hop (the slope between two ring sizes), and a pass of a ring of one."""
    rows, idle = 512, IdleKernel()
    shapes = [(1, rows, heads, 64) for heads in (8, 2, 2, 8)]
    q, k, v, dout = (torch.randn(shape, device=device, dtype=torch.bfloat16) for shape in shapes)
    found: dict[int, tuple[float, float]] = {}
    for w in (1, 17):
        schedule = make_schedule(Layout("zigzag", rows * w, w), lone_rank(w), device=device)
        out, lse = torch.zeros_like(q), torch.zeros(1, 8, rows, device=device)
        kernel: Kernel = idle

        def forward(schedule=schedule, kernel=kernel, out=out, lse=lse) -> None:
            forward_hops(kernel, q, k, v, None, schedule, 0.125, None, out, lse)

        def backward(schedule=schedule, kernel=kernel, out=out, lse=lse) -> None:
            backward_hops(kernel, q, k, v, out, dout, lse, None, schedule, 0.125, None, with_delta=False)

        found[w] = (host_us(forward, device), host_us(backward, device))
    (forward_1, backward_1), (forward_17, backward_17) = found[1], found[17]
    return {
        "forward_hop_us": (forward_17 - forward_1) / 16, "backward_hop_us": (backward_17 - backward_1) / 16,
        "forward_pass_of_one_us": forward_1, "backward_pass_of_one_us": backward_1,
    }


def host_us(run: Any, device: torch.device) -> float:
    """Median microseconds until the host is free again."""
    times = []
    for i in range(60):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        begun = time.perf_counter()
        run()
        if i >= 10:
            times.append((time.perf_counter() - begun) * 1e6)
    return statistics.median(times)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernel", default="auto")
    parser.add_argument("--out", type=Path, default=Path("runs/measure_ring"))
    args = parser.parse_args()
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    torch.manual_seed(0)
    args.out.mkdir(parents=True, exist_ok=True)
    found: dict[str, Any] = {"device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu", "torch": torch.__version__}

    def write(name: str, what: Any) -> None:
        found[name] = what
        (args.out / "measure_ring.json").write_text(json.dumps(found, indent=1))

    write("host", measure_host(device))
    print("host time, us: " + ", ".join(f"{k.removesuffix('_us').replace('_', ' ')} {x:.1f}" for k, x in found["host"].items()), flush=True)
    write("memory", measure_memory(device, args.kernel))
    for row in found["memory"]:
        print(f"W = {row['w']:2}: {row['rows_a_rank']} rows a rank, beyond the inputs "
              f"forward {row['forward_mib']:7.1f} MiB, backward {row['backward_mib']:7.1f} MiB", flush=True)  # fmt: skip
    write("errors", measure_errors(device, args.kernel))
    for row in found["errors"]:
        print(f"W = {row['w']:2}: relative error of " + ", ".join(f"{n} {row[n]:.2e}" for n in NAMES), flush=True)
    one, grown = found["errors"][0], [r["backward_mib"] for r in found["memory"] if r["w"] >= 4]
    failures = [f"error of {n} at W = {r['w']}" for r in found["errors"] for n in NAMES if r[n] > 1.1 * one[n]]
    failures += ["memory grows with W"] if grown and max(grown) > 1.01 * min(grown) else []
    print("; ".join(failures) or "error and memory do not grow with W")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
