"""The blockwise feed-forward: same values and gradients as the whole one, less memory, and free to save."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F
from model_tools import Largest, Saved, rel
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from ringattn.model import FREE_TO_SAVE
from ringattn.model.ffn import _blockwise_ffn_backward, blockwise_ffn

EPS = 1e-5


def inputs(dtype: torch.dtype = torch.float64, rows: tuple[int, ...] = (3, 21), width: int = 10, hidden: int = 18) -> list[Tensor]:
    shapes = [(*rows, width), (width,), (2 * hidden, width), (width, hidden)]
    return [torch.randn(s, dtype=torch.float64).to(dtype).requires_grad_() for s in shapes]


def gold(x: Tensor, norm: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    n = norm * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS)
    gate, up = (n @ gate_up.t()).chunk(2, -1)
    return x + (F.silu(gate) * up) @ down.t()


@pytest.mark.parametrize("chunk", [1, 5, 21, 63, 4096])
def test_equals_the_whole(chunk: int) -> None:
    args = inputs()
    out = blockwise_ffn(*args, EPS, chunk)
    want = gold(*args)
    d_out = torch.randn_like(out)
    assert rel(out, want) <= 1e-13
    for got, expected in zip(torch.autograd.grad(out, args, d_out), torch.autograd.grad(want, args, d_out), strict=True):
        assert rel(got, expected) <= 1e-12


def test_strided_input_and_upstream_gradient() -> None:
    x, *weights = inputs()
    args = [x.detach().transpose(0, 1).requires_grad_(), *weights]
    out, want = blockwise_ffn(*args, EPS, 8), gold(*args)
    for got, expected in zip(torch.autograd.grad(out.sum(), args), torch.autograd.grad(want.sum(), args), strict=True):
        assert rel(got, expected) <= 1e-12  # sum() hands back a gradient with stride 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lower_precision_does_not_drift_with_the_number_of_chunks(dtype: torch.dtype) -> None:
    args = inputs(dtype, (512,), 32, 48)
    exact = [a.detach().double().requires_grad_() for a in args]
    d_out = torch.randn(512, 32, dtype=torch.float64).to(dtype)
    want = torch.autograd.grad(gold(*exact), exact, d_out.double())
    errors = {}
    for chunk in (512, 2):
        grads = torch.autograd.grad(blockwise_ffn(*args, EPS, chunk), args, d_out)
        assert all(g.dtype == dtype for g in grads)
        errors[chunk] = [rel(g, w) for g, w in zip(grads, want, strict=True)]
    for whole, small in zip(errors[512], errors[2], strict=True):
        assert whole <= (2e-6 if dtype == torch.float32 else 1e-2) and small <= 1.2 * whole + 1e-7


def test_registration() -> None:
    torch.library.opcheck(blockwise_ffn, (*inputs(torch.float32), EPS, 8))


def test_only_the_input_is_saved() -> None:
    args = inputs()
    saved = Saved(torch.nn.ParameterList(args[1:]))
    with saved.watch():
        blockwise_ffn(*args, EPS, 8)
    assert saved.bytes == args[0].numel() * 8


def test_no_whole_hidden_values() -> None:
    x, *weights = [t.detach() for t in inputs(torch.float32, (400,), 8, 32)]
    chunk, width, hidden = 20, 8, 32
    with Largest() as seen:  # the op's own Python, which a mode outside of it does not see
        out = blockwise_ffn._init_fn(x, *weights, EPS, chunk)
        _blockwise_ffn_backward._init_fn(out, x, *weights, EPS, chunk)
    assert seen.numel == 400 * width > 2 * hidden * chunk


def test_saving_the_output_skips_the_recomputation() -> None:
    args = inputs()
    d_out = torch.randn(3, 21, 10, dtype=torch.float64)
    calls, grads = {}, {}
    for policy in (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_RECOMPUTE):
        context = functools.partial(
            create_selective_checkpoint_contexts,
            lambda ctx, op, *a, p=policy, **k: p if op in FREE_TO_SAVE else CheckpointPolicy.PREFER_RECOMPUTE,
        )
        with Largest() as seen:
            out = checkpoint(lambda *a: blockwise_ffn(a[0] * 1.0, *a[1:], EPS, 8), *args, use_reentrant=False, context_fn=context)
            grads[policy] = torch.autograd.grad(out, args, d_out)
        calls[policy] = seen.calls[torch.ops.ringattn.ffn.default]
    assert calls == {CheckpointPolicy.MUST_SAVE: 1, CheckpointPolicy.PREFER_RECOMPUTE: 2}
    assert all(torch.equal(a, b) for a, b in zip(*grads.values(), strict=True))
