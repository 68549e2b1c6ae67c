"""Chunked head and cross-entropy against torch's, and that the logits of the whole sequence never exist."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from model_tools import Largest, rel
from torch import Tensor

from ringattn.model import IGNORE, linear_cross_entropy
from ringattn.model.loss import _scaled, choose_chunk


def inputs(n: int = 77, width: int = 12, vocab: int = 50, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    hidden = torch.randn(n, width, dtype=torch.float64).to(dtype).requires_grad_()
    weight = torch.randn(vocab, width, dtype=torch.float64).to(dtype).requires_grad_()
    labels = torch.randint(vocab, (n,))
    labels[torch.rand(n) < 0.3] = IGNORE
    return hidden, weight, labels


def gold(hidden: Tensor, weight: Tensor, labels: Tensor, upstream: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    h, w = hidden.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    loss = F.cross_entropy(h @ w.t(), labels, ignore_index=IGNORE, reduction="sum")
    return loss.detach(), *torch.autograd.grad(loss * upstream, (h, w))


@pytest.mark.parametrize("chunk", [1, 7, 76, 77, 1000])
def test_equals_torch(chunk: int) -> None:
    hidden, weight, labels = inputs()
    upstream = float(torch.rand(())) + 0.1
    loss = linear_cross_entropy(hidden, weight, labels, chunk=chunk)
    grads = torch.autograd.grad(loss * upstream, (hidden, weight))
    assert loss.dtype == torch.float64 and loss.shape == ()
    for got, want in zip((loss, *grads), gold(hidden, weight, labels, upstream), strict=True):
        assert rel(got, want) <= 1e-12


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lower_precision_does_not_drift_with_the_number_of_chunks(dtype: torch.dtype) -> None:
    hidden, weight, labels = inputs(n=512, width=32, dtype=dtype)
    want = gold(hidden, weight, labels)
    band = 2e-6 if dtype == torch.float32 else 4e-3  # one rounding of softmax and of the result
    for chunk in (512, 2):
        loss = linear_cross_entropy(hidden, weight, labels, chunk=chunk)
        grads = torch.autograd.grad(loss, (hidden, weight))
        assert loss.dtype == torch.float32 and [g.dtype for g in grads] == [dtype, dtype]
        assert rel(loss, want[0]) <= 1e-6  # logits and sums are fp32 even for bf16 inputs
        assert rel(grads[0], want[1]) <= band and rel(grads[1], want[2]) <= band


@pytest.mark.parametrize("softcap, z_loss", [(0.0, 0.01), (4.0, 0.0), (4.0, 0.01)])
def test_soft_limit_and_z_loss(softcap: float, z_loss: float) -> None:
    hidden, weight, labels = inputs()
    loss = linear_cross_entropy(hidden, weight, labels, chunk=9, softcap=softcap, z_loss=z_loss)
    logits = hidden @ weight.t()
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    want = F.cross_entropy(logits, labels, ignore_index=IGNORE, reduction="sum")
    want = want + z_loss * (logits.logsumexp(1).square() * (labels != IGNORE)).sum()
    assert rel(loss, want) <= 1e-12
    for got, gold_ in zip(torch.autograd.grad(loss, (hidden, weight)), torch.autograd.grad(want, (hidden, weight)), strict=True):
        assert rel(got, gold_) <= 1e-12


def test_chosen_chunk_keeps_the_logits_small() -> None:
    for vocab in (258, 50_304, 128_256, 262_144, 10**8):
        rows = choose_chunk(vocab, torch.bfloat16)
        assert 1 <= rows <= 8192 and (rows * vocab * 4 <= 251 << 20 or rows == 1)
    assert choose_chunk(128_256, torch.bfloat16) == 512
    hidden, weight, labels = inputs()
    assert torch.equal(linear_cross_entropy(hidden, weight, labels), linear_cross_entropy(hidden, weight, labels, chunk=8192))


def test_gradient_of_the_weight_is_rounded_in_place() -> None:
    sums = torch.randn(37, 5)
    want, memory = (sums * 0.3).bfloat16(), sums.data_ptr()
    got = _scaled(sums, torch.tensor(0.3), torch.bfloat16)
    assert torch.equal(got, want) and got.data_ptr() == memory and got.is_contiguous()
    big = torch.randn(5000, 2048)  # several blocks
    want = (big * 2).bfloat16()
    assert torch.equal(_scaled(big, torch.tensor(2.0), torch.bfloat16), want)


def test_batch_dims_and_strides() -> None:
    hidden, weight, labels = inputs(n=60)
    wide = torch.cat([hidden, hidden], 1).detach()[:, :12].view(3, 20, 12).requires_grad_()  # rows with a gap between them
    loss = linear_cross_entropy(wide, weight, labels.view(3, 20), chunk=8)
    loss.backward()
    want = gold(hidden, weight, labels)
    assert rel(loss, want[0]) <= 1e-12 and rel(wide.grad.view(60, 12), want[1]) <= 1e-12


def test_ignored_chunks_and_rows() -> None:
    hidden, weight, labels = inputs(n=40)
    labels[:16] = IGNORE  # two whole chunks of 8
    loss = linear_cross_entropy(hidden, weight, labels, chunk=8)
    grads = torch.autograd.grad(loss, (hidden, weight))
    for got, want in zip((loss, *grads), gold(hidden, weight, labels), strict=True):
        assert rel(got, want) <= 1e-12
    assert torch.equal(grads[0][labels == IGNORE], torch.zeros_like(grads[0][labels == IGNORE]))


def test_nothing_to_predict() -> None:
    hidden, weight, labels = inputs()
    loss = linear_cross_entropy(hidden, weight, torch.full_like(labels, IGNORE), chunk=9)
    grads = torch.autograd.grad(loss, (hidden, weight))
    assert loss.item() == 0.0 and all(torch.equal(g, torch.zeros_like(g)) for g in grads)


def test_extreme_logits_stay_finite() -> None:
    hidden, weight, labels = inputs(dtype=torch.float32)
    big = (hidden.detach() * 1e3).requires_grad_()
    loss = linear_cross_entropy(big, weight, labels, chunk=10)
    grads = torch.autograd.grad(loss, (big, weight))
    assert rel(loss, gold(big, weight, labels)[0]) <= 1e-6 and all(g.isfinite().all() for g in grads)


def test_backward_twice_and_partial_gradients() -> None:
    hidden, weight, labels = inputs()
    loss = linear_cross_entropy(hidden, weight, labels, chunk=10)
    first = torch.autograd.grad(loss * 0.5, (hidden, weight), retain_graph=True)
    with pytest.raises(RuntimeError, match="run the forward pass again"):  # their memory has been given away
        torch.autograd.grad(loss * 0.5, (hidden, weight))
    alone = linear_cross_entropy(hidden, weight.detach(), labels, chunk=10)
    assert rel(torch.autograd.grad(alone, hidden)[0] * 0.5, first[0]) <= 1e-15
    alone = linear_cross_entropy(hidden.detach(), weight, labels, chunk=10)
    assert rel(torch.autograd.grad(alone, weight)[0] * 0.5, first[1]) <= 1e-15


def test_without_grad_only_the_loss_is_computed() -> None:
    hidden, weight, labels = inputs()
    want = linear_cross_entropy(hidden, weight, labels, chunk=10)
    with torch.no_grad(), Largest() as seen:
        got = linear_cross_entropy(hidden, weight, labels, chunk=10)
    assert torch.equal(got, want.detach()) and not got.requires_grad
    assert seen.calls[torch.ops.aten.mm.default] == 8 and torch.ops.aten.addmm.out not in seen.calls


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_of_the_sequence_never_exist(dtype: torch.dtype) -> None:
    n, width, vocab, chunk = 400, 8, 300, 20
    hidden, weight, labels = inputs(n, width, vocab, dtype)
    with Largest() as seen:
        linear_cross_entropy(hidden, weight, labels, chunk=chunk).backward()
    assert seen.numel == max(chunk * vocab, n * width, vocab * width) == chunk * vocab


def test_mistakes_are_named() -> None:
    hidden, weight, labels = inputs()
    with pytest.raises(ValueError, match="does not fit"):
        linear_cross_entropy(hidden, weight, labels[1:], chunk=4)
    with pytest.raises(ValueError, match="float32"):
        linear_cross_entropy(hidden, weight.float(), labels, chunk=4)
    with pytest.raises(ValueError, match="chunk=-1"):
        linear_cross_entropy(hidden, weight, labels, chunk=-1)
    with pytest.raises((RuntimeError, IndexError)):
        linear_cross_entropy(hidden, weight, torch.full_like(labels, 50), chunk=4)
