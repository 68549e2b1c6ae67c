"""Initial values do not depend on dtype, device, sharding or wrappers; presets have the published sizes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import yaml
from torch import Tensor
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from ringattn.model import ModelConfig, Transformer, init
from ringattn.model.init import initial_rule, parameter_name

CFG = ModelConfig(vocab_size=67, width=32, layers=2, heads=4, kv_heads=2, head_dim=6, ffn_width=50, qk_norm=True, sinks=True, tied=False)


def attend(q: Tensor, k: Tensor, v: Tensor, handle: int, sinks: Tensor | None) -> Tensor:
    return q


def values(dtype: torch.dtype = torch.float64, seed: int = 5, cfg: ModelConfig = CFG) -> dict[str, Tensor]:
    model = Transformer(cfg, attend=attend).to(dtype)
    model.initialise(seed)
    return {n: p.detach() for n, p in model.named_parameters()}


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(init, "BLOCK_NUMEL", 200)  # so that small parameters have several blocks, and shards end within one


def test_same_for_every_dtype_and_from_meta() -> None:
    exact = values()
    for dtype in (torch.float32, torch.bfloat16):
        for name, value in values(dtype).items():
            assert value.dtype == dtype and torch.equal(value, exact[name].to(dtype)), name
    torch.manual_seed(99)
    with torch.device("meta"):
        model = Transformer(CFG, attend=attend)
    with pytest.raises(RuntimeError, match="to_empty"):
        model.initialise(5)
    model.to_empty(device="cpu").initialise(5)
    assert all(torch.equal(p, exact[n].float()) for n, p in model.named_parameters())
    assert torch.initial_seed() == 99  # the global generator is nobody's business


def test_seed_name_and_nothing_else() -> None:
    one, other = values(seed=5), values(seed=6)
    drawn = [n for n in one if initial_rule(n, CFG)[0] == "normal"]
    assert all(not torch.equal(one[n], other[n]) for n in drawn)
    assert not torch.equal(one["blocks.0.ffn.down.weight"], one["blocks.1.ffn.down.weight"])
    deeper = values(cfg=dataclasses.replace(CFG, layers=3))
    assert torch.equal(deeper["blocks.1.ffn.gate_up.weight"], one["blocks.1.ffn.gate_up.weight"])
    tied = values(cfg=dataclasses.replace(CFG, tied=True))
    assert torch.equal(tied["embedding.weight"], one["embedding.weight"])


def test_distributions_are_those_of_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    cfg = dataclasses.replace(CFG, width=256, ffn_width=512, vocab_size=1000, init_std=0.05)
    for name, value in values(cfg=cfg).items():
        if "norm" in name or "sinks" in name:
            assert torch.equal(value, torch.full_like(value, 0.0 if "sinks" in name else 1.0)), name
            continue
        std = 0.05 / math.sqrt(4) if name.endswith(("out.weight", "down.weight")) else 0.05
        n = value.numel()
        assert abs(value.mean()) < 5 * std / math.sqrt(n) and abs(value.std() / std - 1) < 5 / math.sqrt(2 * n), name
        assert abs((value / std).pow(4).mean() - 3) < 5 * math.sqrt(96 / n), name  # a normal, not a uniform
        assert value.unique().numel() == n  # no block repeats another


def test_every_parameter_has_exactly_one_rule() -> None:
    for name in values():
        initial_rule(name, CFG)
    with pytest.raises(KeyError, match="matches 0 lines"):
        initial_rule("blocks.0.attention.bias", CFG)


def test_wrappers_do_not_change_the_values() -> None:
    exact = values(torch.float32)
    model = Transformer(CFG, attend=attend)
    model.blocks[0] = checkpoint_wrapper(model.blocks[0])
    model.blocks[1] = torch.compile(model.blocks[1], backend="eager")
    model.initialise(5)
    found = {parameter_name(n): p for n, p in model.named_parameters()}
    assert found.keys() == exact.keys() and all(torch.equal(p, exact[n]) for n, p in found.items())


@contextmanager
def without_peers(rank: int, world: int) -> Iterator[None]:
    """One rank among others that do not exist: any communication would give wrong values."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("shape,names", [((3,), ("shard",)), ((2, 4), ("replicate", "shard"))])
def test_same_for_every_sharding(shape: tuple[int, ...], names: tuple[str, ...]) -> None:
    """FSDP2 from the meta device, as each rank in turn; uneven shards among them."""
    exact = values(torch.float32)
    world = math.prod(shape)
    held = {n: torch.zeros(p.shape[0], dtype=torch.int64) for n, p in exact.items()}
    for rank in range(world):
        with without_peers(rank, world):
            # torch caches meshes by value, coordinate included: a name of its own for each rank
            mesh = DeviceMesh("cpu", torch.arange(world).view(shape), mesh_dim_names=tuple(f"{n}{rank}" for n in names))
            with torch.device("meta"):
                model = Transformer(CFG, attend=attend)
            for block in model.blocks:
                fully_shard(block, mesh=mesh)
            fully_shard(model, mesh=mesh).to_empty(device="cpu")
            model.initialise(5)
            for name, p in model.named_parameters():
                step, index = -(-p.shape[0] // shape[-1]), rank % shape[-1]
                mine = slice(index * step, (index + 1) * step)
                assert isinstance(p, DTensor) and torch.equal(p.to_local(), exact[name][mine]), (name, rank)
                held[name][mine] += 1
    assert all((h == world // shape[-1]).all() for h in held.values())


@pytest.mark.parametrize("rank,placements,cut", [
    (3, [Replicate(), Shard(1)], (slice(None), slice(16, 32))),
    (2, [Shard(0), Shard(0)], (slice(50, 75),)),
    (1, [Shard(1), Shard(0)], (slice(50, 100), slice(0, 16))),
])
def test_sharding_by_columns_and_twice(rank: int, placements: list, cut: tuple[slice, ...]) -> None:
    exact = values(torch.float32)["blocks.0.ffn.gate_up.weight"]
    with without_peers(rank, 4):
        mesh = DeviceMesh("cpu", torch.arange(4).view(2, 2), mesh_dim_names=(f"a{rank}", f"b{rank}"))
        model = Transformer(CFG, attend=attend)
        sharded = DTensor.from_local(torch.zeros(exact[cut].shape), mesh, placements, shape=exact.shape, stride=exact.stride())
        model.blocks[0].ffn.gate_up.weight = torch.nn.Parameter(sharded)
        model.initialise(5)
        assert torch.equal(model.blocks[0].ffn.gate_up.weight.to_local(), exact[cut])


PUBLISHED = {  # vocabulary of the publication, parameters in total
    "debug": (258, 1.02e6), "125m": (50257, 123.5e6), "350m": (50257, 360e6), "1b": (100352, 1.485e9),
    "3b": (128256, 3.21e9), "8b": (128256, 8.03e9), "13b": (32000, 13.02e9),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_presets_have_the_published_sizes(name: str) -> None:
    folder = Path(__file__).parents[2] / "configs" / "model"
    raw = yaml.safe_load((folder / f"{name}.yaml").read_text())
    assert set(raw) == {f.name for f in dataclasses.fields(ModelConfig)}  # every key can be overridden by name
    types = {f.name: type(f.default if f.default is not dataclasses.MISSING else []) for f in dataclasses.fields(ModelConfig)}
    assert all(type(v) is types[k] for k, v in raw.items()) and raw["name"] == name
    vocab_size, total = PUBLISHED[name]
    cfg = dataclasses.replace(ModelConfig(**raw), vocab_size=vocab_size)
    with torch.device("meta"):
        model = Transformer(cfg, attend=attend)
    count = sum(p.numel() for p in model.parameters())
    assert count == cfg.parameters() and abs(count / total - 1) < 0.005
    assert {p.stem for p in folder.glob("*.yaml")} == set(PUBLISHED)
    assert cfg.head_dim == 128 or not name.endswith("b")


@pytest.mark.parametrize("changes", [{}, {"tied": True}, {"qk_norm": False, "sinks": False}, {"kv_heads": 1, "head_dim": 10}])
def test_parameter_count_is_the_real_one(changes: dict) -> None:
    cfg = dataclasses.replace(CFG, **changes)
    assert cfg.parameters() == sum(p.numel() for p in Transformer(cfg, attend=attend).parameters())
