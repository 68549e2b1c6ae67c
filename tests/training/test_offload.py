"""Activation policies: equal bits for all four, no extra attention or transfer, and what offloading moves and refuses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import Ranks
from tasks import POLICIES, with_policies
from torch import Tensor

from ringattn.config import ConfigError
from ringattn.model import Block, ModelConfig, Transformer
from ringattn.training.offload import Offload

TINY = ModelConfig(vocab_size=50, width=24, layers=5, heads=4, kv_heads=2, head_dim=8, ffn_width=40, init_std=0.3, loss_chunk=20)


@pytest.mark.ring
@pytest.mark.parametrize("chunk", [0, 16])
def test_policies_give_equal_bits_and_attention_runs_once(ranks: Ranks, raw: Callable[..., Any], chunk: int) -> None:
    changes = {"deterministic": True, "model.layers": 3, "model.ffn_chunk": chunk, "model.qk_norm": False, "train.steps": 2}
    found = ranks.run(2, with_policies, raw(changes))
    reference = found["none"]
    for policy in POLICIES:
        assert found[policy]["loss"] == reference["loss"], policy
        for name, gradient in reference["gradients"].items():
            assert torch.equal(found[policy]["gradients"][name], gradient), f"{policy}: {name}"
    for policy in ("attention_saved", "offload"):  # no second launch, no second turn of the ring
        assert found[policy]["attention"] == reference["attention"] and found[policy]["transfers"] == reference["transfers"] > 0
    assert 2 * found["block"]["attention"] == 3 * reference["attention"] > 0  # forward, forward again, backward


def step(model: Transformer, tokens: Tensor) -> list[Tensor]:
    labels, positions = tokens.roll(-1, 1), torch.arange(tokens.shape[1])
    model(tokens, positions, labels, [0]).backward()
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    return gradients


def build(offload: Offload | None) -> Transformer:
    model = Transformer(TINY, attend=lambda q, k, v, handle, sinks: q * v.repeat_interleave(2, 2) + k.repeat_interleave(2, 2))
    model.initialise(0)
    for i, block in enumerate(model.blocks):
        assert isinstance(block, Block)
        if offload is not None:
            block.forward = offload.wrap(block.forward, block, i)  # type: ignore[method-assign]
    return model


def test_storages_leave_once_and_come_back_once() -> None:
    offload = Offload(TINY.layers, torch.device("cpu"), budget=1 << 30, smallest=1)
    model, tokens = build(offload), torch.randint(50, (2, 33))
    wanted, first = step(build(None), tokens), 0
    for steps in (1, 2, 3):
        assert all(torch.equal(a, b) for a, b in zip(step(model, tokens), wanted, strict=True))
        assert offload.copied_out > 0 and offload.copied_out % (steps * (TINY.layers - 1)) == 0  # every block but the last
        assert offload.copied_in == offload.copied_out * (TINY.layers - 2) // (TINY.layers - 1)  # the last two were still there
        first = first or offload.host_bytes
        assert offload.host_bytes == first  # buffers are used again
    assert not any(e.device is not None for g in offload.recent for e in g.entries.values())


def test_only_the_last_blocks_stay_on_the_device() -> None:
    offload = Offload(TINY.layers, torch.device("cpu"), budget=1 << 30, smallest=1)
    model, tokens = build(offload), torch.randint(50, (2, 33))
    loss = model(tokens, torch.arange(33), tokens, [0])
    held = [sum(e.device is not None for e in g.entries.values()) for g in offload.recent]
    assert held[:3] == [0, 0, 0] and held[3] > 0 and held[4] > 0
    del loss  # nobody walks back: the buffers are free for the next pass
    before = offload.host_bytes
    step(model, tokens)
    assert offload.host_bytes == before


def test_budget_and_second_backward() -> None:
    tokens = torch.randint(50, (2, 33))
    with pytest.raises(RuntimeError, match=r"offload_gib=.*activation=attention_saved"):
        step(build(Offload(TINY.layers, torch.device("cpu"), budget=20_000, smallest=1)), tokens)
    model = build(Offload(TINY.layers, torch.device("cpu"), budget=1 << 30, smallest=1))
    for parameter in model.head.parameters():
        parameter.requires_grad_(False)
    x = model.blocks[0](torch.randn(1, 9, 24, requires_grad=True), torch.ones(1, 9, 4), torch.zeros(1, 9, 4), 0).sum()
    x.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="walked back once"):
        x.backward()


@pytest.mark.ring
def test_a_budget_that_is_too_small_is_refused_before_the_first_step(ranks: Ranks, raw: Callable[..., Any]) -> None:
    with pytest.raises(Exception, match=r"offload_gib=1e-06.*GiB") as caught:
        ranks.run(1, with_policies, raw({"offload_gib": 1e-6}))
    assert ConfigError.__name__ in str(caught.value) or isinstance(caught.value, ConfigError)
