"""Measure the machine at hand for the planner: about a minute on one GPU.

    python scripts/profile_machine.py --out machines/mine.json                           # one GPU
    torchrun --standalone --nproc-per-node 2 scripts/profile_machine.py --out mine.json  # its links too
    python scripts/plan.py machine=mine.json model=8b gpus=8

Measured: matrix products of several sizes (also those with fp32 sums), memory bandwidth, attention forward and backward by head dim
and length, copies to and from pinned host memory, and with more than one process the neighbour exchange of a ring. What a GPU costs
the host (Python and launches) is measured on steps of a model that is almost nothing but launches. The file holds the profile's
numbers (see ``ringattn.cost.Machine``) and, under ``raw``, the measurements behind them.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ringattn.cost import Machine, find_machine, machine_of


def seconds(work: Callable[[], Any], *, repeats: int = 5, enough_s: float = 0.02) -> float:
    """Median time of one call on the device: calls are batched until a sample lasts ``enough_s``."""
    work()
    torch.cuda.synchronize()
    started = time.perf_counter()
    work()
    torch.cuda.synchronize()
    batch = max(1, min(200, round(enough_s / (time.perf_counter() - started))))
    samples = []
    for _ in range(repeats):
        first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        first.record()
        for _ in range(batch):
            work()
        last.record()
        torch.cuda.synchronize()
        samples.append(first.elapsed_time(last) / 1000 / batch)
    return statistics.median(samples)


def matmuls(device: torch.device) -> list[dict[str, Any]]:
    """bf16 [M, K] x [K, N]: plain, and A^T B added to an fp32 sum (the blockwise layers' weight gradients)."""
    rows = []
    for m, k, n in (
        (8192, 768, 768), (8192, 768, 2304), (8192, 768, 4096), (8192, 2048, 768), (8192, 1024, 5632), (8192, 2048, 2048),
        (8192, 2048, 6144),
        (8192, 2048, 16384), (8192, 8192, 2048), (8192, 3072, 16384), (8192, 4096, 4096), (8192, 4096, 28672), (8192, 14336, 4096),
        (2048, 768, 50304), (2048, 2048, 100352), (2048, 4096, 128256), (32768, 768, 4096), (32768, 2048, 16384),
    ):
        a, b = (torch.randn(*s, device=device, dtype=torch.bfloat16) for s in ((m, k), (k, n)))
        c = torch.randn(m, n, device=device, dtype=torch.bfloat16)
        total = torch.zeros(n, k, device=device)
        plain = seconds(lambda a=a, b=b: a @ b)
        wide = seconds(lambda a=a, b=b: torch.mm(a, b, out_dtype=torch.float32))
        outer = seconds(lambda c=c, a=a, t=total: torch.addmm(t, c.t(), a, out_dtype=torch.float32, out=t))
        weight = seconds(lambda c=c, a=a: c.t() @ a)
        flops = 2 * m * k * n
        rows.append({"m": m, "k": k, "n": n, **{
            name: flops / s / 1e12 for name, s in (("plain", plain), ("fp32_out", wide), ("outer_fp32", outer), ("outer", weight))
        }})
    return rows


def attention(device: torch.device) -> list[dict[str, Any]]:
    """Forward and forward + backward of the public attention: TF/s of visible pairs (backward counted 2.5 x)."""
    from ringattn import flash_attention
    from ringattn.cost import visible_pairs

    rows = []
    for head_dim, heads, kv_heads in ((64, 12, 12), (64, 16, 16), (128, 16, 16), (128, 32, 8)):
        for s in (2048, 4096, 8192, 16384, 32768, 65536):
            q, k, v, dout = (
                torch.randn(1, s, h, head_dim, device=device, dtype=torch.bfloat16, requires_grad=True)
                for h in (heads, kv_heads, kv_heads, heads)
            )
            with torch.no_grad():
                forward = seconds(lambda q=q, k=k, v=v: flash_attention(q, k, v), repeats=3)

            def both(q: Any = q, k: Any = k, v: Any = v, dout: Any = dout) -> None:
                flash_attention(q, k, v).backward(dout)

            backward = seconds(both, repeats=3) - forward
            flops = 4 * visible_pairs(s) * heads * head_dim
            rows.append({
                "head_dim": head_dim, "heads": heads, "kv_heads": kv_heads, "seq_len": s,
                "forward": flops / forward / 1e12, "backward": 2.5 * flops / backward / 1e12,
            })
    return rows


def bandwidths(device: torch.device) -> dict[str, float]:
    """GB/s: reads plus writes of elementwise work on the device, and copies from and to pinned host memory."""
    x = torch.randn(2**28, device=device, dtype=torch.bfloat16)
    y = torch.empty_like(x)
    host = torch.empty(2**27, dtype=torch.bfloat16, pin_memory=True)
    part = x[: host.numel()]
    add = seconds(lambda: torch.add(x, x, out=y))
    heads, phases = x.view(-1, 16, 128)[..., :64], torch.randn(2**17, 1, 64, device=device)
    rotated = heads.numel() * (x.element_size() + phases.element_size()) + phases.nbytes
    return {
        "strided": rotated / seconds(lambda: heads * phases) / 1e9,
        "copy": 2 * x.nbytes / seconds(lambda: y.copy_(x)) / 1e9,
        "add": 2 * x.nbytes / add / 1e9,
        "to_host": host.nbytes / seconds(lambda: host.copy_(part, non_blocking=True)) / 1e9,
        "to_device": host.nbytes / seconds(lambda: part.copy_(host, non_blocking=True)) / 1e9,
    }


def links(device: torch.device) -> list[dict[str, float]]:
    """Every rank sends to the next and receives from the one before: GB/s each way, and an all-gather, GB/s of what arrives."""
    rank, world = dist.get_rank(), dist.get_world_size()
    rows = []
    for mib in (1, 4, 16, 64, 256):
        sent = torch.empty(mib * 2**20, dtype=torch.uint8, device=device)
        got = torch.empty_like(sent)
        whole = torch.empty(world * sent.numel(), dtype=torch.uint8, device=device)

        def exchange(sent: Any = sent, got: Any = got) -> None:
            ops = [dist.P2POp(dist.isend, sent, (rank + 1) % world), dist.P2POp(dist.irecv, got, (rank - 1) % world)]
            for work in dist.batch_isend_irecv(ops):
                work.wait()

        neighbour = seconds(exchange)
        gather = seconds(lambda sent=sent, whole=whole: dist.all_gather_into_tensor(whole, sent))
        rows.append({"mib": mib, "neighbour": sent.numel() / neighbour / 1e9, "gather": (world - 1) * sent.numel() / gather / 1e9})
    return rows


def host_times(device: torch.device) -> list[dict[str, Any]]:
    """Seconds of a whole training step whose device work is next to nothing: what Python and launches take."""
    from predict_check import Case, measure_steps

    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for activation in ("none", "block", "attention_saved"):
            for layers in (2, 8):
                for virtual in (1, 4):
                    case = Case("debug", layers, 512, activation, 512, virtual=virtual, head_dim=64, kernel="auto")
                    row = {"activation": activation, "layers": layers, "virtual": virtual}
                    rows.append(row | {"step_s": measure_steps(case, device, folder)})
    return rows


def machine_from(raw: dict[str, Any], name: str) -> Machine:
    """The profile that these measurements make; what they cannot tell (links of a single GPU, the network) is the nearest built-in's."""
    base = machine_of(raw["device"]) or find_machine("h200")
    by_size: dict[float, list[tuple[float, float]]] = {}
    for row in raw["matmuls"]:
        by_size.setdefault(round(math.sqrt(row["k"] * row["n"]), -3) or 768.0, []).append((row["plain"], row["outer_fp32"]))
    points = sorted((size, statistics.mean(a for a, _ in rates), statistics.mean(b for _, b in rates)) for size, rates in by_size.items())
    longest = {d: max((r for r in raw["attention"] if r["head_dim"] == d), key=lambda r: r["seq_len"]) for d in (64, 128)}
    steps = {(r["activation"], r["layers"], r["virtual"]): r["step_s"] for r in raw["host"]}
    layer_s = (steps["none", 8, 1] - steps["none", 2, 1]) / 6
    hop_s = ((steps["none", 8, 4] - steps["none", 2, 4]) / 6 - layer_s) / 15  # 4 hops of 4 shards instead of one
    widths = raw["bandwidths"]
    links = max((row["neighbour"] for row in raw.get("links", [])), default=base.link_gbs)
    return dataclasses.replace(
        base, name=name, memory_gib=raw["memory"] / 2**30, reserve_gib=(raw["memory"] - raw["free"]) / 2**30 + 1.0,
        matmul=tuple((size, plain) for size, plain, _ in points), outer=tuple((size, outer) for size, _, outer in points),
        memory_gbs=widths["add"], strided_gbs=widths.get("strided", widths["add"] / 2),
        host_gbs=min(widths["to_host"], widths["to_device"]),
        attention={d: (row["forward"], row["backward"]) for d, row in longest.items()}, link_gbs=links,
        host_step_ms=max(1.0, (steps["none", 2, 1] - 2 * layer_s) * 1e3), host_layer_ms=layer_s * 1e3, host_hop_us=max(0.0, hop_s * 1e6),
        source=f"measured on {raw['device']}, torch {raw['torch']}", raw=raw,
    )


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("machine.json"))
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("this machine (or this build of torch) has no CUDA device; built-in profiles need none: scripts/plan.py machine=h200")
    from predict_check import process_group_of_check

    raw: dict[str, Any] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    with process_group_of_check() as device:
        memory = torch.cuda.get_device_properties(device).total_memory
        raw |= {"memory": memory, "free": torch.cuda.mem_get_info(device)[0]}
        for name, part in (("bandwidths", bandwidths), ("matmuls", matmuls), ("attention", attention), ("host", host_times)):
            started = time.perf_counter()
            raw[name] = part(device)
            torch.cuda.empty_cache()
            print(f"{name}: {time.perf_counter() - started:.1f} s", flush=True)
            if dist.get_rank() == 0:
                args.out.write_text(json.dumps({"raw": raw}, indent=1))
        if dist.get_world_size() > 1:
            raw["links"] = links(device)
    if dist.is_initialized() and dist.get_rank():
        return
    machine_from(raw, args.out.stem).save(args.out)
    for name in ("bandwidths", "matmuls", "attention", "host"):
        print(name)
        for row in raw[name] if isinstance(raw[name], list) else [raw[name]]:
            print("  " + "  ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()))


if __name__ == "__main__":
    main()
