"""Prove the attention kernels on the GPU at hand: exactness beside torch's FlashAttention-2, over many hops, repeatability, odd sizes.

    python scripts/check_kernel.py                       # triton and, where it runs, gluon; about a minute and a half
    python scripts/check_kernel.py triton --only peers,hops

Every check draws new inputs; the seed is printed and --seed repeats it. Prints a line a check, then how many failed, which is the
exit status. Errors are relative L2 against fp64 on inputs already rounded to the dtype.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from kernel_cases import DEVICE, Ours, Problem, peer, reference, relative
from torch import Tensor

from ringattn.kernels.contract import Bounds, Kernel
from ringattn.kernels.gluon_kernel import GluonKernel
from ringattn.kernels.select import load_kernel

RESULTS = ("out", "dq", "dk", "dv")
Finding = tuple[str, bool, str]  # what, whether it holds, figures


def whole(kernel: Kernel, tensors: tuple[Tensor, ...], bounds: Bounds) -> tuple[Tensor, ...]:
    """out, dq, dk, dv of one hop, in fresh buffers."""
    q, k, v, dout = tensors
    scale = q.shape[-1] ** -0.5
    out, lse = torch.empty_like(q), torch.empty(q.shape[0], q.shape[2], q.shape[1], device=q.device)
    kernel.forward(q, k, v, bounds, None, scale=scale, first=True, out=out, lse=lse)
    grads = tuple(torch.empty_like(x) for x in (q, k, v))
    rows = kernel.prepare(out, dout, lse, None)
    kernel.backward(q, k, v, dout, rows, bounds, scale=scale, dq=grads[0], dk=grads[1], dv=grads[2], add_dq=False)
    return out, *grads


def draw(p: Problem, outliers: bool = False) -> tuple[Tensor, ...]:
    """q, k, v, dout; ``outliers``: N(0, 1) + N(0, 100) with probability 0.001, as in FlashAttention-3's accuracy table."""
    tensors = []
    for heads, rows in ((p.heads, p.seq), (p.key_heads, p.sk), (p.key_heads, p.sk), (p.heads, p.seq)):
        x = torch.randn(p.batch, rows, heads, p.dim, device=DEVICE)
        if outliers:
            x += torch.randn_like(x) * 10 * (torch.rand_like(x) < 0.001)
        tensors.append(x.to(p.dtype))
    return tuple(tensors)


def square_errors(got: Any, gold: Any) -> np.ndarray:
    return np.array([((a.double() - b) ** 2).sum().item() for a, b in zip(got, gold, strict=True)])


def check_peers(name: str, kernel: Kernel) -> Iterator[Finding]:
    """Errors pooled over 8 draws, at most 1.05 times those of torch's FlashAttention-2 on the same inputs."""
    for dtype in (torch.bfloat16, torch.float16):
        for dim in (64, 128):
            for mask in ("causal", "full"):
                for outliers in (False, True):
                    p = Problem(1, 1024, 4, 4, dim, mask, dtype)
                    ours, theirs, size = np.zeros(4), np.zeros(4), np.zeros(4)
                    for _ in range(8):
                        q, k, v, dout = tensors = draw(p, outliers)
                        gold = reference(p, *tensors)
                        other = peer("fa2", p, q, k, v, dout)
                        ours += square_errors(whole(kernel, tensors, p.bounds()), gold)
                        theirs += square_errors((other.forward(), *other.backward()), gold)
                        size += [(x**2).sum().item() for x in gold]
                    ratio = np.sqrt(ours / theirs)
                    figures = ", ".join(f"{n} {e:.2e} ({r:.3f} x)" for n, e, r in zip(RESULTS, np.sqrt(ours / size), ratio, strict=True))
                    what = f"{name} {dtype} hd{dim} {mask}{' outliers' if outliers else ''} beside fa2"
                    yield what, bool((ratio <= 1.05).all()), figures


def check_hops(name: str, kernel: Kernel) -> Iterator[Finding]:
    """The error over 2 to 64 hops, at most 1.1 times that over one; fp16 with a million keys too."""
    for dtype, keys, draws in ((torch.bfloat16, 8192, 4), (torch.float16, 8192, 4), (torch.float16, 2**20, 1)):
        p = Problem(1, 128, 1, 1, 64 if keys > 8192 else 128, "full", dtype, keys=keys)
        hops = (1, 64) if keys > 8192 else (1, 2, 4, 8, 16, 64)
        errors = {w: np.zeros(4) for w in hops}
        for _ in range(draws):
            q, k, v, dout = draw(p)
            v += 1  # else the mean of a million values is nothing but its own error
            gold = wide_reference(q, k, v, dout)
            for w in hops:
                ours = Ours(kernel, p, q, k, v, dout, w)
                errors[w] += square_errors((ours.forward(), *ours.backward()), gold) / [(x**2).sum().item() for x in gold]
        growth = {w: np.sqrt(e / errors[1]) for w, e in errors.items()}
        figures = "out " + " ".join(f"{math.sqrt(e[0] / draws):.2e}" for e in errors.values())
        if keys > 8192:
            theirs = peer("fa2", p, q, k, v, dout)
            one = np.sqrt(square_errors((theirs.forward(), *theirs.backward()), gold) / [(x**2).sum().item() for x in gold])
            figures += f" (fa2 {one[0]:.2e})"
        figures += "; worst growth " + ", ".join(f"{n} {max(g[i] for g in growth.values()):.3f}" for i, n in enumerate(RESULTS))
        ok = all((g <= 1.1).all() for g in growth.values())
        yield f"{name} {dtype} {keys} keys over {', '.join(map(str, hops))} hops", ok, figures


def wide_reference(q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> tuple[Tensor, ...]:
    """fp64 out, dq, dk, dv of few queries that see all of many keys; one head, one row of the batch."""
    q_, k_, v_, d_ = (x[0, :, 0].double() for x in (q, k, v, dout))
    scale = q.shape[-1] ** -0.5
    a = torch.softmax(q_ @ k_.T * scale, 1)
    out = a @ v_
    dv = a.T @ d_
    ds = a * (d_ @ v_.T - (d_ * out).sum(1, keepdim=True)) * scale
    return tuple(x[None, :, None] for x in (out, ds @ k_, ds.T @ q_, dv))


def check_repeats(name: str, kernel: Kernel) -> Iterator[Finding]:
    """100 whole passes with the same bits (the Hopper kernel's deterministic mode); 500 backward runs of 2,048 queries and 128 keys."""
    steady = GluonKernel(deterministic=True) if name == "gluon" else kernel
    for dim in (64, 128):
        p = Problem(1, 777, 4, 2, dim)
        tensors, bounds = draw(p), p.bounds()
        first = whole(steady, tensors, bounds)
        same = sum(all(torch.equal(a, b) for a, b in zip(first, whole(steady, tensors, bounds), strict=True)) for _ in range(100))
        yield f"{name}{' deterministic' if name == 'gluon' else ''} hd{dim} 100 repeats", same == 100, f"{same} with equal bits"
        p = Problem(1, 2048, 4, 4, dim, "full", keys=128)
        tensors, bounds = draw(p), p.bounds()
        first = whole(kernel, tensors, bounds)
        off = torch.zeros((), device=DEVICE)
        for _ in range(500):
            for a, b in zip(first, whole(kernel, tensors, bounds), strict=True):
                off = torch.maximum(off, (a.float() - b.float()).abs().nan_to_num(math.inf).max())
        limit = 0.0 if name == "triton" else 4e-3
        yield f"{name} hd{dim} 500 backward runs, 2048 x 128", off.item() <= limit, f"largest difference {off.item():.1e}"


def check_sizes(name: str, kernel: Kernel) -> Iterator[Finding]:
    """1 to 15 queries on 20 keys; more than 2^31 elements."""
    found = []
    for dim in (64, 128):
        for rows in range(1, 16):
            for mask in ("causal", "full"):
                p = Problem(2, rows, 4, 2, dim, mask, keys=20)
                tensors = draw(p)
                for what, x, y in zip(RESULTS, whole(kernel, tensors, p.bounds()), reference(p, *tensors), strict=True):
                    found.append((relative(x, y), f"{what}, {rows} rows, hd{dim} {mask}"))
    worst, where = max(found, key=lambda f: math.inf if math.isnan(f[0]) else f[0])
    yield f"{name} 1 to 15 queries, 20 keys", worst <= 1e-2, f"worst error {worst:.1e} ({where})"
    seq, heads, window = 140_000, 128, 200
    if torch.cuda.get_device_properties(0).total_memory < 75e9:
        yield f"{name} more than 2^31 elements", True, "skipped: needs 75 GB of GPU memory"
        return
    q, k, v = (torch.randn(1, seq, heads, 128, device=DEVICE, dtype=torch.bfloat16) for _ in range(3))
    assert q.numel() > 2**31
    got = whole(kernel, (q, k, v, q), Problem(1, seq, heads, heads, 128, "window", window=window).bounds())
    tail, errors = 600, []
    p = Problem(1, tail, 1, 1, 128, "window", window=window)
    for head in (0, heads - 1):
        cut = tuple(x[:, -tail:, head : head + 1] for x in (q, k, v, q))
        for a, b in zip(got, reference(p, *cut), strict=True):  # the first rows of the cut lack keys, or the last their queries
            errors.append(relative(a[:, -tail + window :, head : head + 1], b[:, window:]))
    del q, k, v, got
    torch.cuda.empty_cache()
    yield f"{name} more than 2^31 elements", all(e <= 1e-2 for e in errors), f"worst error {max(errors):.1e}"


def check_other_gpu(name: str, kernel: Kernel) -> Iterator[Finding]:
    """Tensors on the second GPU while the first is current."""
    if torch.cuda.device_count() < 2:
        yield f"{name} another GPU is current", True, "skipped: one GPU"
        return
    p = Problem(1, 300, 4, 2, 64)
    tensors = draw(p)
    there = tuple(x.to("cuda:1") for x in tensors)
    bounds = Bounds.from_rows(*p.intervals(), p.sk, "cuda:1")
    with torch.cuda.device(0):
        got = whole(kernel, there, bounds)
    torch.cuda.synchronize(1)
    errors = [relative(a.to(DEVICE), b) for a, b in zip(got, reference(p, *tensors), strict=True)]
    yield f"{name} another GPU is current", all(e <= 1e-2 for e in errors), f"worst error {max(errors):.1e}"


CHECKS: dict[str, Callable[[str, Kernel], Iterator[Finding]]] = {
    "peers": check_peers, "hops": check_hops, "repeats": check_repeats, "sizes": check_sizes, "gpus": check_other_gpu,
}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kernels", nargs="*", help="triton, gluon; default: those that run here")
    parser.add_argument("--only", default=",".join(CHECKS), help="some of: %(default)s")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**31))
    parser.add_argument("--out", type=Path, help="write the findings as JSON")
    args = parser.parse_args()
    kernels = args.kernels or ["triton", *(["gluon"] if GluonKernel.available(torch.device("cuda")) is None else [])]
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, seed {args.seed}", flush=True)
    started, findings = time.perf_counter(), []
    for name in kernels:
        for part in args.only.split(","):
            torch.manual_seed(args.seed)
            try:
                for what, ok, figures in CHECKS[part](name, load_kernel(name)):
                    findings.append({"what": what, "ok": ok, "figures": figures})
                    print(f"{time.perf_counter() - started:4.0f} s  {'ok  ' if ok else 'BAD '} {what}: {figures}", flush=True)
            except Exception:
                findings.append({"what": f"{name} {part}", "ok": False, "figures": traceback.format_exc()[-2000:]})
                print(f"FAIL {name} {part}\n{traceback.format_exc()[-2000:]}", flush=True)
    bad = [f for f in findings if not f["ok"]]
    print(f"{len(findings)} checks, {len(bad)} bad")
    for f in bad:
        print(f"  {f['what']}: {f['figures'][-400:]}")
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps({"seed": args.seed, "findings": findings}, indent=1))
    return len(bad)


if __name__ == "__main__":
    sys.exit(main())
