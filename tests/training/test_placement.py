"""Layouts planned for each batch, padding, and what a run says about its ring: balance, exposed transfers, the cost of padding."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ranks import Ranks
from tasks import BASE, merged, trajectory, with_run

from ringattn import Ring
from ringattn.config import from_dict
from ringattn.data import IGNORE, Batch
from ringattn.ring.layout import LAYOUTS, Layout
from ringattn.training.header import padding_rows
from ringattn.training.launch import Launch
from ringattn.training.metrics import read_lines
from ringattn.training.placement import Placement
from ringattn.training.run import Run


def placement(layout: str, seq_len: int, windows: list[int] | None = None, size: int = 4) -> tuple[Placement, int]:
    changes = {"data.path": "x", "parallel.layout": layout, "parallel.virtual": size, "train.seq_len": seq_len}
    config = from_dict(merged(BASE, changes | ({"model.windows": windows} if windows else {})))
    return Placement(config, config.model, Ring(virtual=size), config.padded_len(1)), config.train.seq_len


def rows(rng: np.random.Generator, seq_len: int) -> Batch:
    """Two packed rows: one long document somewhere among short ones."""
    lengths = np.where(np.arange(seq_len // 16) == rng.integers(seq_len // 16), seq_len // 2, rng.integers(8, 24, seq_len // 16))
    ids = np.repeat(np.arange(len(lengths)), lengths)[:seq_len]
    documents = torch.from_numpy(np.stack([ids, ids[::-1].max() - ids[::-1]]))
    tokens = torch.from_numpy(rng.integers(0, 9, (2, seq_len)))
    return Batch(tokens, tokens.clone(), documents, torch.arange(seq_len).expand(2, -1))


@pytest.mark.parametrize("windows", [[0], [300, 0], [64]])
def test_planned_layouts_are_never_slower_and_the_same_everywhere(windows: list[int], rng: np.random.Generator) -> None:
    for _ in range(3):
        batch = rows(rng, 4096)
        auto, again = (placement("auto", 4096, windows)[0].place(batch) for _ in range(2))
        assert auto.layout.key == again.layout.key and auto.slowest >= auto.mean > 0
        widest = None if 0 in windows else max(windows)
        mask: dict[str, Any] = {"window": widest, "documents": batch.documents}
        assert all(auto.layout.predict(**mask).time <= Layout(kind, 4096, 4).predict(**mask).time for kind in LAYOUTS)
        balanced = placement("balanced", 4096, windows)[0].place(batch)
        assert balanced.layout.kind == "balanced"
        assert all(balanced.layout.predict(**mask).lock_step <= Layout(kind, 4096, 4).predict(**mask).lock_step for kind in LAYOUTS)


def test_another_batch_gets_another_layout(rng: np.random.Generator) -> None:
    plan, batch = placement("auto", 4096)[0], rows(rng, 4096)
    small = torch.arange(4096).div(16, rounding_mode="floor").expand(2, -1)  # nothing crosses a shard of one stretch
    assert plan.fixed is None and plan.place(dataclasses.replace(batch, documents=small)).layout.kind == "contiguous"
    assert plan.place(dataclasses.replace(batch, documents=torch.zeros_like(small))).layout.kind != "contiguous"  # one long document
    assert placement("zigzag", 4096)[0].fixed is not None


@pytest.mark.parametrize(
    ("layout", "seq_len", "padded"), [("zigzag", 97, 104), ("striped", 97, 100), ("auto", 4097, 4608), ("zigzag", 96, 96)]
)
def test_rows_are_padded_at_their_end(layout: str, seq_len: int, padded: int, rng: np.random.Generator) -> None:
    plan, length = placement(layout, seq_len)
    batch = plan.place(rows(rng, length)).batch
    assert plan.seq_len == padded and batch.tokens.shape == (2, padded)
    assert (batch.labels[:, seq_len:] == IGNORE).all() and (batch.documents[:, seq_len:] == -1).all()
    assert (batch.documents[:, :seq_len] >= 0).all()
    more = padding_rows(seq_len, padded)
    assert bool(more) == (padded > seq_len) and all(f"padded to {padded}: {padded / seq_len - 1:.2%} more" in text for _, text in more)


def layouts_of_steps(launch: Launch, raw: dict[str, Any]) -> list[list[Any]]:
    def work(run: Run) -> list[list[Any]]:
        import torch.distributed as dist

        own = [[r.layout.key for r in run.batches.rows(step)] for step in range(3)]
        everyone: list[Any] = [None] * run.mesh.world_size
        dist.all_gather_object(everyone, own)
        return everyone

    result: list[list[Any]] = with_run(launch, raw, work)
    return result


@pytest.mark.ring
def test_all_ranks_of_a_ring_plan_alike(ranks: Ranks, raw: Callable[..., Any]) -> None:
    own = ranks.run(3, layouts_of_steps, raw({"parallel.layout": "balanced", "train.seq_len": 600}))
    assert own[0] == own[1] == own[2] and len({str(x) for x in own[0]}) > 1


@pytest.mark.ring
def test_transfers_are_measured_every_few_steps_and_change_nothing(ranks: Ranks, raw: Callable[..., Any]) -> None:
    results, written = {}, {}
    for every in (2, 1000):
        settings = raw({"parallel.ring": 2, "train.steps": 4, "log.every": every, "name": f"every{every}", "activation": "block"})
        results[every] = ranks.run(2, trajectory, settings, False)
        written[every] = read_lines(Path(settings["log"]["dir"]) / f"every{every}" / "metrics.jsonl")
    assert results[2]["lines"] == results[1000]["lines"]
    assert ["comm_exposed_ms" in line for line in written[2]] == [False, True, False, True]
    assert not any("comm_exposed_ms" in line for line in written[1000])
    for line in written[2][1::2]:
        assert 0 <= line["comm_hidden_pct"] <= 100 and 0 < line["comm_exposed_ms"] <= 1e3 * line["step_s"]
        assert line["ring_balance"] >= 1
