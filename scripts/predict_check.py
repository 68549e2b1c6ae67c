"""Predicted against measured: peak memory and step time of real training steps on the machine at hand.

    python scripts/predict_check.py                        # all cases, about three minutes on an H200
    python scripts/predict_check.py --cases 8k --json out.json
    python scripts/predict_check.py --from out.json        # compare an old measurement with the model as it is now, no GPU needed

Every case runs the loop's own ``train_step`` (forward, backward, clipping, optimizer) in this process; the allocator is emptied and
its peak reset in between. Optimizer states are made by one update with zero gradients first, so that a single long step has them
too. Weights are drawn on the GPU, which is all that differs from a run. Held to: memory (max_memory_allocated) within max(5 %,
256 MiB), time within 10 %. Writes JSON and a picture; the table comes last.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf

from ringattn import cost
from ringattn.config import Config, from_dict
from ringattn.cost import GIB, Machine, Memory, StepTime, Work


def preset(name: str) -> dict[str, Any]:
    """The keys of configs/model/<name>.yaml."""
    found: Any = OmegaConf.to_container(OmegaConf.load(Path(__file__).resolve().parents[1] / "configs" / "model" / f"{name}.yaml"))
    return dict(found)


@dataclass(frozen=True)
class Case:
    """One training step: a preset with some keys changed. ``documents``: attention stays within the corpus's own documents."""

    model: str
    layers: int
    seq_len: int
    activation: str
    vocab: int
    documents: bool = False
    rows: int = 1
    micro_rows: int = 1
    virtual: int = 1
    layout: str = "zigzag"
    exchange: str = "ring"
    windows: tuple[int, ...] = (0,)
    head_dim: int = 0  # 0: the preset's
    kernel: str = "auto"

    @property
    def name(self) -> str:
        length = f"{self.seq_len >> 20}m" if self.seq_len >= 2**20 else f"{self.seq_len >> 10}k"
        extra = "-documents" * self.documents + (f"-rows{self.rows}x{self.micro_rows}" if self.rows > 1 else "")
        extra += f"-{self.layout}{self.virtual}" if self.virtual > 1 else ""
        extra += "-allgather" if self.exchange == "allgather" else ""
        extra += "-window" if self.windows != (0,) else ""
        return f"{self.model}x{self.layers}-{length}-{self.activation}{extra}"

    def config(self, folder: str) -> Config:
        """The run that this case is."""
        model = preset(self.model) | {"layers": self.layers, "vocab_size": self.vocab, "windows": list(self.windows)}
        model |= {"head_dim": self.head_dim} if self.head_dim else {}
        return from_dict({
            "name": "check", "resume": "never", "activation": self.activation, "kernel": self.kernel, "model": model,
            "data": {"kind": "stdlib", "mask_documents": self.documents},
            "train": {"steps": 10**6, "seq_len": self.seq_len, "rows": self.rows, "micro_rows": self.micro_rows, "val_every": 0},
            "parallel": {"virtual": self.virtual, "layout": self.layout, "exchange": self.exchange},
            "checkpoint": {"keep": 0}, "log": {"dir": folder, "console": "off", "tensorboard": False},
        })


SMALL, OLMO, LLAMA = 50304, 100352, 128256
K = 1024
CASES = [
    *(Case("125m", 12, 8 * K, policy, SMALL) for policy in ("none", "block", "attention_saved")),
    *(Case("1b", 16, 8 * K, policy, OLMO) for policy in ("none", "block", "attention_saved")),
    *(Case("1b", 4, 32 * K, policy, OLMO) for policy in ("none", "block", "attention_saved", "offload")),
    Case("1b", 16, 8 * K, "offload", OLMO),
    Case("8b", 2, 32 * K, "offload", LLAMA),
    Case("1b", 4, 128 * K, "offload", OLMO),
    Case("8b", 2, 8 * K, "none", LLAMA),
    Case("8b", 2, 32 * K, "attention_saved", LLAMA),
    Case("125m", 12, 32 * K, "none", SMALL),
    Case("125m", 12, 32 * K, "none", SMALL, documents=True),
    Case("125m", 12, 8 * K, "none", SMALL, rows=4, micro_rows=4),
    Case("125m", 12, 64 * K, "attention_saved", SMALL),
    Case("125m", 12, 64 * K, "attention_saved", SMALL, virtual=4),
    Case("350m", 24, 8 * K, "none", SMALL),
    Case("350m", 24, 32 * K, "attention_saved", SMALL),
    Case("350m", 6, 64 * K, "block", SMALL, windows=(4096, 0)),
    Case("1b", 16, 16 * K, "attention_saved", OLMO, virtual=2),
    Case("1b", 4, 32 * K, "attention_saved", OLMO, documents=True),
    Case("1b", 4, 32 * K, "block", OLMO, virtual=4, exchange="allgather"),
    Case("1b", 4, 32 * K, "block", OLMO, virtual=4, layout="striped"),
    Case("3b", 4, 16 * K, "attention_saved", LLAMA),
    Case("3b", 4, 64 * K, "block", LLAMA),
    Case("8b", 2, 16 * K, "block", LLAMA, rows=2),
    Case("125m", 12, 128 * K, "none", SMALL, documents=True),
    Case("1b", 4, 128 * K, "attention_saved", OLMO),
    Case("1b", 4, 128 * K, "block", OLMO),
    Case("1b", 2, 128 * K, "block", OLMO, virtual=8),
    Case("350m", 6, 128 * K, "block", SMALL),
    Case("8b", 2, 128 * K, "block", LLAMA),
    Case("8b", 2, 256 * K, "attention_saved", LLAMA, documents=True),
    Case("1b", 4, 512 * K, "attention_saved", OLMO, documents=True),
    Case("125m", 4, 256 * K, "attention_saved", SMALL),
    Case("1b", 2, 256 * K, "attention_saved", OLMO),
    Case("125m", 12, 1024 * K, "block", SMALL, documents=True),
    Case("1b", 4, 1024 * K, "block", OLMO, documents=True),
    Case("1b", 1, 512 * K, "attention_saved", OLMO),
    Case("125m", 1, 1024 * K, "attention_saved", SMALL),
]


def quick_values(model: Any, seed: int) -> None:
    """Weights from the table, drawn on the device instead of by the host's reproducible generator (which takes seconds a layer)."""
    from ringattn.model import init

    torch.manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            kind, value = init.initial_rule(init.parameter_name(name), model.cfg)
            local = parameter.to_local()
            local.fill_(value) if kind == "constant" else local.normal_(0, value)


def measure(case: Case, device: torch.device, folder: str, always_warm: bool = False) -> dict[str, Any]:
    """Run one case. Bytes of each phase are what the allocator held at its end (``*_held``) and at most (``*_peak``)."""
    from ringattn.training.loop import train_step
    from ringattn.training.run import assemble
    from ringattn.training.stop import StopSignals

    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run = assemble(case.config(folder), device)
    make_states(run)
    torch.cuda.synchronize()
    phases: dict[str, int] = {"before": before, "static": torch.cuda.memory_allocated()}

    def phase(name: str) -> None:
        phases[f"{name}_held"] = max(phases.get(f"{name}_held", 0), torch.cuda.memory_allocated())
        phases[f"{name}_peak"] = max(phases.get(f"{name}_peak", 0), torch.cuda.max_memory_allocated())
        torch.cuda.reset_peak_memory_stats()

    run.model.register_forward_pre_hook(lambda *_: phase("batch"))
    run.model.register_forward_hook(lambda *_: phase("forward"))
    seconds: list[float] = []
    pairs: list[int] = []
    place = run.batches.place
    expected_s = expected(run)

    def watched(batch: Any) -> Any:
        micro = place(batch)
        pairs.extend(micro.pairs)
        return micro

    run.batches.place = watched  # type: ignore[method-assign]
    with StopSignals() as signals:
        warm = int(always_warm) if expected_s > 4 else 1 if expected_s > 1 else 2
        steps = 1 if expected_s > 1 else 3 if expected_s > 0.15 else 6
        for i in range(warm + steps):
            torch.cuda.synchronize()
            if i == warm:
                pairs.clear()
            started = time.perf_counter()
            record, _ = train_step(run, signals, lambda *_: phase("backward"))
            torch.cuda.synchronize()
            run.step += 1
            if i >= warm:
                seconds.append(time.perf_counter() - started)
            phase("update")
    run.close()
    del run.batches.place  # the wrapper and the batches would keep each other alive
    windows = len(run.model_config.distinct_windows)
    return {
        "name": case.name, "case": case.__dict__ | {"windows": list(case.windows)},
        # (documents differ from step to step: time and visible pairs are means over the same steps)
        "step_s": statistics.mean(seconds), "steps_s": seconds,
        "pairs": [sum(pairs[w::windows]) // len(seconds) for w in range(windows)], "kernel": run.kernel, "loss": record["loss"],
        "peak": max(v for k, v in phases.items() if k.endswith("_peak")), **phases,
    }


def make_states(run: Any) -> None:
    """Optimizer states, which are otherwise made at the end of the first step, by an update with zero gradients."""
    for parameter in run.model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    run.optimizer.step()
    run.optimizer.zero_grad()


def expected(run: Any) -> float:
    """A rough time of a step, for the number of steps to take only."""
    c, m = run.config, run.model_config
    documents = [2**13] * (c.train.seq_len // 2**13) if c.data.mask_documents else None
    pairs = [c.train.rows * cost.visible_pairs(c.train.seq_len, window=w, documents=documents) for w in m.distinct_windows]
    flops = cost.step_flops(m, tokens=run.tokens_per_step, pairs=pairs, policy=c.activation)
    return (flops.total + flops.recompute) / 400e12


def measure_steps(case: Case, device: torch.device, folder: str, steps: int = 10) -> float:
    """Median seconds of a step, for scripts/profile_machine.py."""
    prepare()
    from ringattn.training.loop import train_step
    from ringattn.training.run import assemble
    from ringattn.training.stop import StopSignals

    run = assemble(case.config(folder), device)
    taken = []
    with StopSignals() as signals:
        for _ in range(steps + 3):
            torch.cuda.synchronize()
            started = time.perf_counter()
            train_step(run, signals)
            torch.cuda.synchronize()
            taken.append(time.perf_counter() - started)
            run.step += 1
    run.close()
    return statistics.median(taken[3:])


def prepare() -> None:
    """Make the start of a run quick: one corpus for all of them, weights drawn on the device."""
    from ringattn.data import dataset
    from ringattn.model.transformer import Transformer

    dataset.read_corpus = lambda cfg: cached_corpus(cfg.kind)
    Transformer.initialise = quick_values  # type: ignore[method-assign]


@contextmanager
def process_group_of_check() -> Iterator[torch.device]:
    """The process group of a run, one process unless torchrun says otherwise."""
    from ringattn.training.launch import Launch, process_group

    with tempfile.TemporaryDirectory() as folder, process_group(CASES[0].config(folder), Launch.from_environment()) as device:
        yield device


def measure_all(cases: list[Case], limit_s: float, path: Path, warm: bool = False) -> list[dict[str, Any]]:
    """Measure what the time allows; the file is written after each case."""
    from ringattn.ring import schedule

    started = time.perf_counter()
    prepare()
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder, process_group_of_check() as device:
        for case in cases:
            if time.perf_counter() - started > limit_s:
                print(f"left out for time: {case.name} and what follows", flush=True)
                break
            begun = time.perf_counter()
            try:
                results.append(measure(case, device, folder, warm))
            except torch.OutOfMemoryError as error:
                results.append({"name": case.name, "case": case.__dict__, "error": str(error).splitlines()[0]})
            schedule._HANDLES.clear()
            gc.collect()
            path.write_text(json.dumps({"device": torch.cuda.get_device_name(), "cases": results}, indent=1))
            last = results[-1]
            print(
                f"{case.name:<50} {last.get('step_s', 0):8.4f} s {last.get('peak', 0) / GIB:8.3f} GiB "
                f"left over {(torch.cuda.memory_allocated()) / GIB:.3f} took {time.perf_counter() - begun:.1f} s {last.get('error', '')}",
                flush=True,
            )
    return results


@functools.cache
def cached_corpus(kind: str) -> Any:
    """The corpus, read once for all cases."""
    from ringattn.data.corpus import read_stdlib

    assert kind == "stdlib"
    return read_stdlib()


def predicted(row: dict[str, Any], machine: Machine) -> tuple[Work, Memory, StepTime]:
    """The cost model's answer for a measured case; its documents by the visible pairs that were counted."""
    case = Case(**{k: tuple(v) if isinstance(v, list) else v for k, v in row["case"].items()})
    config = case.config("runs")
    whole = Work(config.model, case.seq_len)
    full = [i for i, w in enumerate(config.model.distinct_windows) if w == 0]
    documents = round(2 * row["pairs"][full[0]] / (case.rows * case.seq_len)) if case.documents and full else 0
    work = cost.work_of(config, whole.model, 1, compute_bytes=2, documents=documents)
    return work, cost.memory(work), cost.step_time(work, machine)


def compare(rows: list[dict[str, Any]], machine: Machine) -> list[dict[str, Any]]:
    """Measured and predicted side by side; ``memory_ok`` within max(5 %, 256 MiB), ``time_ok`` within 10 %."""
    table = []
    for row in rows:
        if "error" in row:
            continue
        _, memory, time_ = predicted(row, machine)
        off = memory.peak - row["peak"]
        table.append({
            "name": row["name"], "measured_gib": row["peak"] / GIB, "predicted_gib": memory.peak / GIB, "phase": memory.phase,
            "memory_ok": abs(off) <= max(0.05 * row["peak"], 256 * 2**20), "measured_s": row["step_s"], "predicted_s": time_.total_s,
            "time_ok": abs(time_.total_s / row["step_s"] - 1) <= 0.1, "host_bound": time_.host_bound,
        })
    return table


def print_table(table: list[dict[str, Any]]) -> None:
    """One line a case, then the score."""
    print(f"{'case':<46} {'GiB measured':>12} {'predicted':>10} {'off':>7}   {'s measured':>10} {'predicted':>10} {'off':>7}")
    for r in table:
        memory_off, time_off = r["predicted_gib"] / r["measured_gib"] - 1, r["predicted_s"] / r["measured_s"] - 1
        print(
            f"{r['name']:<46} {r['measured_gib']:12.2f} {r['predicted_gib']:10.2f} {memory_off:+7.1%}{'   ' if r['memory_ok'] else ' ! '}"
            f"{r['measured_s']:10.4f} {r['predicted_s']:10.4f} {time_off:+7.1%}{'' if r['time_ok'] else ' !'}"
            f"{' (host)' if r['host_bound'] else ''}"
        )
    good = [sum(r[k] for r in table) for k in ("memory_ok", "time_ok")]
    print(f"memory within max(5 %, 256 MiB): {good[0]} of {len(table)}; time within 10 %: {good[1]} of {len(table)}")


def draw(table: list[dict[str, Any]], path: Path) -> None:
    """Two scatter plots on logarithmic axes, the allowed band shaded."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.8), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, key, unit, band, title in zip(
        figure.subplots(1, 2), ("gib", "s"), ("GiB", "seconds"), (0.05, 0.1), ("peak memory", "step time"), strict=True
    ):
        x, y = ([r[f"{kind}_{key}"] for r in table] for kind in ("measured", "predicted"))
        good = [r["memory_ok" if key == "gib" else "time_ok"] for r in table]
        ends = [min(x) * 0.8, max(x) * 1.25]
        slack = 0.25 if key == "gib" else 0.0
        axes.fill_between(ends, [e - max(e * band, slack) for e in ends], [e + max(e * band, slack) for e in ends], color="#dddddd")
        axes.plot(ends, ends, color="#888888", linewidth=0.8)
        axes.scatter(x, y, c=["#228833" if g else "#ee6677" for g in good], s=16, zorder=3)
        axes.set(xscale="log", yscale="log", xlabel=f"measured, {unit}", ylabel=f"predicted, {unit}")
        axes.set_title(f"{title}: {sum(good)} of {len(good)} in the band")
    figure.savefig(path, dpi=110)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default="", help="only cases whose name contains this")
    parser.add_argument("--warm", action="store_true", help="one step before each measured one, however long it is")
    parser.add_argument("--limit-s", type=float, default=600, help="start no further case after this time")
    parser.add_argument("--json", type=Path, default=Path("predict_check.json"))
    parser.add_argument("--from", dest="old", type=Path, help="compare this measurement instead of taking one")
    parser.add_argument("--machine", default="h200", help="profile to predict with")
    parser.add_argument("--picture", type=Path, default=Path("predict_check.png"))
    args = parser.parse_args()
    if args.old is not None:
        rows = json.loads(args.old.read_text())["cases"]
    else:
        rows = measure_all([c for c in CASES if args.cases in c.name], args.limit_s, args.json, args.warm)
    table = compare([r for r in rows if args.cases in r["name"]], cost.find_machine(args.machine))
    if table:
        draw(table, args.picture)
        print_table(table)


if __name__ == "__main__":
    main()
