"""Every CPU kernel meets the hop contract: carried state, bounds, parts, dead rows, poisoned buffers.

CASES RM-01, RM-04, RM-05, FK-02, FK-04.
"""

import math

import numpy as np
import pytest
import torch
from oracle import F32_BAND, assert_close, make_qkv, oracle, rel

from ringattn.kernels.contract import Bounds, State
from ringattn.kernels.intervals import mask_intervals
from ringattn.kernels.reference import ReferenceKernel
from ringattn.kernels.torch_tiled import TorchKernel

KERNELS = [TorchKernel(), ReferenceKernel()]


def spans(queries, keys, rng, rows=1):
    """Random monotone inclusive intervals with empty rows among them."""
    lo = np.sort(rng.integers(0, keys, (rows, queries)), 1)
    hi = np.maximum.accumulate(np.clip(lo + rng.integers(-4, keys // 2 + 1, lo.shape), -1, keys - 1), 1)
    return lo, hi


def hop_bounds(lo, hi, start, stop):
    """Bounds of the hop that holds keys [start, stop)."""
    return Bounds.from_rows(np.clip(lo, start, stop) - start, np.clip(hi + 1, start, stop) - start, stop - start)


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: k.name)
@pytest.mark.parametrize("hops", [1, 2, 3, 7])
@pytest.mark.parametrize("rows", [1, 2])
def test_hops_add_up_to_dense_attention(kernel, hops, rows, rng):
    queries, keys = 301, 77 * hops
    q, k, v, dout = make_qkv(2, queries, 4, 2, 32, torch.float32, keys)
    lo, hi = spans(queries, keys, rng, rows)
    dlse, sinks = torch.randn(2, 4, queries), torch.randn(4)
    gold = oracle(q, k, v, dout, {"visible": (lo, hi), "causal": False}, dlse=dlse, sinks=sinks)
    q, k, v = (x.detach() for x in (q, k, v))
    cuts = [slice(i * 77, (i + 1) * 77) for i in range(hops)]
    bounds = [hop_bounds(lo, hi, c.start, c.stop) for c in cuts]
    out, dq = (torch.full_like(q, math.nan) for _ in range(2))
    dk, dv = (torch.full_like(k, math.nan) for _ in range(2))
    lse = torch.full((2, 4, queries), math.nan)
    state = State(torch.full_like(q, math.nan), *(torch.full_like(lse, math.nan) for _ in range(2)))
    for i, cut in enumerate(cuts):
        result = {"out": out, "lse": lse} if i == hops - 1 else {}
        kernel.forward(q, k[:, cut], v[:, cut], bounds[i], state, scale=32**-0.5, first=i == 0, sinks=sinks, **result)
    terms = kernel.prepare(out, dout, lse, dlse)
    for i, cut in enumerate(cuts):
        kernel.backward(
            q, k[:, cut], v[:, cut], dout, terms, bounds[i], scale=32**-0.5, dq=dq, dk=dk[:, cut], dv=dv[:, cut], add_dq=i > 0
        )
        alone = [torch.full_like(dk[:, cut], math.nan) for _ in range(2)]
        kernel.backward(
            q, k[:, cut], v[:, cut], dout, terms, bounds[i], scale=32**-0.5, dq=q, dk=alone[0], dv=alone[1], add_dq=False, part="kv"
        )
        assert torch.equal(alone[0], dk[:, cut]) and torch.equal(alone[1], dv[:, cut])
    only_q = torch.full_like(q, math.nan)
    kernel.backward(q, k[:, cuts[0]], v[:, cuts[0]], dout, terms, bounds[0], scale=32**-0.5, dq=only_q, dk=k, dv=v, add_dq=False, part="q")
    if hops == 1:
        assert torch.equal(only_q, dq)
    got = {"out": out, "lse": lse, "dq": dq, "dk": dk, "dv": dv}
    assert_close(got, {"out": gold.out, "lse": gold.lse, "dq": gold.grads[0], "dk": gold.grads[1], "dv": gold.grads[2]}, F32_BAND)


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: k.name)
@pytest.mark.parametrize("keys", [0, 16])
def test_rows_that_see_nothing(kernel, keys):
    q, k, v, dout = (x.detach() for x in make_qkv(1, 16, 2, 1, 16, torch.float32, keys))
    bounds = Bounds.from_rows(np.zeros((1, 16), int), np.zeros((1, 16), int), keys)
    out, dq, lse = torch.full_like(q, math.nan), torch.full_like(q, math.nan), torch.full((1, 2, 16), math.nan)
    kernel.forward(q, k * math.nan, v * math.nan, bounds, None, scale=1.0, first=True, out=out, lse=lse)
    assert (out == 0).all() and (lse == -math.inf).all()
    dk, dv = torch.full_like(k, math.nan), torch.full_like(v, math.nan)
    terms = kernel.prepare(out, dout, lse, None)
    kernel.backward(q, k, v, dout, terms, bounds, scale=1.0, dq=dq, dk=dk, dv=dv, add_dq=False)
    assert (dq == 0).all() and (dk == 0).all() and (dv == 0).all()


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: k.name)
def test_key_blocks_outside_the_hull_may_hold_nan(kernel):
    """Only keys 140..250 are seen, as in a trimmed message: the blocks before and after hold NaN."""
    q, k, v, dout = make_qkv(1, 64, 2, 2, 16, torch.float32, 384)
    lo, hi = 140 + np.arange(64)[None], np.minimum(190 + np.arange(64), 250)[None]
    gold = oracle(q, k, v, dout, {"visible": (lo, hi), "causal": False})
    q, k, v = (x.detach().clone() for x in (q, k, v))
    k[:, :128], v[:, :128], k[:, 256:], v[:, 256:] = (math.nan,) * 4
    out, lse = torch.empty_like(q), torch.empty(1, 2, 64)
    bounds = hop_bounds(lo, hi, 0, 384)
    kernel.forward(q, k, v, bounds, None, scale=0.25, first=True, out=out, lse=lse)
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    kernel.backward(q, k, v, dout, kernel.prepare(out, dout, lse, None), bounds, scale=0.25, dq=dq, dk=dk, dv=dv, add_dq=False)
    got = {"out": out, "dq": dq, "dk": dk, "dv": dv}
    assert_close(got, dict(zip(got, (gold.out, *gold.grads), strict=True)), F32_BAND)


def test_lse_is_a_natural_logarithm():
    q, k, v, _ = make_qkv(1, 64, 2, 2, 32, torch.float32)
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * 32**-0.5
    lo, hi = mask_intervals(64, causal=False)
    lse = torch.empty(1, 2, 64)
    for kernel in KERNELS:
        kernel.forward(q, k, v, hop_bounds(lo, hi, 0, 64), None, scale=32**-0.5, first=True, out=torch.empty_like(q), lse=lse)
        assert (lse - torch.logsumexp(scores, -1)).abs().max() < 1e-4


@pytest.mark.parametrize("carry_dtype", [torch.float32])
def test_state_is_carried_unrounded(carry_dtype):
    """16-bit inputs over many hops: the merged result before the last cast is good to fp32 (CASES RM-01)."""
    q, k, v, _ = (x.detach() for x in make_qkv(1, 64, 2, 2, 64, torch.bfloat16, 1024))
    gold = oracle(q, k, v, torch.zeros_like(q), {"causal": False})
    for hops in (1, 2, 4, 8, 16):
        n = 1024 // hops
        state = State.empty(q)
        assert state.acc.dtype == state.m.dtype == carry_dtype
        out, lse = torch.empty(q.shape), torch.empty(1, 2, 64)
        for i in range(hops):
            cut = slice(i * n, (i + 1) * n)
            bounds = hop_bounds(*mask_intervals(64, n, causal=False), 0, n)
            result = {"out": out, "lse": lse} if i == hops - 1 else {}
            TorchKernel().forward(q, k[:, cut], v[:, cut], bounds, state, scale=64**-0.5, first=i == 0, **result)
        assert rel(out, gold.out) <= 1e-5
