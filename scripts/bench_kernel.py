"""Check, then time, the attention kernels on one GPU beside their peers.

    python scripts/bench_kernel.py                        # gluon and triton, the whole grid, beside fa2, cudnn, flex (and fa4 if installed)
    python scripts/bench_kernel.py triton --quick         # a short grid, under three minutes
    python scripts/bench_kernel.py --limit 250            # stop timing after 250 seconds; the cells that matter most come first
    python scripts/bench_kernel.py --key --apart          # the long MHA cells only, each candidate timed by itself after a rest
    python scripts/bench_kernel.py --flex all             # FlexAttention in every cell (it compiles for each: half an hour)
    python scripts/bench_kernel.py triton --tune          # try configurations (the same as scripts/tune_kernel.py)

Rates count 4 * D operations a visible pair and head forward (so causal counts half), 2.5 times that backward. All candidates of a
cell take turns (with --apart they do not, and each starts on a rested GPU); the median counts. A candidate that cannot do a cell, or
fails, is reported and the rest goes on. Writes kernels.json and kernels.png into --out and prints a table.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import time
import traceback
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from kernel_cases import CarriedHop, Ours, Problem, candidate, grid, peer, reference, relative, time_apart, time_together

from ringattn.kernels.gluon_kernel import GluonKernel
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


def run_cell(names: list[str], p: Problem, carried: bool, quick: bool, apart: bool = False) -> dict[str, Any]:
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
        calls = {n: getattr(c, phase) for n, c in alive.items()}
        times = time_apart(calls) if apart else time_together(calls, rounds, round_ms) if alive else {}
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
    """A panel for each head dim, mask and phase, with a group of bars for each length."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    panels: dict[str, list[dict[str, Any]]] = {}
    for cell in cells:
        if not cell["carried"] and cell["mask"] in ("causal", "full") and int(cell["batch"]) * int(cell["seq"]) >= 16384:
            group = f", grouped {int(cell['heads']) // int(cell['key_heads'])}:1" if cell["heads"] != cell["key_heads"] else ""
            panels.setdefault(f"head dim {cell['dim']}, {cell['mask']}{group}", []).append(cell)
    shown = [n for n in names if any("forward" in c["results"].get(n, {}) for p in panels.values() for c in p)]
    order = sorted(panels, key=lambda name: ("grouped" in name, int(name.split()[2].rstrip(",")), name))
    bands = -(-len(order) // 5)
    across = -(-len(order) // bands)
    fig, axes = plt.subplots(2 * bands, across, figsize=(3.2 * across + 1, 5.4 * bands + 1), squeeze=False, constrained_layout=True)
    width, colours = 0.84 / max(1, len(shown)), plt.get_cmap("tab10")
    for place in range(bands * across):
        band, column = divmod(place, across)
        for row, phase in enumerate(("forward", "backward")):
            axis = axes[2 * band + row][column]
            if place >= len(order):
                axis.set_axis_off()
                continue
            here = sorted(panels[order[place]], key=lambda c: int(c["seq"]))
            for i, name in enumerate(shown):
                at = [x for x, c in enumerate(here) if phase in c["results"].get(name, {})]
                heights = [here[x]["results"][name][phase]["tflops"] for x in at]
                axis.bar([x + (i - (len(shown) - 1) / 2) * width for x in at], heights, width, color=colours(i))
            axis.set_xticks(range(len(here)), [length_of(int(c["seq"])) for c in here], fontsize=8)
            axis.grid(axis="y", alpha=0.3)
            axis.set_axisbelow(True)
            axis.set_title(f"{order[place]}: {phase}", fontsize=9)
            if column == 0:
                axis.set_ylabel("TFLOP/s")
    patches = [plt.Rectangle((0, 0), 1, 1, color=colours(i)) for i in range(len(shown))]
    fig.legend(patches, shown, ncols=len(shown), loc="outside lower center")
    fig.suptitle(title, fontsize=11)
    fig.savefig(path, dpi=110)
    plt.close(fig)


def length_of(seq: int) -> str:
    return f"{seq // 1024}K" if seq >= 1024 else str(seq)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kernels", nargs="*", help="kernels of this package: gluon, triton, torch; default: those that run here")
    parser.add_argument("--quick", action="store_true", help="fewer checks and cells")
    parser.add_argument("--flex", choices=("key", "all", "none"), default="key", help="cells with FlexAttention")
    parser.add_argument("--limit", type=float, default=float("inf"), help="seconds after which no new cell is started")
    parser.add_argument("--key", action="store_true", help="only the cells that the project's figures are stated for")
    parser.add_argument("--apart", action="store_true", help="time each candidate by itself, after a rest, instead of in turns")
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
    ours = args.kernels or [*(["gluon"] if GluonKernel.available(torch.device("cuda")) is None else []), "triton"]
    peers = ["fa2", "cudnn", *(["flex"] if args.flex != "none" else []), *(["fa4"] if _has_fa4() else [])]
    record: dict[str, Any] = {
        "device": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": getattr(__import__("triton"), "__version__", ""),
        "apart": args.apart, "cells": [], "left_out": [],
        "checks": [] if args.no_checks else run_checks(ours, args.quick or math.isfinite(args.limit)),
    }  # fmt: skip
    args.out.mkdir(parents=True, exist_ok=True)
    report = args.out / "kernels.json"
    for p, carried, key in [] if args.no_times else list_cells(args.quick):
        spent = time.perf_counter() - started
        if args.key and not (key or carried):
            continue
        if spent > args.limit:
            record["left_out"].append(p.label + (" carried" if carried else ""))
            continue
        # FlexAttention compiles for 10 to 20 seconds a cell
        flex = args.flex == "all" or (args.flex == "key" and key and spent < 0.5 * args.limit)
        names = ours + [n for n in peers if not carried and (n != "flex" or flex)]
        record["cells"].append(run_cell(names, p, carried, args.quick or math.isfinite(args.limit), args.apart))
        report.write_text(json.dumps(record, indent=1))
        print(f"{time.perf_counter() - started:5.0f} s  {p.label}{' carried' if carried else ''}: "
              + ", ".join(f"{n} {rate(record['cells'][-1], n)}" for n in names), flush=True)  # fmt: skip
        torch.cuda.empty_cache()
    report.write_text(json.dumps(record, indent=1))
    if record["cells"]:
        title = f"{record['device']}, torch {record['torch']}, triton {record['triton']}; bf16, 16,384 tokens (or one row), width 2,048"
        draw(record["cells"], ours + peers, title, args.out / "kernels.png")
    report_of(record, ours, peers)
    print(f"{time.perf_counter() - started:.0f} s; {report}")


def list_cells(quick: bool) -> list[tuple[Problem, bool, bool]]:
    """(problem, whether a hop in the middle of a ring, whether a key cell), those that matter most first."""
    cells = [(p, False, p.seq == 16384 and p.dim in (64, 128) and p.mask in ("causal", "full") and p.heads == p.key_heads
              or p.seq == 2048 and p.dim == 128 and p.mask == "causal" and p.heads == p.key_heads)
             for p in grid(quick)]  # fmt: skip
    for dim in (128, 64):
        cells += [(Problem(1, 8192, 2048 // dim, 2048 // dim, dim, mask), c, False) for mask in ("full", "causal") for c in (False, True)]
    unique = list({(p, carried): (p, carried, key) for p, carried, key in reversed(cells)}.values())
    order = (128, 64, 256)
    return sorted(unique, key=lambda c: (c[0].dim == 256, not (c[2] or c[1]), c[0].mask in ("causal", "full") and c[0].seq != 8192,
                                         order.index(c[0].dim), -c[0].seq))  # fmt: skip


def report_of(record: dict[str, Any], ours: list[str], peers: list[str]) -> None:
    """The table and the list of what went wrong."""
    names = ours + peers
    print(f"\n{record['device']}, torch {record['torch']}, triton {record['triton']}; TFLOP/s forward/backward")
    print(f"{'':44}" + "".join(f"{n:>11}" for n in names))
    place = {c["problem"]: i for i, c in enumerate(record["cells"])}
    for cell in sorted(record["cells"], key=lambda c: (int(c["dim"]), c["mask"], int(c["heads"]) != int(c["key_heads"]), int(c["seq"]),
                                                      place[c["problem"]], c["carried"])):  # fmt: skip
        behind = [p for p in ("forward", "backward") if _best(cell, ours, p) < _best(cell, peers, p)]
        note = f"  behind: {', '.join(behind)}" if behind else ""
        print(f"{name_of(cell):44}" + "".join(f"{rate(cell, n):>11}" for n in names) + note)
    if record["left_out"]:
        print(f"left out for lack of time: {'; '.join(record['left_out'])}")
    bad = [r for r in record["checks"] if r["status"] in ("BAD", "FAIL")]
    print(f"checks: {len(record['checks'])}, of which bad: {len(bad)}")
    for r in bad:
        what = r.get("errors") or r.get("failure", "")[-300:]
        print(f"  {r['status']} {r['kernel']} {r['problem']} {r['dtype']} hops {r['hops']}: {what}")
    for cell in record["cells"]:
        for name, result in cell["results"].items():
            if "failure" in result and (name in ours or "ValueError" not in result["failure"]):
                print(f"  FAIL {name} {cell['problem']}: {result['failure']}")


def _best(cell: dict[str, Any], names: list[str], phase: str) -> float:
    return max((cell["results"][n][phase]["tflops"] for n in names if phase in cell["results"].get(n, {})), default=0.0)


def _has_fa4() -> bool:
    return importlib.util.find_spec("flash_attn") is not None and importlib.util.find_spec("flash_attn.cute") is not None


if __name__ == "__main__":
    main()
