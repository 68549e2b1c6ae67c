"""What a run shows afterwards: its report, where it came from, comparisons of runs, pictures of schedules, W&B."""

from __future__ import annotations

import importlib.util
import json
import math
import re
import subprocess
import sys
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import Ranks
from test_launch import ROOT, TINY, command_line

from ringattn import Layout, Ring, make_schedule
from ringattn.config import ConfigError, flatten, from_dict, to_dict
from ringattn.training.charts import MAX_POINTS, Line, line_chart, thinned, tick_name, ticks
from ringattn.training.launch import Launch, process_group
from ringattn.training.loop import train
from ringattn.training.provenance import command_line as started_by
from ringattn.training.provenance import document_lengths
from ringattn.training.report import build_report, defaults, write_report
from ringattn.training.ring_picture import SHOWN, draw_holders, draw_hops, hop_lines
from ringattn.training.run import assemble

VOID = {"meta", "br", "hr", "img", "link"}


class Page(HTMLParser):
    """Checks that every element is closed, and keeps texts and attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.texts: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def read_page(path: Path) -> Page:
    page = Page()
    page.feed(path.read_text())
    assert not page.open
    return page


def script(name: str, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / "scripts" / name), *arguments], cwd=cwd, capture_output=True, text=True, timeout=100,
        env={"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin", "PYTHONIOENCODING": "utf-8"}, check=False,
    )


@pytest.fixture(scope="module")
def finished(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a launch in which the run ``seen`` has ended: a virtual ring of 4, two windows, validation."""
    folder = tmp_path_factory.mktemp("seen")
    arguments = [*TINY, "name=seen", "parallel.virtual=4", "model.windows=[12,0]", "train.val_every=1", "train.val_rows=1"]
    code, out, err = ranks.run(1, command_line, str(folder), *arguments)
    assert code == 0, err
    assert out.rstrip().endswith(f"report {folder / 'runs/seen/report.html'}")
    return folder


@pytest.mark.ring
def test_a_run_leaves_a_page_that_needs_nothing_else(finished: Path) -> None:
    path = finished / "runs/seen/report.html"
    page, text = read_page(path), path.read_text()
    assert "prefers-color-scheme: dark" in text and "<script" not in text and "://" not in text and "url(" not in text
    assert not any(name in ("src", "href") for name, _ in page.attributes)
    for picture in re.findall(r"<svg.*?</svg>", text, re.DOTALL):
        ElementTree.fromstring(picture)
    titles = [t for t in page.texts if t.strip()]
    for expected in ("training", "validation", "tokens a second", "memory of the fullest rank (GiB)", "who works on what: window 12",
                     "who works on what: full causal attention", "who holds which positions: zigzag, 4 shards of 12", "Again"):
        assert expected in titles, expected
    cells = re.findall(r"<tr><td><code>(.*?)</code></td><td class=old><code>(.*?)</code></td><td><code>(.*?)</code></td></tr>", text)
    changed = {key: (before, after) for key, before, after in cells}
    assert changed["parallel.virtual"] == ("1", "4") and changed["model.windows"] == ("[0]", "[12, 0]") and "optim.beta1" not in changed
    facts = json.loads((finished / "runs/seen/environment.json").read_text())
    assert facts["versions"]["torch"] in text and facts["command"] in "".join(page.texts)
    assert facts["git"] is None or facts["git"]["commit"] in text
    assert sum(map(abs, facts["documents"])) == 48


@pytest.mark.ring
def test_real_ranks_leave_the_same_page(ranks: Ranks, raw: Callable[..., dict[str, Any]]) -> None:
    config = raw({"name": "two", "parallel.virtual": 2, "train.steps": 1})
    ranks.run(2, train_and_close, config)
    texts = read_page(Path(config["log"]["dir"]) / "two/report.html").texts
    assert "who holds which positions: zigzag, 4 shards of 24" in texts and texts.count("rank 1 shard 2") == 3


def train_and_close(launch: Launch, config: dict[str, Any]) -> None:
    """A run from beginning to end on this rank."""
    built = from_dict(config, world_size=launch.world_size)
    with process_group(built, launch) as device:
        run = assemble(built, device)
        train(run)
        run.close()


@pytest.mark.ring
def test_the_page_can_be_made_again_and_from_less(finished: Path, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    folder.mkdir()
    for name in ("config.yaml", "metrics.jsonl"):  # as an older run, or one carried elsewhere, may be
        (folder / name).write_bytes((finished / "runs/seen" / name).read_bytes())
    done = script("report.py", str(folder), str(tmp_path / "nothing"), cwd=tmp_path)
    assert done.returncode == 2 and "has no metrics.jsonl" in done.stderr and f"wrote {folder / 'report.html'}" in done.stdout
    assert "who works on what: window 12" in read_page(folder / "report.html").texts
    (folder / "metrics.jsonl").write_text("")
    assert write_report(folder) is None


@pytest.mark.ring
def test_a_report_that_fails_does_not_fail_the_run(ranks: Ranks, tmp_path: Path) -> None:
    (tmp_path / "runs/t/report.html/in_the_way").mkdir(parents=True)
    code, out, err = ranks.run(1, command_line, str(tmp_path), *TINY, "name=t")
    assert code == 0 and "note: no report" in out, err
    code, out, err = ranks.run(1, command_line, str(tmp_path), *TINY, "name=u", "log.report=false")
    assert code == 0 and not (tmp_path / "runs/u/report.html").exists(), err


def test_large_and_gathered_rings_have_a_page_too(tmp_path: Path) -> None:
    for size, exchange in ((128, "ring"), (3, "allgather")):
        config = to_dict(from_dict({"train": {"steps": 9, "seq_len": 1536}, "parallel": {"virtual": size, "exchange": exchange}}))
        (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
        line = {"step": 1, "loss": 2.0, "tokens": 5, "tokens_per_s": 1.0, "step_s": 1.0, "mem_gib": 1.0, "grad_norm": math.inf, "lr": 0.1}
        text = build_report(tmp_path, [line])
        assert ("hops of rings above 64" in text) == (size == 128) and ("all keys" in text) == (size == 3)
        assert "no values" in text  # a gradient that is not finite cannot be drawn


def test_the_defaults_of_the_report_are_those_of_the_command_line() -> None:
    from ringattn.compose import compose_keys
    from ringattn.train import config_folder

    composed = from_dict(compose_keys([], config_folder()))
    assert flatten(to_dict(composed)) == flatten(to_dict(defaults()))


def test_command_line_is_the_one_that_was_typed() -> None:
    plain = ["/x/python", "-u", "-X", "dev", "-m", "ringattn.train", "name=a b", "data.path=x"]
    assert started_by(plain, {}) == "python -m ringattn.train 'name=a b' data.path=x"
    one = {"TORCHELASTIC_RUN_ID": "none", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "8"}
    assert started_by(plain, one) == "torchrun --standalone --nproc-per-node 8 -m ringattn.train 'name=a b' data.path=x"
    assert "--nnodes 2 " in started_by(plain, one | {"WORLD_SIZE": "16"})


def test_document_lengths() -> None:
    import torch

    assert document_lengths(torch.tensor([0, 0, 0, 1, 2, 2, -1, -1])) == [3, 1, 2, -2]
    assert document_lengths(torch.arange(5000)) is None


@settings(deadline=None, max_examples=200)
@given(st.floats(-1e9, 1e9), st.floats(1e-6, 1e9))
def test_ticks_enclose_and_can_be_told_apart(low: float, span: float) -> None:
    high = low + span
    found = ticks(low, high)
    slack = 1e-6 * span + 2e-9 * abs(low)
    assert found[0] <= low + slack and found[-1] >= high - slack and len(found) <= 9
    if high - low > 1e-3 * abs(low):
        names = [tick_name(t, found) for t in found]
        assert len(set(names)) == len(names)


@settings(deadline=None, max_examples=50)
@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=3000))
def test_thinning_keeps_ends_and_extremes(values: list[float]) -> None:
    points = [(float(i), v) for i, v in enumerate(values)]
    kept = thinned(points)
    assert len(kept) <= MAX_POINTS + 4 and kept[0] == points[0] and kept[-1] == points[-1]
    assert min(v for _, v in kept) == min(values) and max(v for _, v in kept) == max(values)
    assert [x for x, _ in kept] == sorted(x for x, _ in kept)


def test_chart_is_well_formed_and_stays_inside() -> None:
    lines = [Line(f"a run <&> {i}", [(0.0, 1.0), (1.0, math.nan), (2.0, 5.0 - i)]) for i in range(9)]
    root = ElementTree.fromstring(line_chart("t <&>", lines, alone=True))
    _, _, width, height = map(float, root.attrib["viewBox"].split())
    lowest = 0.0
    for element in root.iter():
        for key, limit in (("x", width), ("x2", width), ("y", height), ("y2", height), ("cx", width), ("cy", height)):
            assert 0 <= float(element.attrib.get(key, 0)) <= limit
        if element.tag.endswith("polyline"):
            points = [tuple(map(float, p.split(","))) for p in element.attrib["points"].split()]
            assert len(points) == 2 and all(0 <= x <= width and 0 <= y <= height for x, y in points)
            lowest = max(lowest, *(y for _, y in points))
    assert lowest < height


@pytest.mark.parametrize("kind", ["contiguous", "zigzag", "striped", "chunk-striped"])
def test_pictures_say_what_the_schedule_does(kind: str) -> None:
    size, seq_len, window = 4, 512, 100
    layout, ring = Layout(kind, seq_len, size), Ring(virtual=size)
    schedule = make_schedule(layout, ring, window=window)
    position = [layout.shard_positions(w) for w in range(size)]
    seen = [[int(((k[None] <= q[:, None]) & (k[None] > q[:, None] - window)).sum()) for k in position] for q in position]
    most = max(seen[w][(w - d) % size] for d in schedule.offsets for w in range(size))
    for w, line in enumerate(hop_lines(schedule)[1 : size + 1]):
        cells = line.split()[2:]
        for cell, d in zip(cells, schedule.offsets, strict=True):
            o = (w - d) % size
            assert cell == (f"{o}:{seen[w][o] / most:.0%}" if seen[w][o] else "-")
    holders = ElementTree.fromstring(draw_holders(layout))
    filled = [e for e in holders if e.tag == "rect" and e.attrib["fill"].startswith("hsl")]
    span = next(float(e.attrib["width"]) for e in holders if e.tag == "rect" and e.attrib["fill"] == "var(--grid)")
    assert sum(float(e.attrib["width"]) for e in filled) == pytest.approx(span, rel=0.35 if kind == "striped" else 0.01)
    names = [e.text for e in ElementTree.fromstring(draw_hops(schedule, "x")).iter() if e.tag == "text"]
    idle = sum(seen[w][(w - d) % size] == 0 for d in schedule.offsets for w in range(size))
    assert names.count("idle") == idle and sum(str(n).startswith("keys ") for n in names) == size * len(schedule.offsets) - idle


def test_a_large_ring_is_cut_and_says_so() -> None:
    schedule = make_schedule(Layout("zigzag", 4096, 32), Ring(virtual=32))
    assert any(f"first {SHOWN} of 32 shards" in line for line in hop_lines(schedule))
    assert f"the first {SHOWN} of 32 shards" in draw_hops(schedule, "x") and "16 more shards" in draw_holders(schedule.layout)


def test_show_schedule(tmp_path: Path) -> None:
    keys = ["parallel.ring=4", "train.seq_len=4096", "model.windows=[512,0]", "train.rows=3", "train.micro_rows=2"]
    done = script("show_schedule.py", *keys, "--documents", "1024,1024,1000", "--out", "p/s.svg", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "window 512" in done.stdout and "full causal attention" in done.stdout and "rank 3" in done.stdout
    ElementTree.parse(tmp_path / "p/s.svg")
    done = script("show_schedule.py", "parallel.layout=balanced", "train.seq_len=2048", "--documents", "700,700", cwd=tmp_path)
    assert done.returncode == 0 and done.stdout.startswith("balanced, 2,048 positions, 8 shards of 256"), done.stderr
    done = script("show_schedule.py", "parallel.ring=3", "train.seq_len=4096", "parallel.layuot=zigzag", cwd=tmp_path)
    assert done.returncode == 2 and "did you mean parallel.layout?" in done.stderr
    done = script("show_schedule.py", "parallel.ring=3", "train.seq_len=4096", "parallel.layout=auto", cwd=tmp_path)
    assert done.returncode == 0 and "rows of 4096 padded to 4224: 3.12% more" in done.stdout, done.stderr
    done = script("show_schedule.py", "train.seq_len=4096", "--documents", "4000,97", cwd=tmp_path)
    assert done.returncode == 2 and "4097 tokens do not fit into train.seq_len=4096" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.ring
def test_compare(finished: Path, ranks: Ranks) -> None:
    arguments = [*TINY, "name=other", "optim.lr=1e-3", "parallel.virtual=4", "model.windows=[12,0]", "log.report=false"]
    code, _, err = ranks.run(1, command_line, str(finished), *arguments)
    assert code == 0, err
    done = script("compare.py", "runs/seen", "runs/other", cwd=finished)
    assert done.returncode == 0, done.stderr
    table = {line.split()[0]: line.split()[1:] for line in done.stdout.splitlines() if line}
    assert table["optim.lr"] == ["0.003", "0.001"] and table["seen"][0] == "2" and "parallel.virtual" not in table
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert "validation loss (nats a target)" in read_page(finished / "compare.html").texts
    done = script("compare.py", "runs/seen", "runs", cwd=finished)
    assert done.returncode == 2 and "runs: is not the folder of a run" in done.stderr and "Traceback" not in done.stderr


FAKE_WANDB = '''
import json, pathlib
class Run:
    def __init__(self, settings):
        self.id = settings["id"] or "fresh"
        self.out = pathlib.Path(settings["dir"]) / "seen.jsonl"
        self.say({k: v for k, v in settings.items() if k != "config"} | {"lr": settings["config"]["optim"]["lr"]})
    def say(self, what):
        with open(self.out, "a") as file:
            file.write(json.dumps(what) + "\\n")
    def log(self, values, step):
        self.say({"step": step} | values)
    def finish(self):
        self.say({"finished": True})
def init(**settings):
    if settings["mode"] == "online":
        raise RuntimeError("no login")
    return Run(settings)
'''


@pytest.mark.ring
def test_wandb_gets_the_same_numbers_and_the_same_run(ranks: Ranks, tmp_path: Path) -> None:
    (tmp_path / "wandb.py").write_text(FAKE_WANDB)
    keys = [*TINY, "name=w", "log.wandb=offline", "log.wandb_project=p"]
    code, _, err = ranks.run(1, with_module, str(tmp_path), *keys, "train.stop_after=1")
    assert code == 0, err
    code, _, err = ranks.run(1, with_module, str(tmp_path), *keys)
    assert code == 0, err
    seen = [json.loads(line) for line in (tmp_path / "runs/w/seen.jsonl").read_text().splitlines()]
    starts, steps = [s for s in seen if "project" in s], [s for s in seen if "step" in s]
    assert [(s["id"], s["mode"], s["project"], s["name"], s["lr"]) for s in starts] == [
        (None, "offline", "p", "w", 3e-3), ("fresh", "offline", "p", "w", 3e-3)]
    written = [json.loads(line) for line in (tmp_path / "runs/w/metrics.jsonl").read_text().splitlines()]
    assert [(s["step"], s["train/loss"], s["timing/step_s"]) for s in steps] == [(w["step"], w["loss"], w["step_s"]) for w in written]
    assert seen[-1] == {"finished": True}
    code, _, err = ranks.run(1, with_module, str(tmp_path), *keys, "name=v", "log.wandb=online")
    assert code == 2 and "log.wandb=online: no login" in err and "Traceback" not in err


def with_module(launch: Any, folder: str, *arguments: str) -> tuple[int, str, str]:
    """The command line with the modules of ``folder`` at hand."""
    sys.path.insert(0, folder)
    try:
        return command_line(launch, folder, *arguments)
    finally:
        sys.path.remove(folder)
        sys.modules.pop("wandb", None)


def test_wandb_is_refused_where_it_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    before: Callable[..., Any] = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "wandb" else before(name, *a))
    assert from_dict({"train": {"steps": 1}, "log": {"wandb": False}}).log.wandb == "off"
    with pytest.raises(ConfigError, match=r"log.wandb=offline: wandb is not installed"):
        from_dict({"train": {"steps": 1}, "log": {"wandb": "offline"}})


def test_colours_of_neighbours_differ() -> None:
    from ringattn.training.ring_picture import colour

    for size in (2, 3, 8, 16):
        hues = np.array([float(colour(w, size)[4:].split()[0]) for w in range(size)])
        assert len(set(hues)) == size
