"""The model under FSDP2 on two real processes has the loss and gradients of one process: tied, untied, mixed precision, recomputed."""

from __future__ import annotations

import dataclasses
import functools
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from model_tools import DenseAttend, causal_mask, rel
from torch import Tensor
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing, checkpoint_wrapper
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from ringattn.model import FREE_TO_SAVE, IGNORE, Block, ModelConfig, Transformer

CFG = ModelConfig(vocab_size=51, width=24, layers=2, heads=4, kv_heads=2, head_dim=8, ffn_width=40, init_std=0.1, loss_chunk=7, ffn_chunk=9)
CASES: dict[str, tuple[dict[str, Any], torch.dtype | None, bool]] = {
    "tied": ({}, None, False),
    "untied, every feature, recomputed": ({"tied": False, "qk_norm": True, "sinks": True, "windows": [4, 0]}, None, True),
    "tied, bf16, recomputed": ({}, torch.bfloat16, True),
    "untied, bf16": ({"tied": False, "sinks": True, "ffn_chunk": 0}, torch.bfloat16, False),
}
S = 21


def inputs(rows: slice) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(11)
    tokens, labels = torch.randint(51, (2, 4, S), generator=g)
    labels[torch.rand(4, S, generator=g) < 0.3] = IGNORE
    labels[2:] = IGNORE if rows.start == 2 else labels[2:]  # the second rank has nothing to predict
    return tokens[rows], torch.arange(S) + 10**6, labels[rows]


def build(cfg: ModelConfig) -> Transformer:
    attend = DenseAttend({w: causal_mask(S, w) for w in cfg.distinct_windows})
    with torch.device("meta"):
        return Transformer(cfg, attend=attend)


def worker(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2, timeout=timedelta(seconds=60))
    keep = functools.partial(
        create_selective_checkpoint_contexts,
        lambda ctx, op, *a, **k: CheckpointPolicy.MUST_SAVE if op in FREE_TO_SAVE else CheckpointPolicy.PREFER_RECOMPUTE,
    )
    results = {}
    for case, (changes, dtype, recompute) in CASES.items():
        cfg = dataclasses.replace(CFG, **changes)
        model = build(cfg)
        if recompute:
            wrap = functools.partial(checkpoint_wrapper, context_fn=keep)
            apply_activation_checkpointing(model, checkpoint_wrapper_fn=wrap, check_fn=lambda m: isinstance(m, Block))
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32 if dtype else None, cast_forward_inputs=False)
        for unit in (*model.blocks, model):
            fully_shard(unit, mp_policy=policy)
        for unit in model.modules():
            if isinstance(unit, FSDPModule):
                unit.set_gradient_divide_factor(1.0)
                unit.set_force_sum_reduction_for_comms(True)
        model.to_empty(device="cpu")
        model.initialise(7)
        for _ in range(2):  # accumulation over two micro-batches
            loss = model(*inputs(slice(2 * rank, 2 * rank + 2)), cfg.distinct_windows)
            loss.backward()
        total = loss.detach().clone()
        dist.all_reduce(total)
        grads = {n: p.grad.full_tensor() for n, p in model.named_parameters()}
        results[case] = (total, {n.replace("_checkpoint_wrapped_module.", ""): g for n, g in grads.items()})
    if rank == 0:
        torch.save(results, f"{folder}/results.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder: Path = tmp_path_factory.mktemp("fsdp")
    mp.spawn(worker, (str(folder),), nprocs=2)
    loaded: dict[str, Any] = torch.load(folder / "results.pt", weights_only=True)
    return loaded


@pytest.mark.ring
@pytest.mark.parametrize("case", CASES)
def test_sharded_equals_whole(case: str, results: dict[str, Any]) -> None:
    changes, dtype, _ = CASES[case]
    cfg = dataclasses.replace(CFG, **changes)
    model = build(cfg).to_empty(device="cpu").to(dtype or torch.float32)
    model.initialise(7)
    tokens, positions, labels = inputs(slice(0, 4))
    labels[2:] = IGNORE
    loss = model(tokens, positions, labels, cfg.distinct_windows)
    (2 * loss).backward()
    total, grads = results[case]
    band = 0.03 if dtype else 2e-6
    assert total.dtype == torch.float32 and rel(total, loss) <= band / 3
    assert grads.keys() == {n for n, _ in model.named_parameters()}
    for name, p in model.named_parameters():
        assert grads[name].dtype == torch.float32 and rel(grads[name], p.grad) <= band, name
