"""The planner: what it chooses is valid, fits, and is what training would run; what does not fit is said so."""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import ringattn
from ringattn import cost
from ringattn.config import Config, ConfigError, from_dict, to_dict
from ringattn.model import ModelConfig
from ringattn.plan_report import CELLS, draw, report
from ringattn.planner import NothingFits, Plan, choices, merged, plan
from ringattn.training import forecast

BIG = ModelConfig(
    name="8b", vocab_size=128256, width=4096, layers=32, heads=32, kv_heads=8, head_dim=128, ffn_width=14336, tied=False,
    ffn_chunk=8192, loss_chunk=2048,
)
RAW: dict[str, Any] = {"train": {"steps": 1, "rows": 1}, "model": dataclasses.asdict(BIG), "data": {}}


def test_the_planner_is_public() -> None:
    assert ringattn.plan is plan


def test_choices_cover_the_meshes_once() -> None:
    seen = [(c["parallel.ring"], c["parallel.ulysses"], c["parallel.shard"], c["parallel.replicate"]) for c in choices(RAW, 12, {})]
    assert all(a * b * c * d == 12 for a, b, c, d in seen)
    sizes = (1, 2, 3, 4, 6, 12)
    expected = {(ring, 1, shard, replicate) for ring, shard, replicate in itertools.product(sizes, sizes, sizes)}
    assert {m for m in seen if m[1] == 1} == {m for m in expected if m[0] * m[2] * m[3] == 12}
    fixed = {"parallel.ring": 4, "activation": "block"}
    assert all(c["parallel.ring"] == 4 and c["activation"] == "block" for c in choices(RAW, 12, fixed))


def test_the_fastest_plan_fits_and_is_a_config() -> None:
    raw = merged(RAW, {"train.seq_len": 131072})
    found = plan(raw, machine="h200", gpus=8)
    assert found.fits and found.work.gpus == 8 and found.work.seq_len == 131072
    config = from_dict(merged(raw, found.overrides), world_size=8)
    assert cost.memory(cost.work_of(config, config.model, 8, compute_bytes=2)).peak == found.memory.peak
    # no other choice that fits is faster
    for policy in ("none", "attention_saved", "block"):
        other = plan(raw, machine="h200", gpus=8, fixed={"activation": policy})
        assert other.tokens_per_s <= found.tokens_per_s


def test_the_longest_plan_is_the_longest() -> None:
    found = plan(RAW, machine="h200", gpus=8, wish="longest")
    assert found.fits and found.overrides["train.seq_len"] == found.work.seq_len > 500_000
    longer = merged(RAW, {"train.seq_len": found.work.seq_len * 17 // 16 // 1024 * 1024})
    with pytest.raises(NothingFits):
        plan(longer, machine="h200", gpus=8)
    rings = [plan(RAW, machine="h200", gpus=n, wish="longest", fixed={"parallel.ring": n, "activation": "block"}) for n in (8, 16)]
    assert rings[1].work.seq_len > 1.8 * rings[0].work.seq_len  # twice the GPUs, about twice the context


def test_a_ring_across_nodes_gets_two_levels_where_that_is_faster() -> None:
    """4K tokens a GPU, 16 GPUs: a hop of a flat ring waits for the network, a turn of 8 hops does not."""
    raw = merged(RAW, {"train.seq_len": 65536})
    fixed = {"parallel.ring": 16, "parallel.ulysses": 1}
    found, flat = (plan(raw, machine="h200", gpus=16, fixed=fixed | more) for more in ({}, {"parallel.inner": None}))
    assert found.overrides["parallel.inner"] == 8 and found.work.nodes == 2 and found.work.node_ranks == 8
    waits = "exposed communication"
    assert found.time.device[waits] < 0.5 * flat.time.device[waits] and found.memory.peak >= flat.memory.peak
    assert from_dict(merged(raw, {**fixed, **found.overrides}), world_size=16).parallel.inner == 8
    long = plan(merged(RAW, {"train.seq_len": 1 << 20}), machine="h200", gpus=16, fixed=fixed)
    assert "parallel.inner" not in long.overrides  # every hop hides its message anyway
    assert "parallel.inner" not in plan(raw, machine="h200", gpus=8, fixed={"parallel.ring": 8}).overrides


def test_what_does_not_fit_names_what_is_short_and_the_nearest_that_does() -> None:
    raw = merged(RAW, {"train.seq_len": 1048576})
    with pytest.raises(NothingFits, match=r"GiB short; largest: (optimizer|activations) .* GiB") as caught:
        plan(raw, machine="a100", gpus=1)
    fitting = caught.value.fitting
    assert not caught.value.nearest.fits and fitting is not None and fitting.fits and fitting.work.gpus > 1
    with pytest.raises(NothingFits):
        plan(raw, machine="a100", gpus=fitting.work.gpus // 2)


def test_a_host_that_is_too_small_is_what_is_short() -> None:
    """The states do not fit the GPU, and not the host either."""
    small = dataclasses.replace(cost.find_machine("h200"), host_gib=60.0)
    raw = merged(RAW, {"train.seq_len": 8192, "model.layers": 45})
    with pytest.raises(NothingFits, match=r"the nearest plan keeps 8\d\.\d GiB a GPU on the host and 60.0 may be taken, 2\d\.\d GiB short"):
        plan(raw, machine=small, gpus=1)
    found = plan(raw, machine=dataclasses.replace(small, host_gib=100.0), gpus=1)
    assert found.fits and found.overrides["optim.offload"] is True and found.lacks == (0, 0)


def test_bad_wishes_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="wish=best"):
        plan(RAW, wish="best")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="machine=abacus"):
        plan(RAW, machine="abacus")
    with pytest.raises(ValueError, match="gpus=0"):
        plan(RAW, gpus=0)
    with pytest.raises(ConfigError, match="kernel=wrong"):
        plan(merged(RAW, {"kernel": "wrong"}))


def command(arguments: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    path = Path(__file__).resolve().parents[1] / "scripts" / "plan.py"
    spec = importlib.util.spec_from_file_location("plan_script", path)
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    code = script.main(shlex.split(arguments))
    said = capsys.readouterr()
    return code, said.out, said.err


def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "bar.png"
    code, said, _ = command(f"model=1b gpus=4 machine=h100 train.seq_len=262144 activation=block picture={picture}", capsys)
    assert code == 0 and "activation  block" in said and picture.stat().st_size > 5000
    line = said.splitlines()[[i for i, text in enumerate(said.splitlines()) if text == "start it with"][0] + 1]
    assert "--nproc-per-node 4 -m ringattn.train model=1b train.seq_len=262144 activation=block" in line
    assert all(len(text) <= 90 for text in said.splitlines() if "-m ringattn.train" not in text and not text.startswith(("picture", "4 x")))
    code, said, _ = command("model=13b machine=a100 train.seq_len=131072 picture=none", capsys)
    assert code == 3 and "GiB short" in said and "the nearest that fits" in said
    code, _, wrong = command("model=1b machine=h300 picture=none", capsys)
    assert code == 2 and "machine=h300" in wrong
    code, _, wrong = command("model=1b gpus=none train.sequence=5 picture=none", capsys)
    assert code == 2 and "gpus=none: must be a whole number from 1" in wrong


def test_report_and_picture(tmp_path: Path) -> None:
    found: Plan = plan(merged(RAW, {"train.seq_len": 262144}), machine="h200", gpus=8, fixed={"parallel.ulysses": 1})
    text = report(found)
    assert "margin" in text and found.command in text
    bar = next(line for line in text.splitlines() if line.startswith("  |"))
    assert bar.index("|", 3) == CELLS + 3
    draw([found], tmp_path / "plan.png")
    assert (tmp_path / "plan.png").stat().st_size > 5000


# --- out of memory ------------------------------------------------------------------------------------------------------


def long_run(**changes: Any) -> Config:
    model = dataclasses.replace(BIG, layers=4, ffn_chunk=0, loss_chunk=8192)
    raw: dict[str, Any] = {**RAW, "train": {"steps": 1, "rows": 1, "seq_len": 131072}, "model": dataclasses.asdict(model)}
    return from_dict(merged(raw, changes))


def page(config: Config, usable_gib: float, error: BaseException) -> str:
    return forecast.out_of_memory_page(
        config, config.model, world_size=1, compute_bytes=2, usable_bytes=usable_gib * 2**30, held_bytes=usable_gib * 2**30,
        error=error, safe="All safe.",
    )


def test_the_page_proposes_what_fits() -> None:
    config = long_run()
    whole = cost.memory(cost.work_of(config, config.model, 1, compute_bytes=2)).peak / 2**30
    said = page(config, whole * 0.9, torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"))
    assert "Tried to allocate 2.00 GiB" in said and "activations" in said and said.endswith("All safe.")
    (line,) = [text for text in said.splitlines() if text.startswith("    ")]
    changes = dict(part.split("=") for part in line.split())
    assert len(changes) == 1  # the smallest: one key is enough here
    typed = {k: int(v) if v.isdigit() else v for k, v in changes.items()}
    changed = from_dict(merged(to_dict(config), typed))
    assert cost.memory(cost.work_of(changed, changed.model, 1, compute_bytes=2)).peak <= whole * 0.9 * 2**30
    smallest = long_run(**{"activation": "block", "model.ffn_chunk": 2048, "model.loss_chunk": 0, "optim.offload": True})
    least = cost.memory(cost.work_of(smallest, smallest.model, 1, compute_bytes=2)).peak / 2**30
    assert "train.seq_len=" in page(smallest, 0.99 * least, MemoryError())
    waiting = dataclasses.replace(smallest, activation="offload")
    assert "train.seq_len=" in page(waiting, 0.99 * least, MemoryError())
    assert "More GPUs" in page(config, 10.0, MemoryError())


def test_the_moment_is_read_from_the_traceback() -> None:
    def train_step(work: Any) -> None:
        work()

    def backward() -> None:
        raise torch.OutOfMemoryError("x")

    def forward() -> None:
        raise torch.OutOfMemoryError("x")

    for function, moment in ((backward, "backward pass"), (forward, "forward pass")):
        with pytest.raises(torch.OutOfMemoryError) as caught:
            train_step(function)
        assert forecast.moment_of(caught.value) == moment
    assert forecast.moment_of(MemoryError()) == ""


def test_out_of_memory_leaves_the_checkpoint_untouched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from ringattn import train
    from ringattn.model.transformer import Transformer
    from ringattn.training.launch import Launch

    raw: dict[str, Any] = {
        "name": "full", "train": {"steps": 4, "stop_after": 2, "rows": 1, "seq_len": 64, "val_every": 0}, "data": {"val_fraction": 0.01},
        "model": {"width": 32, "layers": 2, "heads": 2, "kv_heads": 2, "head_dim": 16, "ffn_width": 64}, "schedule": {"warmup_steps": 1},
        "log": {"dir": str(tmp_path), "console": "off", "tensorboard": False}, "device": "cpu",
    }
    assert train.run_config(from_dict(raw), Launch.from_environment()) == 0
    folder = tmp_path / "full" / "checkpoints"
    before = {p: p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}
    assert before

    def full(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 64.00 GiB.")

    monkeypatch.setattr(Transformer, "forward", full)
    code = train.run_config(from_dict(merged(raw, {"train.stop_after": 4})), Launch.from_environment())
    said = capsys.readouterr().err
    assert code == train.OUT_OF_MEMORY and "out of memory in the forward pass" in said and "Tried to allocate 64.00 GiB" in said
    assert "The largest parts then" in said and "the newest checkpoint is intact" in said and "step-00000002" in said
    assert {p: p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()} == before
    assert sys.getsizeof(said) < 4000  # one page


def test_a_run_compares_itself_with_its_forecast() -> None:
    config = long_run()
    work = cost.work_of(config, config.model, 1, compute_bytes=2)
    machine = cost.find_machine("h200")
    said = forecast.Forecast(work, cost.memory(work), machine, cost.step_time(work, machine))
    total = said.time.total_s if said.time else 0.0
    assert "(h200)" in " ".join(said.lines())
    assert "(+0%)" in said.compare([99.0, 99.0, total, total, total], 12.5) and "measured 12.50" in said.compare([total] * 5, 12.5)
    without = dataclasses.replace(said, time=None, machine=None)
    assert len(without.lines()) == 1 and "step" not in without.compare([1.0] * 5, 12.5)
