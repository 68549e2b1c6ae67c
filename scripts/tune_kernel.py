"""Time configurations of the Triton kernels on the GPU at hand and print the best, to be put in ringattn/kernels/triton_configs.py.

    python scripts/tune_kernel.py                          # head dims 64 and 128, all three kernels
    python scripts/tune_kernel.py --dims 256 --ops dq      # some of them
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator
from typing import Any

import torch
from kernel_cases import Ours, Problem, time_together

from ringattn.kernels.triton_configs import Config, configs
from ringattn.kernels.triton_kernel import TritonKernel

# (block_m, block_n, warps, stages)
CANDIDATES = {
    "forward": [(128, 64, 4, 2), (128, 64, 4, 3), (128, 128, 8, 2), (128, 64, 8, 2), (128, 64, 8, 3), (64, 64, 4, 2), (64, 64, 4, 3),
                (64, 128, 4, 2), (128, 128, 4, 2), (128, 32, 4, 3)],
    "dkdv": [(64, 64, 4, 2), (64, 64, 4, 3), (64, 128, 8, 2), (64, 128, 8, 3), (128, 64, 4, 2), (128, 128, 8, 2), (32, 64, 4, 3),
             (32, 128, 8, 2)],
    "dq": [(128, 64, 8, 2), (128, 64, 8, 3), (128, 128, 8, 2), (128, 32, 8, 3), (64, 64, 4, 2), (64, 64, 4, 3), (64, 128, 4, 2),
           (128, 64, 4, 2)],
}  # fmt: skip
OPERATIONS = {"forward": 4, "dkdv": 8, "dq": 6}  # of this kernel's own matrix products, a visible pair, head and column


class Only:
    """One configuration for one kernel, the table for the others."""

    def __init__(self, op: str, config: Config) -> None:
        self.op, self.config = op, config

    def __call__(self, arch: int, op: Any, dim: int, size: int, mask: Any, descriptors: bool) -> Iterator[Config]:
        return iter([self.config]) if op == self.op else iter(configs(arch, op, dim, size, mask, descriptors))


def calls_of(op: str, ours: Ours) -> Any:
    if op == "forward":
        return ours.forward
    rows = ours.kernel.prepare(ours.out, ours.dout, ours.lse, None)
    part: Any = "kv" if op == "dkdv" else "q"
    return lambda: ours.kernel.backward(ours.q, ours.k, ours.v, ours.dout, rows, ours.bounds[0], scale=ours.scale, dq=ours.dq, dk=ours.dk,
                                        dv=ours.dv, add_dq=False, part=part)  # fmt: skip


def describe(kernel: TritonKernel, op: str) -> str:
    for key, compiled in kernel._compiled.items():
        if key[0][0] == op:
            return f"registers {compiled.n_regs}, spills {compiled.n_spills}"
    return ""


def tune(dims: tuple[int, ...] = (128, 64), ops: tuple[str, ...] = ("forward", "dkdv", "dq"), quick: bool = False,
         masks: tuple[str, ...] = ("causal", "full"), seq: int = 16384) -> None:  # fmt: skip
    """Print the best configurations of each kernel, head dim and mask, with the rate of the kernel's own matrix products."""
    lines = []
    for dim, mask, op in itertools.product(dims, masks, ops):
        heads = 2048 // dim
        p = Problem(max(1, 16384 // seq), seq, heads, heads, dim, mask)
        inputs = p.inputs()
        shapes = CANDIDATES[op][:6] if quick else CANDIDATES[op]
        variants = [(True, False), (False, False), (False, True)] if mask != "full" else [(True, False), (True, True)]
        calls, kernels, failures = {}, {}, []
        gold = None
        for shape, (branch, hoist) in itertools.product(shapes, variants):
            config = Config(*shape, branch=branch, hoist=hoist)
            try:
                kernel = TritonKernel(choose=Only(op, config))
                ours = Ours(kernel, p, *inputs)
                ours.forward()
                call = calls_of(op, ours)
                call()
                torch.cuda.synchronize()
                got = (ours.out if op == "forward" else ours.dv if op == "dkdv" else ours.dq).float()
                gold = got.clone() if gold is None else gold
                if not (got - gold).norm() < 1e-2 * gold.norm():
                    raise ArithmeticError(f"differs from the first by {((got - gold).norm() / gold.norm()).item():.1e}")
                calls[config], kernels[config] = call, kernel
            except Exception as error:
                failures.append(f"  FAIL {config}: {type(error).__name__} {str(error).splitlines()[0][:100] if str(error) else ''}")
        operations = OPERATIONS[op] * dim * heads * p.pairs()
        times = time_together(calls, 3 if quick else 5, 8.0)
        print(f"{op} hd{dim} {mask}:")
        for config, ms in sorted(times.items(), key=lambda x: x[1])[:8]:
            print(f"  {operations / ms * 1e-9:5.0f} TF/s  {config}  {describe(kernels[config], op)}", flush=True)
        print(*failures[:4], sep="\n")
        if times:
            best = min(times, key=times.__getitem__)
            lines.append(f"{op:8} hd{dim:<4} {mask:7} {operations / times[best] * 1e-9:5.0f} TF/s  {best}")
        del calls, kernels
        torch.cuda.empty_cache()
    print("\nbest:", *lines, sep="\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dims", type=int, nargs="+", default=[128, 64])
    parser.add_argument("--ops", nargs="+", default=["forward", "dkdv", "dq"], choices=["forward", "dkdv", "dq"])
    parser.add_argument("--masks", nargs="+", default=["causal", "full"], choices=["causal", "full", "documents", "window"])
    parser.add_argument("--seq", type=int, default=16384)
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    tune(tuple(args.dims), tuple(args.ops), args.quick, tuple(args.masks), args.seq)


if __name__ == "__main__":
    main()
