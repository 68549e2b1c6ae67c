"""Makes the pages and pictures that are made from the program itself: docs/configuration.md and docs/images/.

    python scripts/make_docs.py            # all of them
    python scripts/make_docs.py --check    # write nothing; exit code 1 if one of them is stale

The pictures of measurements (docs/images/kernels.png, ring_2gpu.png) come from scripts/bench_kernel.py and scripts/bench_ring.py on GPUs.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import inspect
import subprocess
import sys
import tokenize
import typing
from io import StringIO
from pathlib import Path
from typing import Any

import torch

from ringattn import Layout, Ring, make_schedule
from ringattn.compose import compose_keys
from ringattn.config import Config
from ringattn.train import config_folder
from ringattn.training.report import shown
from ringattn.training.ring_picture import draw_holders, draw_hops
from ringattn.typed import describe, field_types

ROOT = Path(__file__).resolve().parents[1]
SIZE, SEQ_LEN = 8, 65536  # of the pictures


def comments(cls: type) -> dict[str, str]:
    """The comment behind each field of a dataclass."""
    source = inspect.getsource(cls)
    at = {t.start[0]: t.string.lstrip("# ") for t in tokenize.generate_tokens(StringIO(source).readline) if t.type == tokenize.COMMENT}
    body = typing.cast(ast.ClassDef, ast.parse(source).body[0]).body
    return {n.target.id: at.get(n.end_lineno or 0, "") for n in body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)}


def first_line(path: Path) -> str:
    """What an option of a group says about itself: its first comment, without what Hydra reads."""
    lines = [line[2:] for line in path.read_text().splitlines() if line.startswith("# ") and not line.startswith("# @package")]
    return (lines[0].removeprefix("Question: ") if lines else "").replace("|", "\\|").replace("<", "&lt;")


def section(cls: type, prefix: str, composed: dict[str, Any]) -> list[str]:
    """The table of one dataclass."""
    said, types = comments(cls), field_types(cls)
    lines = ["| key | type | default | |", "|---|---|---|---|"]
    for name, kind in types.items():
        if not dataclasses.is_dataclass(kind):
            value = shown(composed[name]) if name in composed else "null"
            what = said[name].replace("|", "or").replace("<", "&lt;")
            lines.append(f"| `{prefix}{name}` | {describe(kind)} | `{value}` | {what} |")
    return lines


def configuration() -> str:
    """docs/configuration.md."""
    composed = compose_keys([], config_folder())
    parts = [
        "# Configuration", "",
        "Written by `python scripts/make_docs.py` from the dataclasses in `ringattn/` and the files in `configs/`: edit those.", "",
        "Every key can be given on the command line as `key=value`. The defaults are those of a run that is given nothing. Unknown keys,",
        "wrong types and values out of range are listed all at once before the first step.", "",
        "## Top", "", *section(Config, "", composed),
    ]
    for name, kind in field_types(Config).items():
        if dataclasses.is_dataclass(kind):
            says = " ".join((inspect.getdoc(kind) or "").split("\n\n")[0].split()).replace("``", "`")
            parts += ["", f"## {name}", "", says, "", *section(typing.cast(type, kind), f"{name}.", composed[name])]
    parts += ["", "## Groups", "", "`group=option` sets many keys at once; `experiment=` and `debug=` come last and change several groups."]
    parts += [""]
    parts += ["| choose | |", "|---|---|"]
    for folder in sorted(p for p in config_folder().iterdir() if p.is_dir()):
        options = sorted(folder.glob("*.yaml"), key=lambda p: (p.stem != "none", p.stem))
        parts += [f"| `{folder.name}={p.stem}` | {first_line(p)} |" for p in options]
    return "\n".join(parts) + "\n"


def pictures() -> dict[str, str]:
    """The pictures of docs/how-the-ring-works.md, by file name."""
    found = {}
    for kind in ("contiguous", "zigzag", "chunk-striped"):
        found[f"holders_{kind}.svg"] = draw_holders(Layout(kind, SEQ_LEN, SIZE), alone=True)
    lengths = [12000, 3000, 20000, 1536, 9000, 20000]
    documents = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    cases: list[tuple[str, str, str, dict[str, Any]]] = [
        ("hops_contiguous", "contiguous", "contiguous, causal", {}),
        ("hops_zigzag", "zigzag", "zigzag, causal", {}),
        ("hops_window", "zigzag", "zigzag, window 4,096", {"window": 4096}),
        ("hops_documents", "zigzag", f"zigzag, {len(lengths)} packed documents", {"documents": torch.nn.functional.pad(
            documents, (0, SEQ_LEN - sum(lengths)), value=-1)}),
    ]
    for name, kind, title, mask in cases:
        found[f"{name}.svg"] = draw_hops(make_schedule(Layout(kind, SEQ_LEN, SIZE), Ring(virtual=SIZE), **mask), title, alone=True)
    return found


def everything() -> dict[Path, str]:
    """Every text that is made, by its path from the root."""
    images = {Path("docs/images") / name: text for name, text in pictures().items()}
    return {Path("docs/configuration.md"): configuration(), **images}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing, say what is stale")
    check = parser.parse_args().check
    made = everything()
    stale = [path for path, text in made.items() if not (ROOT / path).exists() or (ROOT / path).read_text() != text]
    if check:
        print("\n".join(f"stale: {path}" for path in stale) or "all up to date")
        return 1 if stale else 0
    for path, text in made.items():
        (ROOT / path).parent.mkdir(parents=True, exist_ok=True)
        (ROOT / path).write_text(text)
        print(f"wrote {path}")
    ring = ROOT / "docs/images/ring.png"
    return subprocess.run([sys.executable, str(ROOT / "scripts/draw_ring.py"), "--out", str(ring)], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
