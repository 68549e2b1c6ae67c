"""The whole model against a second, plain one in fp64; locality; windows; what wraps around it."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from model_tools import DenseAttend, Largest, Saved, causal_mask, gold_loss, rel
from torch import Tensor

from ringattn.model import IGNORE, Block, ModelConfig, Transformer

TINY = ModelConfig(vocab_size=61, width=24, layers=3, heads=4, kv_heads=2, head_dim=8, ffn_width=40, init_std=0.3, loss_chunk=11)


def build(cfg: ModelConfig, masks: dict[int, Tensor], dtype: torch.dtype = torch.float64, seed: int = 3) -> tuple[Transformer, DenseAttend]:
    attend = DenseAttend(masks, cfg.softcap)
    model = Transformer(cfg, attend=attend).to(dtype)
    model.initialise(seed)
    with torch.no_grad():  # away from the special values 1 and 0
        for name, p in model.named_parameters():
            if "norm" in name or "sinks" in name:
                p += 0.3 * torch.randn(p.shape, dtype=torch.float64).to(dtype)
    return model, attend


def batch(cfg: ModelConfig, b: int = 2, s: int = 29) -> tuple[Tensor, Tensor, Tensor]:
    tokens, labels = torch.randint(cfg.vocab_size, (2, b, s))
    labels[torch.rand(b, s) < 0.25] = IGNORE
    return tokens, torch.randint(5000, (b, s)), labels


VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "untied": {"tied": False},
    "mha": {"kv_heads": 4},
    "mqa": {"kv_heads": 1, "ffn_chunk": 7},
    "qk_norm": {"qk_norm": True},
    "blockwise": {"ffn_chunk": 13, "loss_chunk": 1},
    "all": {"tied": False, "qk_norm": True, "sinks": True, "softcap": 3.0, "windows": [5, 5, 0], "ffn_chunk": 10, "loss_chunk": 1000},
    "narrow_heads": {"head_dim": 2, "windows": [0, 3], "sinks": True},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_equals_a_plain_model(variant: str) -> None:
    cfg = dataclasses.replace(TINY, **VARIANTS[variant])
    tokens, positions, labels = batch(cfg)
    masks = {10 + w: causal_mask(29, w) for w in cfg.distinct_windows}
    model, attend = build(cfg, masks)
    loss = model(tokens, positions, labels, [10 + w for w in cfg.distinct_windows])
    loss.backward()
    assert loss.dtype == torch.float64 and attend.handles == [10 + w for w in cfg.layer_windows]

    params = {n: p.detach().clone().requires_grad_() for n, p in model.named_parameters()}
    want = gold_loss(params, cfg, tokens, positions, labels, [masks[10 + w] for w in cfg.layer_windows])
    want.backward()
    assert rel(loss, want) <= 1e-12
    for name, p in model.named_parameters():
        assert rel(p.grad, params[name].grad) <= 1e-11, name


@pytest.mark.parametrize("dtype,band", [(torch.float32, 1e-5), (torch.bfloat16, 0.05)])
def test_lower_precision(dtype: torch.dtype, band: float) -> None:
    cfg = dataclasses.replace(TINY, qk_norm=True, sinks=True, ffn_chunk=10, init_std=0.1)
    tokens, positions, labels = batch(cfg)
    grads, losses = [], []
    for dt in (torch.float64, dtype):
        torch.manual_seed(0)
        model, _ = build(cfg, {1: causal_mask(29)}, dt)
        losses.append(model(tokens, positions + 10**6, labels, [1]))
        losses[-1].backward()
        grads.append(torch.cat([p.grad.double().flatten() for p in model.parameters()]))
    assert losses[1].dtype == torch.float32
    assert rel(losses[1], losses[0]) <= band / 5 and rel(grads[1], grads[0]) <= band


def test_everything_but_attention_is_row_local() -> None:
    """Any order of the tokens, with their positions and mask in that order, is the same model: what sharding relies on."""
    cfg = dataclasses.replace(TINY, ffn_chunk=7)
    tokens, _, labels = batch(cfg)
    positions, order = torch.arange(29), torch.randperm(29)
    mask = causal_mask(29)
    model, _ = build(cfg, {0: mask, 1: mask[:, order][:, :, order], 2: mask})
    whole = model(tokens, positions, labels, [0])
    assert rel(model(tokens[:, order], positions[order], labels[:, order], [1]), whole) <= 1e-12
    wrong = model(tokens[:, order], positions, labels[:, order], [1])  # given ids are used, not the order of arrival
    assert rel(wrong, whole) > 1e-4


def test_positions_restart_with_each_document() -> None:
    lengths = [5, 13, 11]
    documents = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths))[None]
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    tokens, _, labels = batch(TINY, b=1)
    model, attend = build(TINY, {0: causal_mask(29, documents=documents)})
    packed = model(tokens, positions, labels, [0])
    alone, start = torch.zeros(()).double(), 0
    for n in lengths:
        attend.masks[n] = causal_mask(n)
        alone += model(tokens[:, start : start + n], torch.arange(n), labels[:, start : start + n], [n])
        start += n
    assert rel(packed, alone) <= 1e-12
    changed = tokens.clone()
    changed[0, 2] = (tokens[0, 2] + 1) % TINY.vocab_size
    labels[:, :5] = IGNORE  # the first document's own loss aside, its tokens reach nobody
    assert torch.equal(model(changed, positions, labels, [0]), model(tokens, positions, labels, [0]))


def test_grouped_heads_get_their_own_keys() -> None:
    """Query head h reads key-value head h // group: each KV head carries a distinct constant."""
    seen: list[Tensor] = []

    def attend(q: Tensor, k: Tensor, v: Tensor, handle: int, sinks: Tensor | None) -> Tensor:
        out = v.repeat_interleave(q.shape[2] // k.shape[2], dim=2)
        seen.extend((q, k, v, out))
        return out

    cfg = dataclasses.replace(TINY, layers=1, heads=8, kv_heads=2)
    model = Transformer(cfg, attend=attend).double()
    model.initialise(0)
    with torch.no_grad():
        rows = model.blocks[0].attention.qkv.weight.view(12, 8, 24)
        rows.copy_(torch.arange(1, 13).double()[:, None, None].expand_as(rows))
        model.embedding.weight.fill_(1.0)
        model.blocks[0].attention.out.weight.copy_(torch.eye(24, 64))
    tokens, _, labels = batch(cfg)
    model(tokens, torch.zeros(29, dtype=torch.int64), labels, [0])
    q, k, v, out = (t[0, 0, :, 0].detach() / 24 for t in seen)
    assert [round(x, 3) for x in torch.cat([q, k, v]).tolist()] == list(range(1, 13))
    assert [round(x, 3) for x in out.tolist()] == [11] * 4 + [12] * 4


def test_layers_get_their_windows_schedule() -> None:
    cfg = dataclasses.replace(TINY, layers=7, windows=[8, 8, 0])
    assert cfg.layer_windows == [8, 8, 0, 8, 8, 0, 8] and cfg.distinct_windows == [8, 0]
    model, attend = build(cfg, {41: causal_mask(29, 8), 17: causal_mask(29)})
    tokens, positions, labels = batch(cfg)
    model(tokens, positions, labels, [41, 17])
    assert attend.handles == [41, 41, 17, 41, 41, 17, 41]
    assert dataclasses.replace(cfg, layers=2).distinct_windows == [8]  # a pattern longer than the model
    with pytest.raises(ValueError, match="needs one each"):
        model(tokens, positions, labels, [41])


def test_tied_head_is_one_parameter_with_one_key() -> None:
    tied, _ = build(TINY, {})
    untied, _ = build(dataclasses.replace(TINY, tied=False), {})
    assert set(untied.state_dict()) - set(tied.state_dict()) == {"head.weight"}
    assert set(tied.state_dict()) == {n for n, _ in tied.named_parameters()} and "embedding.weight" in tied.state_dict()
    assert not list(tied.buffers())


@pytest.mark.parametrize("tied", [True, False])
def test_neither_logits_nor_hidden_values_of_the_sequence(tied: bool) -> None:
    s = 600
    cfg = dataclasses.replace(TINY, vocab_size=500, loss_chunk=20, ffn_chunk=20, tied=tied)
    model = Transformer(cfg, attend=lambda q, k, v, handle, sinks: q)  # attention's own memory is not the model's
    model.initialise(0)
    tokens, positions, labels = batch(cfg, 1, s)
    with Largest() as seen:
        model(tokens, positions, labels, [0]).backward()
    widest = s * max(cfg.heads * cfg.head_dim, cfg.width)  # nor the packed queries, keys and values
    assert seen.numel == max(widest, cfg.vocab_size * cfg.width) < s * cfg.ffn_width * 2 < s * cfg.vocab_size


def test_compiles_without_a_break_and_without_recompiling_for_a_handle() -> None:
    @torch.library.custom_op("ringattn_test::attend", mutates_args=())
    def attend_op(q: Tensor, k: Tensor, v: Tensor, handle: int) -> Tensor:
        return q * (1 + handle % 3) + v.mean() + k.mean()

    attend_op.register_fake(lambda q, k, v, handle: torch.empty_like(q))
    attend_op.register_autograd(
        lambda ctx, d: (d * (1 + ctx.handle % 3), None, None, None),
        setup_context=lambda ctx, inputs, output: setattr(ctx, "handle", inputs[3]),
    )
    cfg = dataclasses.replace(TINY, ffn_chunk=8, qk_norm=True)
    model = Transformer(cfg, attend=lambda q, k, v, handle, sinks: attend_op(q, k, v, handle))
    model.initialise(0)
    tokens, positions, labels = batch(cfg)
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    results = []
    for compiled in (False, True):
        if compiled:
            for block in model.blocks:
                block.compile(backend=counter, fullgraph=True)
        for handle in (3, 4, 5, 6):
            model.zero_grad()
            loss = model(tokens, positions, labels, [handle])
            loss.backward()
            results.append(torch.cat([loss.detach()[None], *(p.grad.flatten() for p in model.parameters() if p.grad is not None)]))
    for eager, compiled_result in zip(results[:4], results[4:], strict=True):
        assert rel(compiled_result, eager) <= 1e-5
    assert counter.frame_count <= 2  # one for the first handle, one for any handle; shared by the layers
    assert set(model.state_dict()) == set(Transformer(cfg, attend=DenseAttend({})).state_dict())


def test_what_block_checkpointing_keeps() -> None:
    cfg = dataclasses.replace(TINY, ffn_chunk=8)
    model, attend = build(cfg, {0: causal_mask(29)})
    tokens, positions, labels = batch(cfg)
    plain = model(tokens, positions, labels, [0])
    plain.backward()
    grads = {n: p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad()
    for i, block in enumerate(model.blocks):
        model.blocks[i] = torch.distributed.algorithms._checkpoint.checkpoint_wrapper.checkpoint_wrapper(block)
    attend.handles.clear()
    saved = Saved(model)
    with saved.watch():
        loss = model(tokens, positions, labels, [0])
    loss.backward()
    assert torch.equal(loss, plain) and len(attend.handles) == 2 * cfg.layers
    assert all(torch.equal(p.grad, grads[n.replace("_checkpoint_wrapped_module.", "")]) for n, p in model.named_parameters())
    rows, width = tokens.numel(), cfg.width * 8
    whole = rows * width * (cfg.layers + 3)  # block inputs; final norm's input and (on CPU) normed value; the loss's gradient
    assert saved.bytes <= whole + rows * 64 + cfg.vocab_size * width + 29 * cfg.head_dim * 8 * 2 * 2


def test_phases_cast_to_16_bit_are_refused() -> None:
    block = Block(TINY, DenseAttend({0: causal_mask(29)})).bfloat16()
    x, phase = torch.randn(1, 29, 24, dtype=torch.bfloat16), torch.zeros(1, 29, 4, dtype=torch.bfloat16)
    with pytest.raises(TypeError, match="cast_forward_inputs=False"):
        block(x, phase, phase, 0)


def test_mistakes_are_listed_together() -> None:
    bad = ModelConfig(heads=7, kv_heads=2, head_dim=9, windows=[], rope_theta=float("nan"), loss_chunk=-1, softcap=-1.0, vocab_size=-3)
    problems: list[str] = []
    bad.validate(problems)
    assert len(problems) == 7 and "model.heads=7: must be a multiple of model.kv_heads=2" in problems
    for key in ("vocab_size", "head_dim", "windows", "rope_theta", "loss_chunk", "softcap"):
        assert any(p.startswith(f"model.{key}=") for p in problems), key
    with pytest.raises(ValueError, match="model.vocab_size=0: must be set"):
        Transformer(dataclasses.replace(TINY, vocab_size=0), attend=DenseAttend({}))
    problems.clear()
    TINY.validate(problems)
    ModelConfig().validate(problems)
    assert not problems


def test_wrong_shapes_are_named() -> None:
    model, _ = build(TINY, {0: causal_mask(29)})
    tokens, positions, labels = batch(TINY)
    for args in ((tokens, positions, labels[:, 1:]), (tokens, positions[:1], labels), (tokens, positions[0, 1:], labels)):
        with pytest.raises(ValueError, match="needs tokens and labels"):
            model(*args, [0])


def test_a_forgotten_initialisation_shows() -> None:
    model = Transformer(TINY, attend=DenseAttend({0: causal_mask(29)}))
    tokens, positions, labels = batch(TINY)
    assert model(tokens, positions, labels, [0]).isnan()
