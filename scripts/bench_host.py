"""Time what the host spends on one call of attention: the public function and the kernels' own launchers.

    python scripts/bench_host.py                    # on a GPU; prints microseconds, best of some rounds
    python scripts/bench_host.py --profile          # the Python functions that take longest, by cProfile

Warm: calls one after another, short enough that the GPU keeps up. Cold: each call right after a synchronisation, the median. Both
end when the call returns, so the GPU's own time is not counted; "+ backward" is ``flash_attention`` and then ``autograd.grad``.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from kernel_cases import Problem

from ringattn import flash_attention
from ringattn.kernels.contract import State
from ringattn.kernels.select import load_kernel, select_kernel


def warm(call: Callable[[], object], repeats: int = 50, rounds: int = 7) -> float:
    """Microseconds a call, the best round."""
    best = float("inf")
    for _ in range(rounds):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(repeats):
            call()
        best = min(best, (time.perf_counter() - start) / repeats)
    return best * 1e6


def cold(call: Callable[[], object], repeats: int = 60) -> float:
    """Microseconds of a call right after the device has come to rest, the median."""
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        time.sleep(0.001)
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e6


def calls(name: str, seq: int) -> dict[str, Callable[[], object]]:
    """What is timed, on causal attention of 4 heads of 128 over ``seq`` tokens in bf16."""
    p = Problem(1, seq, 4, 4, 128)
    q, k, v, dout = p.inputs()
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    documents = torch.arange(seq) // 100
    kernel = select_kernel(name, q, k)
    bounds, state, scale = p.bounds(), State.empty(q), p.dim**-0.5
    out, lse = torch.empty_like(q), torch.empty(1, p.heads, seq, device=q.device)
    grads = [torch.empty_like(x) for x in (q, k, v)]
    kernel.forward(q, k, v, bounds, None, scale=scale, first=True, out=out, lse=lse)
    rows = kernel.prepare(out, dout, lse, None)

    def launch_backward() -> None:
        kernel.backward(q, k, v, dout, rows, bounds, scale=scale, dq=grads[0], dk=grads[1], dv=grads[2], add_dq=False)

    def both(**mask: object) -> object:
        return torch.autograd.grad(flash_attention(*leaves, kernel=name, **mask), leaves, dout)

    def one_thread() -> object:
        with torch.autograd.set_multithreading_enabled(False):
            return both()

    def sdpa() -> object:
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
            out = torch.nn.functional.scaled_dot_product_attention(*(x.transpose(1, 2) for x in leaves), is_causal=True)
        return torch.autograd.grad(out, leaves, dout.transpose(1, 2))

    return {
        f"{kernel.name} launcher, forward": lambda: kernel.forward(q, k, v, bounds, None, scale=scale, first=True, out=out, lse=lse),
        f"{kernel.name} launcher, one hop of a ring": lambda: kernel.forward(q, k, v, bounds, state, scale=scale, first=True),
        f"{kernel.name} launcher, backward": launch_backward,
        f"{kernel.name} flash_attention, no gradient": lambda: flash_attention(q, k, v, kernel=name),
        f"{kernel.name} flash_attention": lambda: flash_attention(*leaves, kernel=name),
        f"{kernel.name} flash_attention + backward": both,
        f"{kernel.name} the same, autograd on one thread": one_thread,
        f"{kernel.name} documents, flash_attention + backward": lambda: both(documents=documents),
        "torch SDPA (fa2) + backward": sdpa,
    }


def profile(call: Callable[[], object], lines: int = 25) -> None:
    with cProfile.Profile() as profiler:
        for _ in range(300):
            call()
    torch.cuda.synchronize()
    pstats.Stats(profiler).sort_stats("tottime").print_stats(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kernels", nargs="*", default=["gluon", "triton"])
    parser.add_argument("--seq", type=int, default=256)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    found: dict[str, tuple[float, float]] = {}
    for name in args.kernels:
        load_kernel(name)
        for what, call in calls(name, args.seq).items():
            for _ in range(20):
                call()
            found[what] = (warm(call), cold(call))
            print(f"{what:56} warm {found[what][0]:7.1f} us   cold {found[what][1]:7.1f} us", flush=True)
            if args.profile and what.endswith("flash_attention + backward"):
                profile(call)
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
