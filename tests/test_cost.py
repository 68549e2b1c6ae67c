"""The cost model against the real thing: counted parameters, counted FLOPs, counted pairs, measured activations."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

from ringattn import cost
from ringattn.cost.memory import phases
from ringattn.model import FREE_TO_SAVE, ModelConfig, Transformer

CFG = ModelConfig(vocab_size=97, width=32, layers=3, heads=4, kv_heads=2, head_dim=12, ffn_width=56, loss_chunk=16)
TOKENS = 40


@torch.library.custom_op("ringattn_test::stand_in", mutates_args=())
def stand_in(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """An attention of the right shapes: q, k, v, out and lse are what a real one saves. Costs no matrix product."""
    return q * k.mean() * v.mean(), q.sum(-1).transpose(1, 2).contiguous()


stand_in.register_fake(lambda q, k, v: (torch.empty_like(q), q.new_empty(q.shape[0], q.shape[2], q.shape[1])))
stand_in.register_autograd(
    lambda ctx, d, _: tuple(torch.zeros_like(t) for t in ctx.saved_tensors[:3]),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs, *output),
)


def attend(q: Tensor, k: Tensor, v: Tensor, handle: int, sinks: Tensor | None) -> Tensor:
    out: Tensor = stand_in(q, k, v)[0]
    return out


def build(cfg: ModelConfig) -> Transformer:
    model = Transformer(cfg, attend=attend)
    model.initialise(0)
    return model


def loss(model: Transformer) -> Tensor:
    tokens, labels = torch.randint(97, (2, 2, TOKENS // 2))
    out: Tensor = model(tokens, torch.arange(TOKENS // 2), labels, [0])
    return out


@pytest.mark.parametrize("changes", [{}, {"tied": False, "sinks": True}, {"qk_norm": True, "kv_heads": 1}])
def test_parameters_by_part(changes: dict[str, Any]) -> None:
    cfg = dataclasses.replace(CFG, **changes)
    count = dict.fromkeys(cost.parameters(cfg), 0)
    for name, p in build(cfg).named_parameters():
        part = "norms" if "norm" in name else next(part for part in ("sinks", "embedding", "head.", "attention", "ffn") if part in name)
        count[part.strip(".")] += p.numel()
    assert count == cost.parameters(cfg)


def test_matrix_flops_are_those_torch_counts() -> None:
    model = build(CFG)
    flops = cost.step_flops(CFG, tokens=TOKENS, pairs=[0])
    with FlopCounterMode(display=False) as whole:
        loss(model).backward()
    assert whole.get_total_flops() == flops.total == 3 * flops.matmul_forward and flops.recompute == 0
    with torch.no_grad(), FlopCounterMode(display=False) as forward:
        loss(model)
    assert forward.get_total_flops() == flops.matmul_forward


def under(policy: str, model: Transformer, caches: list[Any] | None = None) -> Transformer:
    """The model with its blocks checkpointed; ``caches`` receives what the selective policy saves into, one mapping a block."""
    saved = (torch.ops.ringattn_test.stand_in.default, *FREE_TO_SAVE) if policy == "attention_saved" else ()

    def contexts() -> Any:
        def choose(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
            return CheckpointPolicy.MUST_SAVE if op in saved else CheckpointPolicy.PREFER_RECOMPUTE

        pair = create_selective_checkpoint_contexts(choose)
        if caches is not None:
            caches.append(pair[0].storage)
        return pair

    if policy != "none":
        for block in model.blocks:
            block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False, context_fn=contexts)
    return model


@pytest.mark.parametrize("policy", ["block", "attention_saved"])
def test_recomputed_flops_are_those_torch_counts(policy: Any) -> None:
    model = under(policy, build(CFG))
    with FlopCounterMode(display=False) as counted:
        loss(model).backward()
    flops = cost.step_flops(CFG, tokens=TOKENS, pairs=[0], policy=policy)
    assert counted.get_total_flops() == flops.total + flops.recompute


@pytest.mark.parametrize("blockwise", [False, True])
@pytest.mark.parametrize("qk_norm", [False, True])
@pytest.mark.parametrize("policy", ["none", "block", "attention_saved"])
def test_saved_activations_are_what_autograd_keeps(policy: Any, qk_norm: bool, blockwise: bool) -> None:
    """By the slope in the number of layers, so that embedding and head do not count."""
    measured = []
    for layers in (2, 4):
        cfg = dataclasses.replace(CFG, layers=layers, qk_norm=qk_norm, ffn_chunk=16 if blockwise else 0)
        caches: list[Any] = []
        model = under(policy, build(cfg), caches)
        known = {p.untyped_storage().data_ptr() for p in model.parameters()}
        storages: dict[int, Any] = {}

        def pack(t: Tensor, known: set[int] = known, storages: dict[int, Any] = storages) -> Tensor:
            if t.untyped_storage().data_ptr() not in known:
                storages[t.untyped_storage().data_ptr()] = t.untyped_storage()
            return t

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            alive = loss(model)
        for leaf in tree_leaves([dict(c) for c in caches]):
            if isinstance(value := getattr(leaf, "val", leaf), Tensor):
                pack(value)
        assert alive.requires_grad
        measured.append(sum(s.nbytes() for s in storages.values()))
    per_token = (measured[1] - measured[0]) / 2 / TOKENS
    want = cost.saved_bytes_per_token(dataclasses.replace(CFG, qk_norm=qk_norm, ffn_chunk=16 if blockwise else 0), policy, 4)
    if policy == "none":
        # Without a fused RMSNorm, as on the CPU, each norm keeps one more tensor and its row statistics.
        norms = 4 * (CFG.width * (1 if blockwise else 2) + (CFG.heads + CFG.kv_heads) * CFG.head_dim * qk_norm)
        assert want <= per_token <= want + norms + 4 * (2 + 6 * qk_norm)
    else:
        assert per_token == want


@pytest.mark.parametrize("causal,window", [(True, 0), (True, 1), (True, 5), (True, 300), (False, 0)])
@pytest.mark.parametrize("documents", [None, [3, 1, 20, 9]])
def test_visible_pairs(causal: bool, window: int, documents: list[int] | None) -> None:
    s = 40
    i = torch.arange(s)
    mask = torch.ones(s, s, dtype=torch.bool)
    if causal:
        mask = i[:, None] >= i[None]
    if window:
        mask &= i[:, None] - i[None] < window
    if documents is not None:
        ids = torch.repeat_interleave(torch.arange(5), torch.tensor([*documents, s - sum(documents)]))
        mask &= (ids[:, None] == ids[None]) & (ids[:, None] < 4)
    assert cost.visible_pairs(s, window=window, causal=causal, documents=documents) == int(mask.sum())


def test_conventions() -> None:
    s, rows = 64, 3
    t = s * rows
    exact = cost.step_flops(CFG, tokens=t, pairs=[rows * cost.visible_pairs(s)])
    assert exact.attention_forward == 4 * 3 * rows * (s * (s + 1) // 2) * 4 * 12
    assert exact.attention_backward == 2.5 * exact.attention_forward
    flash = cost.step_flops(CFG, tokens=t, seq_len=s, convention="flash")
    assert flash.attention_forward == exact.attention_forward * s / (s + 1)
    palm = cost.step_flops(CFG, tokens=t, seq_len=s, convention="palm")
    parts = cost.parameters(CFG)
    n = parts["attention"] + parts["ffn"] + parts["embedding"]
    assert palm.total == (6 * n + 12 * CFG.layers * CFG.heads * CFG.head_dim * s) * t and palm.convention == "palm"
    mixed = dataclasses.replace(CFG, windows=[8, 8, 0])
    both = cost.step_flops(mixed, tokens=t, pairs=[100, 1000])
    assert both.attention_forward == 4 * (100 + 100 + 1000) * 48
    with pytest.raises(ValueError, match="needs pairs for each"):
        cost.step_flops(mixed, tokens=t, pairs=[100])
    with pytest.raises(ValueError, match="needs seq_len"):
        cost.step_flops(mixed, tokens=t, convention="palm")


def test_peak_and_mfu() -> None:
    for name, peak in {
        "NVIDIA A100-SXM4-80GB": 312e12, "NVIDIA H100 80GB HBM3": 989e12, "NVIDIA H100 PCIe": 756e12, "NVIDIA H100 NVL": 835e12,
        "NVIDIA H200": 989e12, "NVIDIA GH200 480GB": 989e12, "NVIDIA B200": 2250e12, "NVIDIA GB200": 2500e12,
        "NVIDIA H20": None, "cpu": None, "": None,
    }.items():
        assert cost.peak_flops(name) == peak, name
    assert cost.mfu(989e12 * 4, 2.0, 4, "NVIDIA H200") == pytest.approx(0.5) and cost.mfu(1e12, 1.0, 1, "cpu") is None


def test_memory_follows_what_it_should() -> None:
    tokens = 16384
    cfg = dataclasses.replace(CFG, vocab_size=4096)
    total = sum(cost.parameters(cfg).values())

    def parts(**changes: Any) -> dict[str, dict[str, int]]:
        return phases(cost.Work(**{"model": cfg, "seq_len": tokens, **changes}))

    base = parts()
    assert all(p["weights"] == 4 * total and p["optimizer"] == 8 * total for p in base.values())
    assert all(v >= 0 for p in base.values() for v in p.values())
    sharded = parts(shard=8, rows=8)
    assert sharded["loss"]["weights"] == 4 * -(-total // 8) and sharded["loss"]["activations"] == base["loss"]["activations"]
    longer = parts(seq_len=2 * tokens)
    assert longer["loss"]["activations"] == 2 * base["loss"]["activations"] and longer["loss"]["logits"] == base["loss"]["logits"]
    assert longer["reduction"]["gradients"] == base["reduction"]["gradients"]
    saved = [parts(policy=p)["loss"]["activations"] for p in ("none", "attention_saved", "block")]
    assert saved == sorted(saved, reverse=True) and len(set(saved)) == 3
    # a ring's buffers do not grow with the ring: the same tokens a rank, rings of 4 and 64
    rings = [parts(ring=r, seq_len=r * tokens)["last block"]["kv_buffers"] for r in (4, 64)]
    assert rings[0] == rings[1] > 0 == base["last block"]["kv_buffers"]
    chunked = [phases(cost.Work(dataclasses.replace(cfg, ffn_width=256, ffn_chunk=c), tokens))["forward"]["transient"] for c in (0, 64)]
    assert chunked[0] > chunked[1]
    exact = parts(compute_bytes=8)["loss"]
    assert exact["weights"] == 8 * total and exact["gathered"] == 0
    peak = cost.memory(cost.Work(cfg, tokens))
    assert peak.peak == max(peak.phases.values()) == sum(peak.parts.values()) and peak.phases.keys() == base.keys()


def test_accumulated_gradients_are_whole_unless_reduced_each_time() -> None:
    one, last, each = (
        phases(cost.Work(CFG, 1024, rows=rows, ring=4, grad_sync=sync))["loss"]["gradients"]
        for rows, sync in ((1, "last"), (2, "last"), (2, "each"))
    )
    total = sum(cost.parameters(CFG).values())
    assert (one, last, each) == (0, 4 * total, 4 * -(-total // 4))


def test_time_is_made_of_its_parts() -> None:
    cfg = ModelConfig(vocab_size=1000, width=1024, layers=4, heads=8, kv_heads=8, head_dim=128, ffn_width=4096, ffn_chunk=4096)
    h200 = cost.find_machine("h200")

    def time(**changes: Any) -> cost.StepTime:
        return cost.step_time(cost.Work(**{"model": cfg, "seq_len": 2**17, **changes}), h200)

    one = time()
    assert one.total_s == sum(one.device.values()) > one.host_s and not one.host_bound
    assert one.device["exposed communication"] == 0 and one.device["run again"] > 0  # the blockwise feed-forward's
    assert time(seq_len=2**10).host_bound
    twice = time(seq_len=2**18)
    assert twice.device["attention"] == pytest.approx(4 * one.device["attention"], rel=0.02)
    assert twice.device["matrix products"] == pytest.approx(2 * one.device["matrix products"])
    assert time(policy="block").total_s > time(policy="attention_saved").total_s > one.total_s
    plain = time(state_bytes=0).device["update"]  # SGD without momentum moves the least, bf16 moments take many kernels
    assert plain < one.device["update"] < time(state_bytes=4, states="bf16").device["update"]
    # the documents of a quarter of the row: a quarter of the pairs
    assert time(documents=2**15).device["attention"] == pytest.approx(one.device["attention"] / 4, rel=0.05)
    ring = time(ring=8)
    assert one.total_s / 8 < ring.total_s < one.total_s / 6
    assert time(ring=8, layout="contiguous").device["attention"] == pytest.approx(15 / 8 * ring.device["attention"], rel=0.03)
    assert ring.forward_hop.margin > 1 and ring.backward_hop.margin > 1
    # hops between nodes: less of a margin, and at short lengths messages that nothing hides
    far = time(ring=16)
    assert far.forward_hop.margin < ring.forward_hop.margin
    assert time(ring=16, seq_len=2**13).forward_hop.margin < 1
    assert time(ring=16, seq_len=2**13).device["exposed communication"] > 0


def test_machines_by_name_and_from_a_file(tmp_path: Path) -> None:
    for name in ("a100", "h100", "h200", "b200"):
        machine = cost.find_machine(name)
        assert machine.name == name and machine.matmul_rate(4096, 4096) < machine.peak_flops == cost.peak_flops(f"NVIDIA {name.upper()}")
    assert cost.machine_of("NVIDIA GH200 480GB") == cost.find_machine("h200") and cost.machine_of("NVIDIA H20") is None
    path = tmp_path / "mine.json"
    dataclasses.replace(cost.find_machine("h200"), name="mine", link_gbs=1.0).save(path)
    mine = cost.find_machine(str(path))
    assert mine.link_gbs == 1.0 and mine.attention == cost.find_machine("h200").attention
    with pytest.raises(ValueError, match=r"machine=h300: is neither a100, h100, h200, b200 nor a file"):
        cost.find_machine("h300")
    path.write_text("{}")
    with pytest.raises(ValueError, match="is not a profile"):
        cost.find_machine(str(path))
