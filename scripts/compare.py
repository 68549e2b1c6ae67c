"""Compares runs: a table here, and a page with their curves over each other and the config keys in which they differ.

    python scripts/compare.py runs/A runs/B ... [--out compare.html]
"""

from __future__ import annotations

import argparse
import sys
from html import escape
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table

from ringattn.config import flatten
from ringattn.training.console import clock, short
from ringattn.training.metrics import FILE, read_lines
from ringattn.training.report import charts, difference_table, differing_keys, page, shown

PLACES = ("log.dir", "data.path")  # shown last: they differ without meaning anything


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, metavar="runs/NAME", help="folders of runs")
    parser.add_argument("--out", type=Path, default=Path("compare.html"))
    args = parser.parse_args()
    problems, names, configs, metrics = [], [], [], []
    for folder in args.runs:
        try:
            configs.append(flatten(yaml.safe_load((folder / "config.yaml").read_text())))
        except (OSError, ValueError, AttributeError, yaml.YAMLError) as error:
            problems.append(f"{folder}: is not the folder of a run ({error})")
            continue
        metrics.append(read_lines(folder / FILE))
        names.append(folder.name if [f.name for f in args.runs].count(folder.name) == 1 else str(folder))
        if not metrics[-1]:
            problems.append(f"{folder}: has no metrics.jsonl with a finished step")
    if problems:
        print("\n".join(problems), file=sys.stderr)
        return 2

    rows = [summary(lines) for lines in metrics]
    show(names, rows, configs)
    heads = "".join(f"<th>{escape(h)}</th>" for h in ("run", *rows[0]))
    cells = ["".join(f"<td>{escape(c)}</td>" for c in (name, *row.values())) for name, row in zip(names, rows, strict=True)]
    body = [
        f"<h1>{len(names)} runs</h1>", f"<table><tr>{heads}</tr>{''.join(f'<tr>{c}</tr>' for c in cells)}</table>",
        "<h2>Curves</h2>", '<div class="charts">',
        *(f'<div class="figure">{c}</div>' for c in charts(list(zip(names, metrics, strict=True)))), "</div>",
        "<h2>Where they differ</h2>",
        difference_table(configs[0], configs[1] if len(configs) > 1 else configs[0], tuple(names), *configs[2:]),
    ]
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(page("ringattn: " + ", ".join(names), body), encoding="utf-8")
    print(f"wrote {args.out}")
    return 0


def summary(lines: list[dict[str, Any]]) -> dict[str, str]:
    """A run in a row of the table."""
    last, validated = lines[-1], [n["val_loss"] for n in lines if "val_loss" in n]
    paces = sorted(n["tokens_per_s"] for n in lines[len(lines) // 2 :])
    return {
        "steps": f"{last['step']:,}", "tokens": short(last["tokens"]), "loss": f"{last['loss']:.4f}",
        "validation": f"{validated[-1]:.4f}" if validated else "-", "best": f"{min(validated):.4f}" if validated else "-",
        "tok/s": short(paces[len(paces) // 2]), "GiB": f"{max(n['mem_gib'] for n in lines):.2f}",
        "time": clock(sum(n["step_s"] for n in lines)),
    }


def show(names: list[str], rows: list[dict[str, str]], configs: list[dict[str, Any]]) -> None:
    """Both tables on the terminal."""
    console = Console(highlight=False)
    table = Table("run", *rows[0], box=None, pad_edge=False)
    for name, row in zip(names, rows, strict=True):
        table.add_row(name, *row.values())
    console.print(table)
    keys = [k for k in differing_keys(configs) if k != "name"]
    if keys:
        changes = Table("key", box=None, pad_edge=False)
        for name in names:
            changes.add_column(name, overflow="fold")
        for key in sorted(keys, key=lambda k: k in PLACES):
            changes.add_row(key, *(shown(c.get(key)) for c in configs))
        console.print()
        console.print(changes)


if __name__ == "__main__":
    sys.exit(main())
