"""Times the tiled PyTorch kernel beside torch's scaled_dot_product_attention on this machine's CPU, interleaved, forward + backward.

    python scripts/bench_cpu_kernel.py [--seq-len 2048] [--out runs/bench_cpu_kernel]

fp32 and bf16, causal and full, batch 1, 8 heads of 64 (and 8:2 grouped).
Writes JSON and a picture; prints the ratio ours / torch (lower is better).
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch
from einops import rearrange
from torch.nn.functional import scaled_dot_product_attention

from ringattn import flash_attention


def step(attention, q, k, v, dout) -> float:
    """Seconds of one forward and backward."""
    start = time.perf_counter()
    torch.autograd.grad(attention(q, k, v), (q, k, v), dout)
    return time.perf_counter() - start


def measure(seq_len: int, heads: int, kv_heads: int, causal: bool, dtype: torch.dtype, repeats: int) -> dict[str, float]:
    """Median seconds of ours and torch's, alternating in one run."""
    q = torch.randn(1, seq_len, heads, 64, dtype=dtype, requires_grad=True)
    k, v = (torch.randn(1, seq_len, kv_heads, 64, dtype=dtype, requires_grad=True) for _ in range(2))
    dout = torch.randn_like(q)

    def sdpa(q, k, v):
        q, k, v = (rearrange(x, "b s h d -> b h s d") for x in (q, k, v))
        out = scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=heads != kv_heads)
        return rearrange(out, "b h s d -> b s h d")

    times: dict[str, list[float]] = {"ours": [], "torch": []}
    for i in range(repeats + 1):
        for name, fn in (("ours", lambda *a: flash_attention(*a, causal=causal, kernel="torch")), ("torch", sdpa)):
            seconds = step(fn, q, k, v, dout)
            if i:  # the first round warms up
                times[name].append(seconds)
    return {name: statistics.median(t) for name, t in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seq-len", type=int, default=2048)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--out", type=Path, default=Path("runs/bench_cpu_kernel"))
    args = parser.parse_args()
    rows = []
    for dtype in (torch.float32, torch.bfloat16):
        for kv_heads in (8, 2):
            for causal in (True, False):
                times = measure(args.seq_len, 8, kv_heads, causal, dtype, args.repeats)
                rows.append({
                    "seq_len": args.seq_len, "heads": 8, "kv_heads": kv_heads, "head_dim": 64, "causal": causal,
                    "dtype": str(dtype).removeprefix("torch."), "ours_s": times["ours"], "torch_s": times["torch"],
                    "ratio": times["ours"] / times["torch"],
                })
                line = "{dtype:9} kv_heads {kv_heads} causal {causal!s:5}  ours {ours_s:.3f} s  torch {torch_s:.3f} s  ratio {ratio:.2f}"
                print(line.format(**rows[-1]))
    args.out.mkdir(parents=True, exist_ok=True)
    record = {"torch": torch.__version__, "threads": torch.get_num_threads(), "rows": rows}
    (args.out / "bench.json").write_text(json.dumps(record, indent=1))
    labels = [f"{r['dtype']}\n8:{r['kv_heads']} {'causal' if r['causal'] else 'full'}" for r in rows]
    figure, axes = plt.subplots(figsize=(9, 4), layout="constrained")
    axes.bar(labels, [r["ratio"] for r in rows], color="#4477aa")
    axes.axhline(1.0, color="black", linewidth=1)
    axes.set_ylabel("time, ours / torch SDPA")
    axes.set_title(f"Tiled PyTorch kernel on CPU, S = {args.seq_len}, forward + backward")
    figure.savefig(args.out / "bench.png", dpi=120)
    print(f"wrote {args.out}/bench.json and bench.png")


if __name__ == "__main__":
    main()
