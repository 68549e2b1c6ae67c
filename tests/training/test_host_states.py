"""optim.offload: moments on the host, updates with the bits of the optimizer that keeps them on the device."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import Ranks
from tasks import merged, trajectory
from torch import nn

from ringattn import cost
from ringattn.config import OptimConfig
from ringattn.cost import GIB
from ringattn.planner import plan
from ringattn.training.host_states import HostStateAdamW
from ringattn.training.optimizer import build_optimizer

SHAPES = ((129, 33), (17,), (1,), (64, 64), (5000,), (3, 7, 11))
SETTINGS: dict[str, Any] = {"lr": 0.01, "betas": (0.9, 0.95), "eps": 1e-8}


def network(device: str = "cpu", dtype: torch.dtype = torch.float32, scale: int = 1) -> nn.ParameterList:
    generator = torch.Generator().manual_seed(3)
    values = [torch.randn(shape[0] * scale, *shape[1:], generator=generator, dtype=torch.float64) for shape in SHAPES]
    return nn.ParameterList([nn.Parameter(x.to(device, dtype)) for x in values])


def groups(model: nn.Module) -> list[dict[str, Any]]:
    parameters = list(model.parameters())
    return [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]


def take_steps(models: list[nn.Module], optimizers: list[torch.optim.Optimizer], steps: int, missing: int | None = None) -> None:
    """The same random gradients for all; parameter ``missing`` has none in every second step."""
    for i in range(steps):
        for j, twins in enumerate(zip(*(m.parameters() for m in models), strict=True)):
            gradient = None if j == missing and i % 2 else torch.randn_like(twins[0])
            for p in twins:
                p.grad = None if gradient is None else gradient.clone()
        for optimizer in optimizers:
            optimizer.step()


@pytest.mark.parametrize("states", ["fp32", "bf16"])
@pytest.mark.parametrize("bucket", [64, 1 << 12, 1 << 20])
def test_updates_have_the_same_bits(states: str, bucket: int) -> None:
    stays, moves = network(), network()
    with_states = build_optimizer(OptimConfig(states=states, lr=0.01), stays)  # type: ignore[arg-type]
    host = HostStateAdamW(groups(moves), **SETTINGS, narrow=states == "bf16", bucket=bucket)
    assert len(host.buckets) == -(-sum(p.numel() for p in moves.parameters()) // bucket)
    take_steps([stays, moves], [with_states, host], 6, missing=3)
    for a, b in zip(stays.parameters(), moves.parameters(), strict=True):
        assert torch.equal(a, b)
        for name, value in with_states.state[a].items():
            assert torch.equal(host.state[b][name], value), name
    flat = host.host[0]
    assert flat.numel() == sum(p.numel() for p in moves.parameters())
    assert flat.dtype == (torch.bfloat16 if states == "bf16" else torch.float32)


def test_state_moves_between_the_two() -> None:
    first, second, third = network(), network(), network()
    a = torch.optim.AdamW(groups(first), **SETTINGS)
    b, c = (HostStateAdamW(groups(m), **SETTINGS, bucket=1000) for m in (second, third))
    take_steps([first, second, third], [a, b, c], 2)
    b.load_state_dict(a.state_dict())
    assert b.state_dict()["state"][0]["exp_avg"].data_ptr() == b.host[0].data_ptr()  # still the host's buffer
    a.load_state_dict(copy.deepcopy(c.state_dict()))  # (PyTorch's own keeps the tensors it is given)
    take_steps([first, second, third], [a, b, c], 2)
    for x, y, z in zip(first.parameters(), second.parameters(), third.parameters(), strict=True):
        assert torch.equal(x, y) and torch.equal(x, z)


def test_a_parameter_without_a_state_starts_anew() -> None:
    first, second = network(), network()
    a, b = torch.optim.AdamW(groups(first), **SETTINGS), HostStateAdamW(groups(second), **SETTINGS)
    take_steps([second], [b], 2)
    b.load_state_dict(a.state_dict())  # of an optimizer that has not taken a step
    assert all(not x.any() for x in b.host) and all(not b.state[p]["step"] for p in second.parameters())


@pytest.mark.ring
@pytest.mark.parametrize("states", ["fp32", "bf16"])
def test_training_and_resume_have_the_same_bits(ranks: Ranks, raw: Callable[..., Any], states: str) -> None:
    """Sharded over two ranks; stopped with states on the host and resumed without, and the other way round."""
    settings = raw({"optim.states": states, "checkpoint.keep": 2, "train.steps": 4, "name": "device"})
    wanted = ranks.run(2, trajectory, settings)
    host = ranks.run(2, trajectory, merged(settings, {"optim.offload": True, "name": "host"}))
    assert host["lines"] == [line | {"mem_gib": got["mem_gib"]} if "mem_gib" in line else line
                             for line, got in zip(wanted["lines"], host["lines"], strict=True)]  # fmt: skip
    assert all(torch.equal(host["parameters"][n], p) for n, p in wanted["parameters"].items())
    for before in (True, False):
        parts = merged(settings, {"name": f"parts-{before}"})
        ranks.run(2, trajectory, merged(parts, {"train.stop_after": 2, "optim.offload": before}), False)
        again = ranks.run(2, trajectory, merged(parts, {"optim.offload": not before}), False)
        assert again["lines"] == wanted["lines"]
        assert all(torch.equal(again["parameters"][n], p) for n, p in wanted["parameters"].items())


@pytest.mark.ring
def test_resume_on_another_number_of_ranks(ranks: Ranks, raw: Callable[..., Any]) -> None:
    settings = raw({"checkpoint.keep": 2, "train.steps": 4, "optim.offload": True, "name": "elastic"})
    ranks.run(2, trajectory, merged(settings, {"train.stop_after": 2}), False)
    again = ranks.run(1, trajectory, settings, False)
    whole = ranks.run(1, trajectory, merged(settings, {"name": "whole"}), False)
    assert again["lines"][-1]["loss"] == pytest.approx(whole["lines"][-1]["loss"], rel=1e-5)


@pytest.mark.ring
def test_states_that_the_host_cannot_hold_are_refused(ranks: Ranks, raw: Callable[..., Any]) -> None:
    said = r"offload_gib=1e-06: a rank's optimizer states take .* GiB of host memory.*optim.offload=false"
    with pytest.raises(AssertionError, match=said):
        ranks.run(1, trajectory, raw({"optim.offload": True, "offload_gib": 1e-6, "name": "refused"}), False)


def test_plan_offers_it_where_nothing_else_fits() -> None:
    model = {"width": 5120, "layers": 40, "heads": 40, "kv_heads": 40, "head_dim": 128, "ffn_width": 13824, "vocab_size": 32000}
    raw = {"model": model, "train": {"seq_len": 8192, "rows": 1, "steps": 1}, "data": {}}
    found = plan(raw, machine="h200", gpus=1)
    assert found.overrides["optim.offload"] is True
    states = 8 * sum(cost.parameters(found.work.model).values())
    assert found.memory.parts["optimizer"] < 2 * GIB < states == cost.host_bytes(found.work)
    with pytest.raises(ValueError, match="nothing fits"):
        plan(raw, machine="h200", gpus=1, fixed={"optim.offload": False})
    more = plan(raw, machine="h200", gpus=8)
    assert "optim.offload" not in more.overrides


@pytest.mark.gpu
@pytest.mark.parametrize("states", ["fp32", "bf16"])
def test_on_a_gpu(states: str) -> None:
    """Many buckets, three slots: the same bits, and the moments stay off the device."""
    stays, moves = network("cuda", scale=1000), network("cuda", scale=1000)
    optimizer = build_optimizer(OptimConfig(states=states, lr=0.01), stays)  # type: ignore[arg-type]
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    host = HostStateAdamW(groups(moves), **SETTINGS, narrow=states == "bf16", bucket=1 << 20)
    assert len(host.buckets) > 10 and host.host[0].is_pinned() and torch.cuda.memory_allocated() == before
    for _ in range(4):
        take_steps([stays, moves], [optimizer, host], 2)
        torch.cuda.synchronize()
        for a, b in zip(stays.parameters(), moves.parameters(), strict=True):
            assert torch.equal(a, b)
            assert torch.equal(host.state[b]["exp_avg_sq"].cuda(), optimizer.state[a]["exp_avg_sq"])
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()
    host.step()
    torch.cuda.synchronize()
    bytes_each = 2 if states == "bf16" else 4
    assert torch.cuda.memory_allocated() == held
    if states == "fp32":  # (bf16 updates have fp32 temporaries of a bucket besides)
        assert torch.cuda.max_memory_allocated() - held < 2 * 3 * (1 << 20) * bytes_each + (4 << 20)
