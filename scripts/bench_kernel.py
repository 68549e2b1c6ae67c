"""Check, then time, the attention kernels on one GPU beside their peers.

    python scripts/bench_kernel.py triton gluon                    # the whole grid, against fa2 and cudnn (and fa4 if installed)
    python scripts/bench_kernel.py triton --quick                  # under three minutes
    python scripts/bench_kernel.py triton --flex --out bench/h200  # with FlexAttention; writes bench/h200/kernels.{json,png}
    python scripts/bench_kernel.py triton --tune                   # try configurations (the same as scripts/tune_kernel.py)

Rates count 4 * D operations a visible pair and head forward (so causal counts half), 2.5 times that backward. All candidates of a
cell take turns; the median counts. A candidate that cannot do a cell, or fails, is reported and the rest goes on.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import time
import traceback
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from kernel_cases import CarriedHop, Ours, Problem, candidate, grid, peer, reference, relative, time_together

from ringattn.kernels.select import load_kernel

LIMITS = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 5e-6}
RESULTS = ("out", "dq", "dk", "dv")


def check_problems(quick: bool) -> list[tuple[Problem, int]]:
    """(problem, hops) of the checks."""
    bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
    problems = [
        *((Problem(1, 1024, 2, 2, d, mask), 1) for d in (64, 128) for mask in ("causal", "full", "documents")),
        *((Problem(2, 777, 4, 2, d, "causal"), 1) for d in (64, 80, 96, 128, 256)),
        (Problem(1, 1000, 2, 2, 128, "window", window=100), 1),
        (Problem(2, 1024, 8, 1, 128, "documents", per_row=True), 1),
        (Problem(1, 500, 2, 2, 128, "causal", keys=1003), 1),
        (Problem(1, 1003, 2, 2, 64, "causal", keys=500), 1),
        *((Problem(1, 1024, 2, 2, d, mask), 4) for d in (64, 128) for mask in ("causal", "full", "documents")),
        *((Problem(1, 640, 2, 1, d, "causal", t), 1) for t in (fp16, fp32) for d in (64, 128)),
        *((Problem(1, 640, 2, 1, 128, "documents", t), 4) for t in (fp16, fp32)),
    ]
    if not quick:
        problems += [
            *((Problem(1, 640, 4, 2, d, mask, t), h)
              for d in (16, 32, 48, 112, 192, 256) for mask in ("documents", "full") for t in (bf16, fp32) for h in (1, 2)),
            *((Problem(1, s, 2, 2, 128, "causal"), 1) for s in (1, 15, 127, 129, 4097)),
            (Problem(1, 16384, 1, 1, 128, "causal"), 8),
        ]  # fmt: skip
    return problems


def check(name: str, p: Problem, hops: int) -> dict[str, Any]:
    """Relative errors against fp64, and torch's FA2 on the same inputs where it can."""
    torch.manual_seed(torch.seed() % 2**31)
    q, k, v, dout = p.inputs()
    gold = reference(p, q, k, v, dout)
    ours = Ours(load_kernel(name), p, q, k, v, dout, hops)
    got = (ours.forward(), *ours.backward())
    errors = {n: relative(x, y) for n, x, y in zip(RESULTS, got, gold, strict=True)}
    again = (ours.forward().clone(), *(x.clone() for x in ours.backward()))
    record: dict[str, Any] = {"errors": errors, "repeats": all(torch.equal(a, b) for a, b in zip(got, again, strict=True))}
    record["ok"] = all(e <= LIMITS[p.dtype] for e in errors.values())
    try:
        other = peer("fa2", p, q, k, v, dout)
        record["fa2"] = {n: relative(x, y) for n, x, y in zip(RESULTS, (other.forward(), *other.backward()), gold, strict=True)}
    except Exception:
        record["fa2"] = None
    return record


def run_checks(names: list[str], quick: bool) -> list[dict[str, Any]]:
    records = []
    for name in names:
        for p, hops in check_problems(quick):
            record: dict[str, Any] = {"kernel": name, "problem": p.label, "dtype": str(p.dtype).removeprefix("torch."), "hops": hops}
            try:
                record |= check(name, p, hops)
                status = "ok  " if record["ok"] else "BAD "
                line = " ".join(f"{n} {e:.1e}" for n, e in record["errors"].items())
                worst = record["fa2"] and max(e / f for e, f in zip(record["errors"].values(), record["fa2"].values(), strict=True))
                note = (f"  ({worst:.2f} x FA2's)" if worst else "") + ("" if record["repeats"] else "  second run differs")
            except ValueError as error:
                status, line, note = "skip", str(error), ""
            except Exception as error:
                record["failure"] = traceback.format_exc()[-2000:]
                status, line, note = "FAIL", f"{type(error).__name__}: {str(error)[:150]}", ""
            records.append(record | {"status": status.strip()})
            print(f"{status} {name:7} {p.label} {record['dtype']} hops {hops}: {line}{note}", flush=True)
    return records


def run_cell(names: list[str], p: Problem, carried: bool, quick: bool) -> dict[str, Any]:
    """Times of all candidates on one problem."""
    q, k, v, dout = p.inputs()
    cell: dict[str, Any] = {"problem": p.label, "carried": carried, **{k: str(v) for k, v in asdict(p).items()}, "results": {}}
    alive: dict[str, Any] = {}
    for name in names:
        try:
            alive[name] = CarriedHop(load_kernel(name), p, q, k, v, dout) if carried else candidate(name, p, q, k, v, dout)
            alive[name].forward()
            alive[name].backward()
            torch.cuda.synchronize()
        except Exception as error:
            alive.pop(name, None)
            cell["results"][name] = {"failure": f"{type(error).__name__}: {str(error)[:200]}"}
    operations = 4 * p.dim * p.heads * p.pairs()
    rounds, round_ms = (5, 15.0) if quick else (9, 30.0)
    for phase, factor in (("forward", 1.0), ("backward", 2.5)):
        times = time_together({n: getattr(c, phase) for n, c in alive.items()}, rounds, round_ms) if alive else {}
        for name, ms in times.items():
            cell["results"].setdefault(name, {})[phase] = {"ms": ms, "tflops": operations * factor / ms * 1e-9}
    return cell


def rate(cell: dict[str, Any], name: str) -> str:
    result = cell["results"].get(name, {})
    if "failure" in result:
        return "FAIL" if "ValueError" not in result["failure"] and "ImportError" not in result["failure"] else "-"
    return "/".join(f"{result[p]['tflops']:.0f}" for p in ("forward", "backward")) if "backward" in result else "-"


def name_of(cell: dict[str, Any]) -> str:
    return cell["problem"] + (" carried" if cell["carried"] else "")


def draw(cells: list[dict[str, Any]], names: list[str], title: str, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    fig, axes = plt.subplots(2, 1, figsize=(max(8.0, 0.55 * len(cells) + 2), 8), sharex=True, constrained_layout=True)
    width = 0.8 / len(names)
    for axis, phase in zip(axes, ("forward", "backward"), strict=True):
        for i, name in enumerate(names):
            at = [x for x, c in enumerate(cells) if phase in c["results"].get(name, {})]
            heights = [cells[x]["results"][name][phase]["tflops"] for x in at]
            axis.bar([x + (i - (len(names) - 1) / 2) * width for x in at], heights, width, label=name)
        axis.set_ylabel(f"{phase}, TFLOP/s")
        axis.grid(axis="y", alpha=0.3)
    axes[0].legend(ncols=len(names))
    axes[0].set_title(title)
    axes[1].set_xticks(range(len(cells)), [name_of(c) for c in cells], rotation=60, ha="right", fontsize=8)
    fig.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kernels", nargs="*", default=["triton"], help="kernels of this package: triton, gluon, torch")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--flex", action="store_true", help="time FlexAttention too (compiles for every cell)")
    parser.add_argument("--no-checks", action="store_true")
    parser.add_argument("--no-times", action="store_true")
    parser.add_argument("--tune", action="store_true", help="try configurations of the Triton kernels instead")
    parser.add_argument("--out", type=Path, default=Path("bench"))
    args = parser.parse_args()
    if args.tune:
        from tune_kernel import tune

        tune(quick=args.quick)
        return
    started = time.perf_counter()
    fa4 = importlib.util.find_spec("flash_attn") is not None and importlib.util.find_spec("flash_attn.cute") is not None
    peers = ["fa2", "cudnn", *(["flex"] if args.flex else []), *(["fa4"] if fa4 else [])]
    record: dict[str, Any] = {
        "device": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": getattr(__import__("triton"), "__version__", ""),
        "checks": [] if args.no_checks else run_checks(args.kernels, args.quick), "cells": [],
    }  # fmt: skip
    args.out.mkdir(parents=True, exist_ok=True)
    report = args.out / "kernels.json"
    if not args.no_times:
        cells = [(p, False) for p in grid(args.quick)]
        for dim in (128, 64):
            cells += [(Problem(1, 8192, 2048 // dim, 2048 // dim, dim, mask), c) for mask in ("full", "causal") for c in (False, True)]
        for p, carried in cells:
            names = args.kernels + ([] if carried else peers)
            record["cells"].append(run_cell(names, p, carried, args.quick))
            report.write_text(json.dumps(record, indent=1))
            print(f"{time.perf_counter() - started:5.0f} s  {p.label}{' carried' if carried else ''}: "
                  + ", ".join(f"{n} {rate(record['cells'][-1], n)}" for n in names), flush=True)  # fmt: skip
            torch.cuda.empty_cache()
    report.write_text(json.dumps(record, indent=1))
    names = args.kernels + peers
    if record["cells"]:
        draw(record["cells"], names, f"{record['device']}, torch {record['torch']}, triton {record['triton']}", args.out / "kernels.png")
    print(f"\n{record['device']}, torch {record['torch']}, triton {record['triton']}; TFLOP/s forward/backward")
    print(f"{'':44}" + "".join(f"{n:>11}" for n in names))
    for cell in record["cells"]:
        print(f"{name_of(cell):44}" + "".join(f"{rate(cell, n):>11}" for n in names))
    bad = [r for r in record["checks"] if r["status"] in ("BAD", "FAIL")]
    print(f"checks: {len(record['checks'])}, of which bad: {len(bad)}")
    for r in bad:
        what = r.get("errors") or r.get("failure", "")[-300:]
        print(f"  {r['status']} {r['kernel']} {r['problem']} {r['dtype']} hops {r['hops']}: {what}")
    for cell in record["cells"]:
        for name, result in cell["results"].items():
            if "failure" in result and name in args.kernels:
                print(f"  FAIL {name} {cell['problem']}: {result['failure']}")
    print(f"{time.perf_counter() - started:.0f} s; {report}")


if __name__ == "__main__":
    main()
