"""The Triton kernels on a GPU with the configurations they ship with: exactness, repeatability, size, and what CPU tests cannot see."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from test_triton_interpreter import CASES, Case, relative, run
from torch import Tensor

from ringattn.kernels.contract import Bounds, State

pytest.importorskip("triton")

from ringattn.kernels.triton_kernel import TritonKernel  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
LIMITS = {"float32": 5e-6, "float16": 2e-3, "bfloat16": 1e-2}

BIG = [
    *(Case(f"{mask} hd{d} {t}", mask, batch=2, rows=500, keys=250, heads=4, key_heads=2, dim=d, dtype=t, dlse=True)
      for d, t in [(64, "bfloat16"), (80, "float16"), (96, "bfloat16"), (128, "bfloat16"), (128, "float16"), (192, "bfloat16"),
                   (256, "float16"), (16, "bfloat16"), (32, "float16"), (64, "float32"), (128, "float32"), (256, "float32")]
      for mask in ("causal", "ragged", "full")),
    Case("bounds per batch row", batch=3, bounds_rows=3, rows=700, keys=350, hops=3, dim=128, dtype="bfloat16", part="split"),
    Case("window", "window", rows=1000, keys=500, dim=128, dtype="bfloat16", grad_dtype="bfloat16"),
    Case("whole tiles", "full", rows=512, keys=512, hops=4, dim=128, dtype="bfloat16"),
    Case("holes", "hole", rows=600, keys=400, dim=128, dtype="bfloat16"),
    Case("softcap and sinks", rows=500, keys=250, dim=128, dtype="bfloat16", softcap=5.0, sinks=True, dlse=True),
]  # fmt: skip


@pytest.fixture(scope="module")
def kernel() -> TritonKernel:
    return TritonKernel()


def fresh_seed() -> int:
    return int(np.random.default_rng().integers(2**31))


@pytest.mark.parametrize("case", [*CASES, *BIG], ids=lambda c: c.name)
def test_case(case: Case, kernel: TritonKernel) -> None:
    seed = fresh_seed()
    found = run(case, seed, kernel, "cuda")
    wrong = {k: v for k, v in found.items() if not v <= LIMITS[case.dtype]}
    assert not wrong, f"seed {seed}: {wrong} (all: {found})"


@pytest.mark.parametrize("precision", ["tf32", "tf32x3"])
def test_input_precision_of_fp32_is_a_choice(precision: str) -> None:
    case = Case("tf32", rows=300, keys=150, dim=64)
    found = run(case, fresh_seed(), TritonKernel(precision), "cuda")  # type: ignore[arg-type]
    limit = 3e-3 if precision == "tf32" else 2e-5
    assert all(v <= limit for v in found.values()), found


@pytest.mark.parametrize("dim", [64, 128])
def test_hundred_repeats_are_bit_equal(dim: int, kernel: TritonKernel) -> None:
    q, dout = torch.randn(2, 1, 777, 4, dim, device="cuda", dtype=torch.bfloat16).unbind(0)
    k, v = torch.randn(2, 1, 777, 2, dim, device="cuda", dtype=torch.bfloat16).unbind(0)
    bounds = causal(777)
    first = whole_pass(kernel, q, k, v, dout, bounds)
    for _ in range(100):
        again = whole_pass(kernel, q, k, v, dout, bounds)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.parametrize("outliers", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_error_is_no_larger_than_that_of_torch(dtype: torch.dtype, outliers: bool, kernel: TritonKernel) -> None:
    """Pooled over 8 draws, also of the outlier distribution of FlashAttention-3: N(0, 1) + N(0, 100) with probability 0.001."""
    ours, theirs = np.zeros(4), np.zeros(4)
    for _ in range(8):
        draws = torch.randn(4, 1, 1024, 2, 128, device="cuda", dtype=torch.float64)
        if outliers:
            draws += torch.randn_like(draws) * 10 * (torch.rand_like(draws) < 0.001)
        q, k, v, dout = draws.to(dtype).unbind(0)
        leaves = [x.double().requires_grad_() for x in (q, k, v)]
        gold = [dense(*leaves, torch.ones(1024, 1024, dtype=torch.bool, device="cuda").tril())]
        gold += torch.autograd.grad(gold[0], leaves, dout.double())
        peers = [x.detach().clone().requires_grad_() for x in (q, k, v)]
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
            out = torch.nn.functional.scaled_dot_product_attention(*(x.transpose(1, 2) for x in peers), is_causal=True).transpose(1, 2)
        other = [out, *torch.autograd.grad(out, peers, dout)]
        mine = whole_pass(kernel, q, k, v, dout, causal(1024))
        ours += [((x.double() - y).norm() ** 2).item() for x, y in zip(mine, gold, strict=True)]
        theirs += [((x.double() - y).norm() ** 2).item() for x, y in zip(other, gold, strict=True)]
    assert (np.sqrt(ours / theirs) <= 1.05).all(), dict(zip(("out", "dq", "dk", "dv"), np.sqrt(ours / theirs), strict=True))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_error_does_not_grow_with_hops(dtype: str, kernel: TritonKernel) -> None:
    base = Case("hops", "full", rows=256, keys=8192, hops=1, heads=2, dim=128, dtype=dtype)
    seed = fresh_seed()
    errors = [run(replace(base, keys=8192 // w, hops=w), seed, kernel, "cuda") for w in (1, 4, 64)]
    for name in ("out", "dq", "dk", "dv"):
        assert errors[-1][name] <= 1.1 * errors[0][name], (name, errors)
        assert errors[1][name] <= 1.1 * errors[0][name], (name, errors)


def test_a_million_keys_over_hops_in_fp16(kernel: TritonKernel) -> None:
    hops, keys = 64, 16384
    q = torch.randn(1, 64, 1, 64, device="cuda", dtype=torch.float16)
    k, v = torch.randn(2, 1, hops * keys, 1, 64, device="cuda", dtype=torch.float16).unbind(0)
    v += 1  # else the mean of a million values is nothing but its own error
    bounds = Bounds.from_rows(np.zeros((1, 64), int), np.full((1, 64), keys), keys, "cuda")
    state, out, lse = State.empty(q), torch.empty_like(q), torch.empty(1, 1, 64, device="cuda")
    for i in range(hops):
        cut = slice(i * keys, (i + 1) * keys)
        kernel.forward(q, k[:, cut], v[:, cut], bounds, state, scale=0.125, first=i == 0, out=out if i == hops - 1 else None,
                       lse=lse if i == hops - 1 else None)  # fmt: skip
    s = torch.einsum("bihd,bjhd->bhij", q.double(), k.double()) * 0.125
    gold = torch.einsum("bhij,bjhd->bihd", torch.softmax(s, -1), v.double())
    assert relative(out, gold) < 3e-4  # rounding the output alone costs 2e-4
    assert relative(lse, torch.logsumexp(s, -1)) < 1e-6


def test_misaligned_tensors_give_the_same_as_aligned(kernel: TritonKernel) -> None:
    """Pointer loads where the copy engine cannot read; equal to within the order of sums."""
    q, k, v, dout = torch.randn(4, 1, 500, 2, 64, device="cuda", dtype=torch.bfloat16).unbind(0)
    odd = [torch.empty(x.numel() + 1, device="cuda", dtype=x.dtype)[1:].view(x.shape).copy_(x) for x in (q, k, v, dout)]
    for a, b in zip(whole_pass(kernel, q, k, v, dout, causal(500)), whole_pass(kernel, *odd, causal(500)), strict=True):
        assert relative(a, b) < 5e-3


def test_more_than_2_to_31_elements(kernel: TritonKernel) -> None:
    seq, heads, dim, window = 140_000, 128, 128, 200
    if torch.cuda.get_device_properties(0).total_memory < 75e9:
        pytest.skip("needs 75 GB of GPU memory")
    q, k, v = (torch.randn(1, seq, heads, dim, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    assert q.numel() > 2**31
    rows = np.arange(seq)[None]
    got = whole_pass(kernel, q, k, v, q, Bounds.from_rows(np.maximum(rows - window, 0), rows + 1, seq, "cuda"))
    tail = 600
    i = torch.arange(tail, device="cuda")
    mask = (i[None] <= i[:, None]) & (i[None] >= i[:, None] - window)
    for head in (0, heads - 1):
        leaves = [x[:, -tail:, head : head + 1].double().requires_grad_() for x in (q, k, v)]
        out = dense(*leaves, mask)
        gold = (out, *torch.autograd.grad(out, leaves, leaves[0].detach()))
        for a, b in zip(got, gold, strict=True):
            assert relative(a[:, -tail + window :, head : head + 1], b[:, window:]) < 1e-2


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_another_gpu_is_current(kernel: TritonKernel) -> None:
    case = Case("other gpu", "causal", rows=300, keys=150, dim=64, dtype="bfloat16")
    with torch.cuda.device(0):
        found = run(case, fresh_seed(), kernel, "cuda:1")
    assert all(v <= 1e-2 for v in found.values()), found


def causal(seq: int) -> Bounds:
    return Bounds.from_rows(np.zeros((1, seq), int), np.arange(seq)[None] + 1, seq, "cuda")


def dense(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    s = torch.einsum("bihd,bjhd->bhij", q, k) * q.shape[-1] ** -0.5
    return torch.einsum("bhij,bjhd->bihd", torch.softmax(s.masked_fill(~mask, -math.inf), -1), v)


def whole_pass(kernel: TritonKernel, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, bounds: Bounds) -> tuple[Tensor, ...]:
    """out, dq, dk, dv of one hop."""
    out, lse = torch.empty_like(q), torch.empty(q.shape[0], q.shape[2], q.shape[1], device=q.device)
    scale = q.shape[-1] ** -0.5
    kernel.forward(q, k, v, bounds, None, scale=scale, first=True, out=out, lse=lse)
    dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
    rows = kernel.prepare(out, dout, lse, None)
    kernel.backward(q, k, v, dout, rows, bounds, scale=scale, dq=dq, dk=dk, dv=dv, add_dq=False)
    return out, dq, dk, dv
