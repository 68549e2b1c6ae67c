"""One HTML page about a run: curves, the ring, the config, where it came from. Self-contained: no script, no font, no picture beside it.

Training writes ``report.html`` into the run's folder when it ends; ``scripts/report.py`` makes it again, also while a run is going on.
"""

from __future__ import annotations

import json
from html import escape
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import yaml

from ringattn.config import Config, TrainConfig, flatten, from_dict, to_dict
from ringattn.data.config import DataConfig
from ringattn.model.config import ModelConfig
from ringattn.ring.layout import Layout
from ringattn.ring.schedule import make_schedule
from ringattn.training import provenance
from ringattn.training.charts import THEME, Line, line_chart
from ringattn.training.metrics import FILE as METRICS
from ringattn.training.metrics import read_lines
from ringattn.training.placement import PLANNED
from ringattn.training.ring_picture import PicturedRing, draw_holders, draw_hops

REPORT = "report.html"
LARGEST_RING = 64  # of larger ones the hops are not worked out: a report must be quick
STYLE = THEME + """
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1180px; padding: 24px; background: var(--paper); color: var(--ink);
       font: 15px/1.5 system-ui, -apple-system, "Segoe UI", sans-serif; }
h1 { font-size: 24px; margin: 0; } h2 { font-size: 17px; margin: 32px 0 10px; }
p { margin: 4px 0; } .soft { color: var(--soft); }
.cards { display: flex; flex-wrap: wrap; gap: 10px; margin: 18px 0; }
.card { background: var(--card); border: 1px solid var(--grid); border-radius: 8px; padding: 8px 14px; min-width: 120px; }
.card b { display: block; font-size: 18px; font-variant-numeric: tabular-nums; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(440px, 100%), 1fr)); gap: 14px; }
.figure { background: var(--card); border: 1px solid var(--grid); border-radius: 8px; padding: 6px; overflow-x: auto; margin-bottom: 14px; }
.charts .figure { margin: 0; } .figure svg { display: block; width: 100%; height: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: 3px 18px 3px 0; border-bottom: 1px solid var(--grid); vertical-align: top; overflow-wrap: anywhere; }
th { font-weight: 600; } td.old { color: var(--soft); }
code, pre { font: 13px/1.45 ui-monospace, "SF Mono", Menlo, Consolas, monospace; }
pre { background: var(--card); border: 1px solid var(--grid); border-radius: 8px; padding: 10px 14px;
      white-space: pre-wrap; overflow-wrap: anywhere; }
summary { cursor: pointer; color: var(--soft); }
"""


def write_report(folder: Path) -> Path | None:
    """Write the page of the run in ``folder``; None if the run has no metrics yet. Raises OSError or ValueError if it cannot."""
    lines = read_lines(folder / METRICS)
    if not lines:
        return None
    path, temporary = folder / REPORT, folder / ".report.tmp"
    temporary.write_text(build_report(folder, lines), encoding="utf-8")
    temporary.replace(path)
    return path


def build_report(folder: Path, lines: list[dict[str, Any]]) -> str:
    """The page as text, from the files of a run and its ``lines`` of metrics. Raises ValueError where config.yaml is not a run's."""
    raw = yaml.safe_load((folder / "config.yaml").read_text())
    path = folder / provenance.FILE
    facts: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    config = from_dict(_without_machine(raw), world_size=world_size(raw, facts))
    title = f"{raw['name']}: ringattn run"
    started = escape(str(facts.get("started", "at an unknown time")))
    body = [
        f"<h1>{escape(str(raw['name']))}</h1>",
        f'<p class="soft">step {lines[-1]["step"]:,} of {config.train.steps:,}; started {started}</p>',
        _cards(lines),
        '<div class="charts">', *(_figure(chart) for chart in charts([("", lines)])), "</div>",
        "<h2>The ring</h2>", *_ring(config, facts),
        "<h2>Changed from the defaults</h2>", difference_table(flatten(to_dict(defaults())), flatten(raw), ("default", "this run")),
        "<details><summary>the whole config</summary>", f"<pre>{escape(yaml.safe_dump(raw, sort_keys=False))}</pre></details>",
        "<h2>Again</h2>", *_again(raw, facts),
        "<h2>Where it ran</h2>", _where(facts),
    ]
    return page(title, body)


def page(title: str, body: list[str]) -> str:
    """A whole HTML page."""
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1"><title>{escape(title)}</title>'
    lines = ["<!doctype html>", f'<html lang="en"><head>{head}', f"<style>{STYLE}</style></head>", "<body>", *body, "</body></html>", ""]
    return "\n".join(lines)


def charts(runs: list[tuple[str, list[dict[str, Any]]]]) -> list[str]:
    """Loss and validation, throughput, memory, gradient and learning rate of one or several (name, metrics)."""
    both = [("loss (nats a target)", (("loss", "training"), ("val_loss", "validation")))]
    each = [("training loss (nats a target)", (("loss", ""),)), ("validation loss (nats a target)", (("val_loss", ""),))]
    wanted: list[tuple[str, tuple[tuple[str, str], ...]]] = [
        *(both if len(runs) == 1 else each),
        ("tokens a second", (("tokens_per_s", ""),)),
        ("memory of the fullest rank (GiB)", (("mem_gib", ""),)),
        ("gradient norm before clipping", (("grad_norm", ""),)),
        ("learning rate", (("lr", ""),)),
        ("model FLOPs utilisation", (("mfu", ""),)),
    ]
    drawn = []
    for title, fields in wanted:
        curves = []
        for name, lines in runs:
            for key, what in fields:
                points = [(float(n["step"]), float(n[key])) for n in lines if isinstance(n.get(key), int | float)]
                if points:
                    curves.append(Line(f"{name} {what}".strip() or key, points, dots=key == "val_loss"))
        if curves:
            drawn.append(line_chart(title, curves))
    return drawn


def differing_keys(dicts: list[dict[str, Any]]) -> list[str]:
    """Keys whose values are not the same in all of them, in the order in which they come."""
    return [k for k in dict.fromkeys(k for d in dicts for k in d) if any(d.get(k) != dicts[0].get(k) for d in dicts)]


def difference_table(before: dict[str, Any], after: dict[str, Any], heads: tuple[str, ...], *more: dict[str, Any]) -> str:
    """Keys whose values differ among the dictionaries, as a table."""
    dicts = [before, after, *more]
    keys = differing_keys(dicts)
    if not keys:
        return "<p>nothing</p>"
    rows = "".join(
        f"<tr><td><code>{escape(k)}</code></td>"
        + "".join(f"<td{' class=old' if i == 0 else ''}><code>{escape(shown(d.get(k)))}</code></td>" for i, d in enumerate(dicts)) + "</tr>"
        for k in keys
    )
    return f"<table><tr><th>key</th>{''.join(f'<th>{escape(h)}</th>' for h in heads)}</tr>{rows}</table>"


def shown(value: Any) -> str:
    """A value as one types it."""
    if isinstance(value, list):
        return f"[{', '.join(map(shown, value))}]"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else "''" if value == "" else str(value)


def defaults() -> Config:
    """The config of a run that was given nothing (train.steps as in configs/config.yaml)."""
    return Config(TrainConfig(steps=1000), ModelConfig(name="debug", init_std=0.06), DataConfig())


def world_size(raw: dict[str, Any], facts: dict[str, Any]) -> int:
    """Processes of the run: as remembered, else as the config says."""
    p = raw["parallel"]
    return int(facts.get("world_size") or (p["ring"] or 1) * p["shard"] * p["replicate"])


def _without_machine(raw: dict[str, Any]) -> dict[str, Any]:
    """The config without what only the run's own machine can judge."""
    return raw | {"device": "auto", "log": {k: v for k, v in raw["log"].items() if k not in ("wandb",)}}


def _figure(picture: str) -> str:
    return f'<div class="figure">{picture}</div>'


def _cards(lines: list[dict[str, Any]]) -> str:
    last, half = lines[-1], lines[len(lines) // 2 :]
    pace = sorted(float(n["tokens_per_s"]) for n in half)[len(half) // 2]
    values = [("loss", f"{last['loss']:.4f}")]
    validated = [n for n in lines if "val_loss" in n]
    if validated:
        values.append(("validation", f"{validated[-1]['val_loss']:.4f}"))
    values += [("tokens", f"{last['tokens']:,}"), ("tokens a second", f"{pace:,.0f}")]
    values.append(("memory", f"{max(n['mem_gib'] for n in lines):.2f} GiB"))
    if "mfu" in last:
        values.append(("MFU", f"{last['mfu']:.1%}"))
    return '<div class="cards">' + "".join(f'<div class="card"><span class="soft">{k}</span><b>{v}</b></div>' for k, v in values) + "</div>"


def _ring(config: Config, facts: dict[str, Any]) -> list[str]:
    """Holders, and the hops of each distinct window for the first row's documents."""
    p, t = config.parallel, config.train
    virtual, size = p.virtual, config.ring_processes(world_size(to_dict(config), facts)) * p.virtual
    if p.layout in PLANNED:
        return ["<p>the layout is planned anew for each batch</p>"]
    layout = Layout(p.layout, config.padded_len(world_size(to_dict(config), facts)), size)
    parts = [_figure(draw_holders(layout, virtual))]
    if size > LARGEST_RING:
        return [*parts, f'<p class="soft">hops of rings above {LARGEST_RING} shards are not drawn here; scripts/show_schedule.py does</p>']
    lengths = facts.get("documents")
    documents = None
    if lengths and sum(map(abs, lengths)) == t.seq_len:
        ids = torch.tensor([-1 if n < 0 else i for i, n in enumerate(lengths)])
        documents = ids.repeat_interleave(torch.tensor([abs(n) for n in lengths]))
        documents = F.pad(documents, (0, layout.seq_len - t.seq_len), value=-1)
        parts.append(f'<p class="soft">hops of the first row; documents in its mask: {len(lengths)}</p>')
    for window in config.model.distinct_windows:
        schedule = make_schedule(layout, PicturedRing(size, p.inner), window=window or None, documents=documents, exchange=p.exchange)
        name = f"window {window:,}" if window else "full causal attention"
        parts.append(_figure(draw_hops(schedule, f"who works on what: {name}", virtual)))
    return parts


def _again(raw: dict[str, Any], facts: dict[str, Any]) -> list[str]:
    if "command" not in facts:
        return [f"<p>the command was not recorded; the config above is in <code>{escape(raw['log']['dir'])}</code></p>"]
    git, folder = facts.get("git"), escape(str(facts.get("folder", "")))
    lines = [f"<p class=soft>in {folder}{', at the commit below' if git else ''}; another name= keeps this run as it is</p>"]
    if " -m " in facts["command"].partition("ringattn.train")[2] or "--multirun" in facts["command"]:
        lines.append(f"<p class=soft>a sweep: this is its job {escape(str(raw['name']).rpartition('-')[2])}</p>")
    return [*lines, f"<pre>{escape(facts['command'])}</pre>"]


def _where(facts: dict[str, Any]) -> str:
    rows = {k: facts[k] for k in ("host", "platform", "world_size", "device", "kernel") if k in facts} | facts.get("versions", {})
    git = facts.get("git")
    if git:
        changed = git["changed"]
        named = ", ".join(changed[:12]) + (", ..." if len(changed) > 12 else "")
        rows["git"] = git["commit"] + (f", and changes to {named}" if changed else ", no changes")
    if not rows:
        return "<p>not recorded</p>"
    cells = (f"<tr><th>{escape(k.replace('_', ' '))}</th><td>{escape(str(v))}</td></tr>" for k, v in rows.items())
    return f"<table>{''.join(cells)}</table>"
