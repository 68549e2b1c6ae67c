"""Kernels of others: torch's flash kernel runs on CPU too; what they cannot do is refused by name; on a GPU, exactness."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from oracle import BF_BAND, F32_BAND, assert_close, make_qkv, oracle

from ringattn import Layout, Ring, flash_attention, ring_attention
from ringattn.kernels.contract import Bounds, State
from ringattn.kernels.select import load_kernel


def run(tensors, mask, **kwargs):
    q, k, v, dout = tensors
    out = flash_attention(q, k, v, **mask, **kwargs)
    return dict(zip(("out", "dq", "dk", "dv"), (out.detach(), *torch.autograd.grad(out, (q, k, v), dout)), strict=True))


def gold_dict(gold):
    return dict(zip(("out", "dq", "dk", "dv"), (gold.out, *gold.grads), strict=True))


@pytest.mark.parametrize(("mask", "keys", "scale"), [({}, 60, None), ({"causal": False}, 60, 0.3), ({"causal": False}, 100, None)])
def test_flash_on_cpu_matches_the_oracle(mask, keys, scale):
    tensors = make_qkv(2, 60, 4, 2, 32, torch.float32, keys)
    gold = oracle(*tensors, mask, scale=scale)
    assert_close(run(tensors, mask, kernel="flash", scale=scale), gold_dict(gold), F32_BAND)
    lse = flash_attention(*tensors[:3], kernel="flash", return_lse=True, scale=scale, **mask)[1]
    assert (lse - gold.lse).abs().max() < 1e-5


@pytest.mark.parametrize(
    ("mask", "words"),
    [
        ({"documents": torch.arange(12) // 5}, "documents, windows and other intervals are not offered"),
        ({"window": 3}, "windows"),
        ({"visible": (torch.zeros(12, dtype=torch.int64), torch.full((12,), 7))}, "other intervals"),
        ({"softcap": 5.0}, "softcap=5.0 is not offered"),
        ({"sinks": torch.zeros(2)}, "sinks are not offered"),
        ({"deterministic": True}, "no fixed order"),
    ],
)
def test_what_others_cannot_do_is_refused_by_name(mask, words):
    q = torch.randn(1, 12, 2, 16)
    with pytest.raises(ValueError, match=f"kernel='flash'.*{words}"):
        flash_attention(q, q, q, kernel="flash", **mask)
    with pytest.raises(ValueError, match="kernel='cudnn': it runs on CUDA devices, the inputs are on cpu"):
        flash_attention(q, q, q, kernel="cudnn")
    if importlib.util.find_spec("flash_attn") is None:
        with pytest.raises(ImportError, match="kernel='fa4' needs flash_attn.cute"):
            flash_attention(q, q, q, kernel="fa4")


def test_unequal_lengths_lse_gradients_and_hops_are_refused():
    q = torch.randn(1, 12, 2, 16, requires_grad=True)
    with pytest.raises(ValueError, match="as many keys as queries"):
        flash_attention(q[:, :5], q, q, kernel="flash")
    out, lse = flash_attention(q, q, q, kernel="flash", return_lse=True)
    with pytest.raises(ValueError, match="kernel='flash' has no gradient through lse"):
        (out.sum() + lse.sum()).backward()
    kernel, full = load_kernel("flash"), Bounds.from_rows(*(torch.full((1, 12), n).numpy() for n in (0, 12)), 12)
    with pytest.raises(ValueError, match="cannot carry the softmax's state"):
        kernel.forward(q, q, q, full, State.empty(q), scale=1.0, first=True)
    with pytest.raises(ValueError, match="cannot add up gradients"):
        kernel.backward(q, q, q, q, None, full, scale=1.0, dq=q, dk=q, dv=q, add_dq=True)


def test_a_ring_of_one_may_use_them_and_a_longer_one_may_not():
    q, k, v, dout = make_qkv(1, 24, 4, 2, 16, torch.float32)
    ring = Ring(virtual=1)
    out = ring_attention(q, k, v, ring=ring, layout=Layout("contiguous", 24, 1), kernel="flash")
    gold = oracle(q, k, v, dout, {})
    found = dict(zip(("out", "dq", "dk", "dv"), (out, *torch.autograd.grad(out, (q, k, v), dout)), strict=True))
    assert_close(found, gold_dict(gold), F32_BAND)
    with pytest.raises(ValueError, match="kernel='flash' takes a whole sequence at once: it cannot be used in a ring of 2"):
        ring_attention(q, k, v, ring=Ring(virtual=2), layout=Layout("zigzag", 24, 2), kernel="flash")


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", ["flash", "cudnn", "fa4"])
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("mask", [{}, {"causal": False}], ids=str)
def test_on_a_gpu(kernel, dim, mask):
    if kernel == "fa4":
        pytest.importorskip("flash_attn.cute")
    tensors = [x.detach().cuda().requires_grad_() for x in make_qkv(2, 200, 8, 2, dim, torch.bfloat16)]
    found = {n: x.cpu() for n, x in run(tensors, mask, kernel=kernel).items()}
    assert_close(found, gold_dict(oracle(*(x.detach().cpu().requires_grad_() for x in tensors), mask)), BF_BAND)
