"""What the user sees fits into 80 columns and holds no control characters where the output is not a terminal."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ranks import Ranks
from tasks import BASE, merged, trajectory

from ringattn.config import LogConfig
from ringattn.ring.layout import Layout
from ringattn.training.console import Console, clock, picture
from ringattn.training.launch import Launch

RECORD = {"step": 20, "loss": 2.34567, "tokens_per_s": 12345.6, "mem_gib": 1.5, "step_s": 0.25, "grad_norm": 0.9}


@pytest.mark.parametrize("kind", ["contiguous", "zigzag", "striped"])
@pytest.mark.parametrize("shards", [1, 2, 3, 8])
def test_picture_says_who_holds_what(kind: str, shards: int) -> None:
    layout = Layout(kind, 96, shards)
    lines = picture(layout, 1)
    assert len(lines) == shards and all(len(line) <= 72 for line in lines)
    if kind != "striped" or shards == 1:
        for shard, line in enumerate(lines):
            ranges = [tuple(map(int, r)) for r in re.findall(r"(\d+)-(\d+)", line)]
            held = np.concatenate([np.arange(a, b + 1) for a, b in ranges])
            assert (held == layout.shard_positions(shard)).all()
    bars = [re.search(r"[█░]+", line) for line in lines]
    filled = np.array([[c == "█" for c in bar.group()] for bar in bars if bar])
    assert (filled.sum(0) == 1).all()  # each cell of the sequence has one owner


def test_picture_of_large_and_virtual_rings() -> None:
    assert picture(Layout("zigzag", 64, 16), 1)[-1] == "... and 8 more ranks"
    assert picture(Layout("zigzag", 64, 4), 2, fancy=False)[2].startswith("rank 1 shard 2  ........####........####........  16-23")


def test_plain_lines(capsys: pytest.CaptureFixture[str]) -> None:
    console = Console(LogConfig(every=10), enabled=True)
    console.header("title", [("model", "word " * 40), ("files", "/a/very/long/path" * 10)], picture(Layout("zigzag", 64, 2), 1))
    console.start(0, 100)
    for step in (19, 20, 100):
        console.step(RECORD | {"step": step}, 100)
    console.validation(RECORD | {"val_loss": 2.0, "val_nats_per_byte": 1.0}, 16)
    console.stop()
    out = capsys.readouterr().out
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f]", out)  # no control character but the newline
    assert max(map(len, out.splitlines())) <= 80
    assert "step     20/100  loss 2.3457  12.3k tok/s  1.50 GiB" in out and "step     19" not in out and "step    100/100" in out
    assert "(1.0000 nats a byte)" in out


def test_silence(capsys: pytest.CaptureFixture[str]) -> None:
    for console in (Console(LogConfig(console="off"), enabled=True), Console(LogConfig(), enabled=False)):
        console.header("title", [("a", "b")], [])
        console.step(RECORD, 20)
        console.note("note")
    assert capsys.readouterr().out == ""


def test_clock() -> None:
    assert (clock(5), clock(65.4), clock(3725)) == ("0:05", "1:05", "1:02:05")


def speak(launch: Launch, raw: dict[str, Any], file: str) -> None:
    with open(f"{file}.{launch.rank}", "w") as out:
        sys.stdout, before = out, sys.stdout
        try:
            trajectory(launch, raw, False)
        finally:
            sys.stdout = before


@pytest.mark.ring
def test_only_one_rank_speaks(ranks: Ranks, corpus: Path, tmp_path: Path) -> None:
    settings = {"data.path": str(corpus), "log.dir": str(tmp_path / "runs"), "log.console": "auto", "log.every": 2, "train.val_every": 4}
    ranks.run(2, speak, merged(BASE, settings), str(tmp_path / "out"))
    first, second = ((tmp_path / f"out.{rank}").read_text() for rank in (0, 1))
    assert second == ""
    header = ("ringattn: t", "tiny:", "96 = 384 tokens", "ring 2", "rank 1", "kernel torch")
    for word in (*header, "step      2/6", "validation", "done at step 6"):
        assert word in first, word
    assert max(map(len, first.splitlines()[:15])) <= 80
