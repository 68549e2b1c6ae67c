"""Memory, step time and throughput of real training steps on the GPU at hand, and how far the context reaches.

    python scripts/bench_memory.py                                  # policies, throughput by length, loss head, presets: some minutes
    python scripts/bench_memory.py --parts policies,head            # some of: head, rows, policies, throughput, gpt, presets
    python scripts/bench_memory.py --million --layers 2             # one full step at 1,048,576 tokens of 1b's width, gradient sampled
    python scripts/bench_memory.py --million --layers 2 --model 8b --activation offload

Every step is the training loop's own (forward, backward, clipping, update) at micro-batch one on Python's standard library as text.
Rates are the model's own FLOPs (visible pairs, backward 2.5 x forward for attention, nothing recomputed counted) over the time. Weights
are drawn on the GPU. A JSON file grows with every part; a table ends the run, and a picture is drawn of what there is.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import torch
from memory_parts import head_error, head_peak, head_time, row_times
from omegaconf import OmegaConf
from predict_check import make_states, prepare, preset
from torch import Tensor

from ringattn import cost
from ringattn.config import Config, from_dict
from ringattn.cost import GIB
from ringattn.training.launch import Launch, process_group
from ringattn.training.loop import train_step
from ringattn.training.run import Run, assemble
from ringattn.training.stop import StopSignals

K = 1024
# The 1.3B model of FlashAttention-2's end-to-end table (arXiv 2307.08691, table 1), with a SwiGLU of as many parameters.
GPT = {"name": "gpt-1.3b", "width": 2048, "layers": 24, "heads": 16, "kv_heads": 16, "head_dim": 128, "ffn_width": 5504, "tied": True,
       "vocab_size": 50304}  # fmt: skip
VOCAB = {"125m": 50304, "350m": 50304, "1b": 100352, "3b": 128256, "8b": 128256, "13b": 128256}


def make_config(folder: str, model: str | dict[str, Any], seq_len: int, changes: dict[str, Any] | None = None) -> Config:
    """The run to measure: a preset by name or a whole model; ``changes``: dotted keys."""
    if isinstance(model, str):
        model = preset(model) | {"vocab_size": VOCAB[model]}
    raw = OmegaConf.create({
        "name": "bench", "resume": "never", "model": model, "data": {"kind": "stdlib"}, "checkpoint": {"keep": 0},
        "train": {"steps": 10**6, "seq_len": seq_len, "rows": 1, "val_every": 0}, "schedule": {"warmup_steps": 10},
        "log": {"dir": folder, "console": "off", "tensorboard": False},
    })  # fmt: skip
    for key, value in (changes or {}).items():
        OmegaConf.update(raw, key, value)
    plain: Any = OmegaConf.to_container(raw)
    return from_dict(plain)


@contextmanager
def built(model: str | dict[str, Any], seq_len: int, changes: dict[str, Any] | None = None) -> Iterator[Run]:
    """A run, ready to step."""
    with tempfile.TemporaryDirectory() as folder:
        run = None
        try:
            run = assemble(make_config(folder, model, seq_len, changes), torch.device("cuda", torch.cuda.current_device()))
            yield run
        finally:
            if run is not None:
                run.close()


def flops(run: Run, pairs: list[int] | None = None) -> float:
    """FLOPs of a step in the convention of this page; documents are masked only where ``pairs`` are given."""
    c, m = run.config, run.model_config
    pairs = pairs or [c.train.rows * cost.visible_pairs(c.train.seq_len, window=w) for w in m.distinct_windows]
    return cost.step_flops(m, tokens=run.tokens_per_step, pairs=pairs).total


def measure(model: str | dict[str, Any], seq_len: int, changes: dict[str, Any], steps: int = 3) -> dict[str, Any]:
    """Median step time after one warm-up (none if ``steps`` is 1), peak memory, rate, and the last loss."""
    with built(model, seq_len, {"data.mask_documents": False} | changes) as run, StopSignals() as signals:
        times = []
        for i in range(steps):
            if i == 1:
                torch.cuda.reset_peak_memory_stats()
            torch.cuda.synchronize()
            started = time.perf_counter()
            record, _ = train_step(run, signals)
            run.step += 1
            torch.cuda.synchronize()
            times.append(time.perf_counter() - started)
        seconds = median(times[1:] or times)
        done = flops(run)
        return {
            "seq_len": seq_len, "layers": run.model_config.layers, "activation": run.config.activation, "step_s": seconds,
            "tokens_per_s": run.tokens_per_step / seconds, "tflops": done / seconds / 1e12, "loss": record["loss"],
            "peak_gib": torch.cuda.max_memory_allocated() / GIB, "times_s": times,
        }  # fmt: skip


# --- parts ----------------------------------------------------------------------------------------------------------------


def policies(seq_len: int = 128 * K, layers: int = 4) -> list[dict[str, Any]]:
    """The four activation policies on the 1b shape."""
    return [
        attempt(lambda p=policy: measure("1b", seq_len, {"model.layers": layers, "activation": p}))
        for policy in ("none", "attention_saved", "block", "offload")
    ]


def throughput(lengths: list[int], layers: int = 2) -> list[dict[str, Any]]:
    """Rate by length, attention_saved, on the 1b shape."""
    change = {"model.layers": layers, "activation": "attention_saved"}
    return [attempt(lambda s=s: measure("1b", s, change, steps=4 if s < 200 * K else 2)) for s in lengths]


def gpt(rows: int = 2) -> list[dict[str, Any]]:
    """MFU at 8K of the 1.3B GPT shape, blockwise or not, eager and compiled."""
    found = []
    for chunk, compiled in ((8192, False), (0, False), (0, True)):
        change = {"train.rows": rows, "train.micro_rows": rows, "compile": compiled}
        one = attempt(lambda c=chunk, x=change: measure(GPT | {"ffn_chunk": c, "loss_chunk": 4096}, 8 * K, x, steps=6))
        if "step_s" in one:
            with tempfile.TemporaryDirectory() as folder:
                model = make_config(folder, GPT, 8 * K).model
            peak = cost.peak_flops(torch.cuda.get_device_name()) or math.nan
            for convention in ("palm", "flash"):
                total = cost.step_flops(model, tokens=rows * 8 * K, seq_len=8 * K, convention=convention).total  # type: ignore[arg-type]
                one[f"mfu_{convention}"] = total / one["step_s"] / peak
        found.append(one | {"ffn_chunk": chunk, "compile": compiled})
    return found


def presets(names: list[str], limit_s: float = 60.0) -> list[dict[str, Any]]:
    """The longest context, a power of two or 1.5 times one, whose step fits. Attention stays within documents here: memory is the same,
    and a step takes seconds instead of minutes."""
    found = []
    for name in names:
        started, best, length, failed = time.time(), None, 64 * K, None
        while time.time() - started < limit_s:
            change = {"activation": "attention_saved", "data.mask_documents": True}
            one = attempt(lambda n=name, s=length, c=change: measure(n, s, c, steps=1))
            if "error" in one:
                failed = length
                break
            best, length = one, length * 2
        if best is not None and failed is not None and time.time() - started < limit_s:
            one = attempt(lambda n=name, s=best["seq_len"] * 3 // 2, c=change: measure(n, s, c, steps=1))
            best = best if "error" in one else one
        best = {k: best[k] for k in ("seq_len", "step_s", "peak_gib", "layers")} if best else {"error": one["error"]}
        found.append({"preset": name, "stopped_at": failed} | best)
        print(json.dumps(found[-1]), flush=True)
    return found


def million(layers: int, model: str, activation: str, seq_len: int, rows: int = 1024) -> dict[str, Any]:
    """One full step; the gradients of layer 0's attention, KV head 0 with its query heads, are compared with fp64 at sampled places: dq of
    the last ``rows`` rows and of 64 random ones, dk and dv of the last ``rows`` keys (which only those rows see)."""
    seen: dict[str, Tensor] = {}
    picked = torch.randint(seq_len, (64,))
    with built(model, seq_len, {"model.layers": layers, "activation": activation, "data.mask_documents": False}) as run:
        attention = run.model.blocks[0].attention
        attend = attention.attend

        def spy(q: Tensor, k: Tensor, v: Tensor, handle: int, sinks: Tensor | None) -> Tensor:
            out = attend(q, k, v, handle, sinks)
            if not seen:
                group = q.shape[2] // k.shape[2]
                for name, t in (("q", q), ("k", k), ("v", v), ("out", out)):
                    heads = group if name in ("q", "out") else 1
                    seen[name] = t[0, :, :heads].detach().clone()
                    t.register_hook(lambda g, n=name, h=heads: seen.__setitem__(f"d{n}", g[0, :, :h].detach().clone()))
            return out

        attention.attend = spy
        make_states(run)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.synchronize()
        started = time.perf_counter()
        with StopSignals() as signals:
            record, _ = train_step(run, signals)
        torch.cuda.synchronize()
        seconds = time.perf_counter() - started
        result = {
            "model": model, "seq_len": seq_len, "layers": layers, "activation": activation, "step_s": seconds, "loss": record["loss"],
            "grad_norm": record["grad_norm"], "tflops": flops(run) / seconds / 1e12, "peak_gib": torch.cuda.max_memory_allocated() / GIB,
        }  # fmt: skip
        attention.attend = attend
    return result | {"relative_error": sampled_errors(seen, picked.to(seen["q"].device), rows)}


def sampled_errors(seen: dict[str, Tensor], picked: Tensor, rows: int) -> dict[str, float]:
    """Relative L2 errors of the sampled gradients against fp64 arithmetic on the same q, output gradient [S, G, D] and k, v [S, 1, D]."""
    s, group, dim = seen["q"].shape
    last = torch.arange(s - rows, s, device=picked.device)
    where = torch.cat([last, picked])
    k, v = seen["k"][:, 0].double(), seen["v"][:, 0].double()
    scale = 1 / math.sqrt(dim)
    found = {n: torch.empty(len(where), group, dim, dtype=torch.float64, device=picked.device) for n in ("out", "dq")}
    d_k, d_v = (torch.zeros(rows, 1, dim, dtype=torch.float64, device=picked.device) for _ in range(2))
    for head in range(group):
        for at in torch.arange(len(where), device=picked.device).split(128):
            index = where[at]
            q, d_out = seen["q"][index, head].double(), seen["dout"][index, head].double()
            scores = (q @ k.t()).mul_(scale)
            scores.masked_fill_(torch.arange(s, device=index.device)[None] > index[:, None], -math.inf)
            p = scores.softmax(1)
            out = p @ v
            d_scores = (d_out @ v.t()).sub_((d_out * out).sum(1, keepdim=True)).mul_(p).mul_(scale)
            found["out"][at, head], found["dq"][at, head] = out, d_scores @ k
            own = at < rows  # the random rows may see other keys, or be among the last ones a second time
            d_k[:, 0] += d_scores[own, -rows:].t() @ q[own]
            d_v[:, 0] += p[own, -rows:].t() @ d_out[own]

    def error(name: str, index: Tensor, want: Tensor) -> float:
        return float((seen[name][index].double() - want).norm() / want.norm())

    return {"out": error("out", where, found["out"]), "dq": error("dq", where, found["dq"]), "dk": error("dk", last, d_k),
            "dv": error("dv", last, d_v)}  # fmt: skip


def attempt(work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The result, or what went wrong (running out of memory, mostly), so that the other parts still run."""
    try:
        result = work()
    except torch.OutOfMemoryError as error:
        result = {"error": "out of memory: " + str(error).split(". ")[0]}
    except Exception as error:
        result = {"error": f"{type(error).__name__}: {error}"[:400]}
    gc.collect()
    torch.cuda.empty_cache()
    print(json.dumps({k: v for k, v in result.items() if k != "times_s"}), flush=True)
    return result


def table(results: dict[str, Any]) -> str:
    """What has been measured, as lines."""
    lines = []
    for part, found in results.items():
        lines.append(f"{part}:")
        for one in found if isinstance(found, list) else [found]:
            lines.append("  " + ", ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in one.items() if k != "times_s"))
    return "\n".join(lines)


def picture(results: dict[str, Any], path: Path) -> None:
    """Rate by length on the left, time and memory by activation policy on the right; only what there is."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    speed = [r for r in results.get("throughput", []) if "step_s" in r]
    speed += [results["million"]] if "step_s" in results.get("million", {}) else []
    kept = [r for r in results.get("policies", []) if "step_s" in r]
    if not speed and not kept:
        return
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.8))
    left.plot([r["seq_len"] / K for r in speed], [r["tflops"] for r in speed], "o-")
    left.set(xscale="log", xlabel="tokens (thousands)", ylabel="model TFLOP/s", title="1b shape, attention_saved", ylim=(0, None))
    names = [r["activation"] for r in kept]
    right.bar([i - 0.2 for i in range(len(kept))], [r["step_s"] for r in kept], 0.4, label="step, s")
    other = right.twinx()
    other.bar([i + 0.2 for i in range(len(kept))], [r["peak_gib"] for r in kept], 0.4, color="tab:orange", label="peak, GiB (right)")
    right.set_xticks(range(len(kept)), names)
    right.set_title("activation policies, 128K tokens, 4 layers")
    handles = [h for axis in (right, other) for h in axis.get_legend_handles_labels()[0]]
    right.legend(handles=handles, fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default="head,rows,policies,throughput,gpt,presets")
    parser.add_argument("--million", action="store_true", help="one step at 1,048,576 tokens, instead of the parts unless --parts is given")
    parser.add_argument("--layers", type=int, default=2, help="layers of --million and of the throughput part")
    parser.add_argument("--model", default="1b", choices=list(VOCAB), help="whose width --million takes")
    parser.add_argument("--seq-len", type=int, default=1024 * K, help="tokens of --million, for a trial with fewer")
    parser.add_argument("--activation", default="attention_saved", help="activation policy of --million")
    parser.add_argument("--lengths", default="32768,131072,524288")
    parser.add_argument("--presets", default="125m,350m,1b,3b")
    parser.add_argument("--out", type=Path, default=Path("bench_memory.json"), help="JSON; the picture lies beside it")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("bench_memory.py measures a GPU, and PyTorch sees none here")
    lengths = [int(x) for x in args.lengths.split(",")]
    parts: dict[str, Callable[[], Any]] = {
        "head": lambda: [head_error(), head_time(8 * K, 2048, 128_256, [0, 1024, 2048, 4096]), head_peak(1024 * K, 2048, 128_256)],
        "rows": row_times, "policies": policies, "throughput": lambda: throughput(lengths, args.layers), "gpt": gpt,
        "presets": lambda: presets(args.presets.split(",")),
        "million": lambda: attempt(lambda: million(args.layers, args.model, args.activation, args.seq_len)),
    }  # fmt: skip
    chosen = [p for p in args.parts.split(",") if p and not (args.million and args.parts == parser.get_default("parts"))]
    unknown = [p for p in chosen if p not in parts]
    if unknown:
        raise SystemExit(f"--parts={args.parts}: {', '.join(unknown)} is none of {', '.join(parts)}")
    prepare()
    with tempfile.TemporaryDirectory() as folder, process_group(make_config(folder, GPT, 8 * K), Launch.from_environment()):
        results = run_parts(parts, chosen + ["million"] * args.million, args.out)
    picture(results, args.out.with_suffix(".png"))
    print(table(results))


def run_parts(parts: dict[str, Callable[[], Any]], chosen: list[str], out: Path) -> dict[str, Any]:
    """The results of the chosen parts, written to ``out`` after each."""
    results: dict[str, Any] = {}
    for part in chosen:
        started = time.time()
        results[part] = parts[part]()
        out.write_text(json.dumps({"device": torch.cuda.get_device_name(), "torch": torch.__version__} | results, indent=1))
        print(f"-- {part}: {time.time() - started:.1f} s", flush=True)
        gc.collect()
        torch.cuda.empty_cache()
    return results


if __name__ == "__main__":
    main()
