"""Proves the ring on the machine at hand: exactness, equal bits, no races. Every rank checks its own rows against an fp64 oracle.

    torchrun --standalone --nproc-per-node 2 scripts/check_ring.py [--passes 100] [--transports p2p,push] [--kernel auto]
    python scripts/check_ring.py --virtual 4            # one process

Checks, for each transport: out, dq, dk, dv in bf16 (and fp32 with the portable kernels) for every layout, mask and exchange; a virtual
ring of the same size has the same bits; repeated passes with random delays on some ranks have the same bits (both with
deterministic=True).
Exits with 1 and names what failed if anything did.
"""

from __future__ import annotations

import argparse
import os
import sys
import time

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ringattn import Layout, Ring, flash_attention, make_schedule, ring_attention
from ringattn.ring.layout import LAYOUTS
from ringattn.ring.transport import use_transport

BANDS = {torch.float32: 5e-6, torch.bfloat16: 1e-2, torch.float16: 1e-2}


def masks(seq_len: int, rng: np.random.Generator) -> dict[str, dict]:
    """One of each kind, the same on all ranks."""
    documents = np.sort(rng.integers(0, 9, seq_len))
    documents[seq_len - seq_len // 7 :] = -1
    lo = np.sort(rng.integers(0, seq_len, seq_len))
    hi = np.maximum.accumulate(np.clip(lo + rng.integers(-3, seq_len // 3, seq_len), -1, seq_len - 1))
    return {
        "causal": {}, "full": {"causal": False}, "window": {"window": seq_len // 9},
        "documents": {"documents": torch.from_numpy(documents)},
        "documents+window": {"documents": torch.from_numpy(documents), "window": seq_len // 5},
        "visible": {"visible": (torch.from_numpy(lo), torch.from_numpy(hi)), "causal": False},
    }


def run(
    ring: Ring, layout: Layout, tensors: list[Tensor], mask: dict, exchange: str, kernel: str, deterministic: bool = False
) -> list[Tensor]:
    """out, dq, dk, dv of this rank's rows."""
    schedule = make_schedule(layout, ring, exchange=exchange, device=tensors[0].device, **mask)
    q, k, v, dout = (layout.shard(x, ring) for x in tensors)
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out = ring_attention(*leaves, ring=ring, layout=layout, schedule=schedule, kernel=kernel, deterministic=deterministic)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def oracle(tensors: list[Tensor], mask: dict) -> list[Tensor]:
    """The same over the whole sequence, dense, in fp64."""
    leaves = [x.double().requires_grad_() for x in tensors[:3]]
    out = flash_attention(*leaves, kernel="reference", **mask)
    return [out.detach(), *torch.autograd.grad(out, leaves, tensors[3].double())]


class Report:
    """Collects failures on every rank and prints them on rank 0."""

    def __init__(self, ring: Ring) -> None:
        self.ring, self.failures, self.checks = ring, 0, 0

    def check(self, name: str, problem: str | None) -> None:
        """All ranks call this; a problem on any of them counts."""
        problems: list[str | None] = [problem]
        if self.ring.processes > 1:
            problems = [None] * self.ring.processes
            dist.all_gather_object(problems, problem, group=self.ring.group)
        self.checks += 1
        bad = [f"rank {r}: {p}" for r, p in enumerate(problems) if p]
        self.failures += bool(bad)
        if bad and self.ring.rank == 0:
            print(f"FAIL {name}: {'; '.join(bad)}", flush=True)


def compare(got: list[Tensor], gold: list[Tensor], band: float) -> str | None:
    """Relative norm errors of out, dq, dk, dv over this rank's rows; None if all are within the band."""
    errors = {}
    for name, x, y in zip(("out", "dq", "dk", "dv"), got, gold, strict=True):
        errors[name] = ((x.double() - y).norm() / y.norm().clamp_min(1e-30)).item()
    bad = {n: f"{e:.1e}" for n, e in errors.items() if not e <= band}
    return f"relative errors {bad} beyond {band}" if bad else None


def check_exactness(report: Report, ring: Ring, args: argparse.Namespace, device: torch.device, rng: np.random.Generator) -> None:
    """Every layout, mask, exchange and dtype."""
    seq_len = args.seq_len
    for dtype in (torch.bfloat16, torch.float32):
        for heads, kv_heads, dim in ((4, 2, 128), (4, 4, 64)):
            shapes = ((1, seq_len, h, dim) for h in (heads, kv_heads, kv_heads, heads))
            tensors = [torch.randn(s, device=device).to(dtype) for s in shapes]
            for name, mask in masks(seq_len, rng).items():
                gold = oracle(tensors, mask)
                for kind in LAYOUTS if dim == 128 else ("zigzag",):
                    layout = Layout(kind, seq_len, ring.size)
                    local = [layout.shard(x, ring) for x in gold]
                    for exchange in ("ring", "allgather") if ring.inner is None else ("ring",):
                        got = run(ring, layout, tensors, mask, exchange, args.kernel)
                        report.check(f"{dtype} {dim} {name} {kind} {exchange}", compare(got, local, BANDS[dtype]))


def check_bits(report: Report, ring: Ring, args: argparse.Namespace, device: torch.device, rng: np.random.Generator) -> None:
    """Real = virtual, and pass after pass the same, with delays."""
    layout = Layout("zigzag", args.seq_len, ring.size)
    tensors = [torch.randn(1, args.seq_len, h, 128, device=device).bfloat16() for h in (4, 2, 2, 4)]
    for name, mask in masks(args.seq_len, rng).items():
        first = run(ring, layout, tensors, mask, "ring", args.kernel, deterministic=True)
        own_group = dist.new_group([dist.get_rank()], use_local_synchronization=True) if dist.is_initialized() else None
        alone = Ring(own_group, ring.size, inner=ring.inner)
        whole = run(alone, layout, tensors, mask, "ring", args.kernel, deterministic=True)
        rows = slice(ring.rank * ring.virtual * layout.shard_len, (ring.rank + 1) * ring.virtual * layout.shard_len)
        wrong = [n for n, a, b in zip(("out", "dq", "dk", "dv"), first, whole, strict=True) if not torch.equal(a, b[:, rows])]
        report.check(f"virtual = real, {name}", f"{', '.join(wrong)} differ" if wrong else None)
        own = np.random.default_rng(1000 + ring.rank)
        wrong = []
        for i in range(args.passes):
            if own.random() < 0.2:
                time.sleep(own.random() * 0.004)
            again = run(ring, layout, tensors, mask, "ring", args.kernel, deterministic=True)
            if not all(torch.equal(a, b) for a, b in zip(first, again, strict=True)):
                wrong.append(str(i))
        report.check(f"{args.passes} passes with delays, {name}", f"passes {', '.join(wrong[:5])} differ" if wrong else None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--passes", type=int, default=100)
    parser.add_argument("--seq-len", type=int, default=1536, help="a multiple of 2 x ring size")
    parser.add_argument("--virtual", type=int, default=1)
    parser.add_argument("--inner", type=int, help="shards a node: a ring of two levels")
    parser.add_argument("--kernel", default="auto")
    parser.add_argument("--transports", default="p2p")
    args = parser.parse_args()
    cuda = torch.cuda.is_available()
    if "RANK" in os.environ:
        local = int(os.environ["LOCAL_RANK"])
        if cuda:
            torch.cuda.set_device(local)
        dist.init_process_group("nccl" if cuda else "gloo", device_id=torch.device("cuda", local) if cuda else None)
    device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
    failures = 0
    for transport in args.transports.split(","):
        torch.manual_seed(0)
        rng = np.random.default_rng(0)
        outer = dist.new_group() if args.inner and dist.is_initialized() else None
        ring = Ring(virtual=args.virtual, inner=args.inner, outer_group=outer)
        use_transport(ring, transport, device)
        report, started = Report(ring), time.perf_counter()
        check_exactness(report, ring, args, device, rng)
        check_bits(report, ring, args, device, rng)
        if ring.rank == 0:
            seconds = time.perf_counter() - started
            passed = report.checks - report.failures
            print(f"{transport}: {passed} of {report.checks} checks passed on {ring} in {seconds:.0f} s", flush=True)
        failures += report.failures
    if dist.is_initialized():
        dist.destroy_process_group()
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
