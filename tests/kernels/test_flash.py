"""``flash_attention`` on CPU: oracle, strides, extremes, torch.compile, opcheck, refusals, and ``merge`` (CASES A, C)."""

import itertools
import math
import warnings

import numpy as np
import pytest
import torch
from oracle import BF_BAND, F32_BAND, MASKS, assert_close, make_mask, make_qkv, oracle, rel
from torch.utils._python_dispatch import TorchDispatchMode

from ringattn import flash_attention, merge
from ringattn.kernels.flash import _CACHE


def run(tensors, mask, **kwargs):
    q, k, v, dout = tensors
    out = flash_attention(q, k, v, **mask, **kwargs)
    return dict(zip(("out", "dq", "dk", "dv"), (out.detach(), *torch.autograd.grad(out, (q, k, v), dout)), strict=True))


def gold_dict(gold):
    return dict(zip(("out", "dq", "dk", "dv"), (gold.out, *gold.grads), strict=True))


@pytest.mark.parametrize("kernel", ["torch", "reference"])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_matches_the_oracle(kernel, mask, dtype, rng):
    tensors = make_qkv(2, 333, 4, 2, 32, dtype)
    kwargs = make_mask(mask, 333, 2, rng)
    band = F32_BAND if dtype == torch.float32 else BF_BAND
    assert_close(run(tensors, kwargs, kernel=kernel), gold_dict(oracle(*tensors, kwargs)), band)


@pytest.mark.parametrize("dim", [16, 32, 40, 48, 64, 80, 96, 128, 256])
def test_head_dims(dim):
    tensors = make_qkv(1, 70, 2, 1, dim, torch.float32)
    assert_close(run(tensors, {}), gold_dict(oracle(*tensors, {})), F32_BAND)


@pytest.mark.parametrize(("queries", "keys"), [(1, 20), (7, 20), (64, 16), (16, 64), (1, 1)])
def test_lengths_differ_and_causal_is_bottom_right(queries, keys):
    tensors = make_qkv(1, queries, 2, 2, 16, torch.float32, keys)
    for mask in ({}, {"causal": False}, {"window": 5}):
        got, gold = run(tensors, mask), oracle(*tensors, mask)
        dead = gold.lse.isinf()[:, 0]
        assert rel(got["out"], gold.out) <= F32_BAND and rel(got["dv"], gold.grads[2]) <= F32_BAND
        assert (got["out"][dead] == 0).all() and (got["dq"][dead] == 0).all()
        assert all(x.isfinite().all() for x in got.values())


def test_one_key_only():
    q, k, v, dout = ((x * 3).to(torch.float16).detach() for x in make_qkv(1, 1, 2, 2, 16, torch.float32))
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    got = run((q, k, v, dout), {})
    assert torch.equal(got["out"], v.detach()) and got["dq"].abs().max() < 1e-3 and got["dk"].abs().max() < 1e-3
    assert rel(got["dv"], dout) < 1e-3


@pytest.mark.parametrize("value", [30.0, 40.0])
def test_fp16_scores_do_not_overflow(value):
    q, k = (torch.full((1, 32, 1, 64), value, dtype=torch.float16, requires_grad=True) for _ in range(2))
    v, dout = (torch.randn(1, 32, 1, 64).half() for _ in range(2))
    tensors = (q, k, v.requires_grad_(), dout)
    got, gold = run(tensors, {}), oracle(*tensors, {})
    assert rel(got["out"], gold.out) <= BF_BAND and rel(got["dv"], gold.grads[2]) <= BF_BAND


def test_strides_do_not_change_a_bit():
    """dO and inputs as views: transposed, sliced out of a wider tensor, expanded (CASES FK-01)."""
    q, k, v, dout = make_qkv(2, 64, 4, 4, 32, torch.float32)
    plain = run((q, k, v, dout), {})
    packed = torch.cat([x.detach() for x in (q, k, v)], -1)
    views = [packed[..., i * 32 : (i + 1) * 32].requires_grad_() for i in range(3)]
    transposed = dout.transpose(1, 2).contiguous().transpose(1, 2)
    wide = torch.cat([dout, dout], -1)[..., :32]
    for grad in (transposed, wide):
        got = run((*views, grad), {})
        assert all(torch.equal(got[n], plain[n]) for n in plain)
    ones = run((q, k, v, torch.ones(()).expand(2, 64, 4, 32)), {})
    assert all(torch.equal(ones[n], x) for n, x in run((q, k, v, torch.ones(2, 64, 4, 32)), {}).items())


def test_lse_is_differentiable():
    q, k, v, dout = make_qkv(1, 50, 4, 2, 16, torch.float32)
    dlse = torch.randn(1, 4, 50)
    out, lse = flash_attention(q, k, v, return_lse=True)
    assert lse.shape == (1, 4, 50) and lse.dtype == torch.float32
    gold = oracle(q, k, v, dout, {}, dlse=dlse)
    assert (lse - gold.lse).abs().max() < 1e-5
    for x, y in zip(torch.autograd.grad((out * dout).sum() + (lse * dlse).sum(), (q, k, v)), gold.grads, strict=True):
        assert rel(x, y) <= F32_BAND
    (only,) = torch.autograd.grad(flash_attention(q, k, v, return_lse=True)[1].sum(), (q,))
    assert rel(only, oracle(q, k, v, torch.zeros_like(dout), {}, dlse=torch.ones_like(dlse)).grads[0]) <= F32_BAND


def test_packed_equals_dense():
    """Two documents of one row are two rows of a batch; lse has its documented shape in both (CASES RM-06)."""
    q, k, v, _ = make_qkv(2, 64, 3, 3, 32, torch.float32)
    out, lse = flash_attention(q, k, v, return_lse=True)
    row = [x.reshape(1, 128, 3, 32) for x in (q, k, v)]
    packed, packed_lse = flash_attention(*row, documents=torch.arange(128) // 64, return_lse=True)
    assert packed_lse.shape == (1, 3, 128)
    assert rel(packed.view(2, 64, 3, 32), out) < 1e-6
    assert (packed_lse.view(3, 2, 64).transpose(0, 1) - lse).abs().max() < 1e-5


def test_opcheck_and_compile():
    q, k, v, dout = make_qkv(1, 24, 4, 2, 16, torch.float32)
    sinks = torch.randn(4, requires_grad=True)
    documents = torch.arange(24) // 10
    args = (q, k, v, documents, None, None, sinks, True, 0, 0.25, 0.0, "torch", False)
    with warnings.catch_warnings():  # autograd is attached outside of the op, which opcheck remarks on
        warnings.filterwarnings("ignore", ".*autograd kernel was not registered.*", UserWarning)
        torch.library.opcheck(torch.ops.ringattn.flash_forward.default, args)

    def model(q, k, v, sinks):
        return flash_attention(q * 2, k, v, sinks=sinks, window=7, documents=documents) * 3

    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for a, c in zip(*(torch.autograd.grad(f(q, k, v, sinks), (q, k, v, sinks), dout) for f in (model, compiled)), strict=True):
        assert rel(a, c) < 1e-6


def test_eager_calls_and_the_registered_ops_agree():
    """Eager mode goes past the dispatcher; a dispatch mode and a function transform get the ops."""

    class Record(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    q, k, v, dout = make_qkv(1, 24, 4, 2, 16, torch.float32)
    plain, seen = run((q, k, v, dout), {"window": 7}), []
    with Record():
        listened = run((q, k, v, dout), {"window": 7})
    assert all(torch.equal(plain[n], listened[n]) for n in plain)
    assert "ringattn.flash_forward.default" in seen and "ringattn.flash_backward.default" in seen
    (dq,) = torch.func.grad(lambda *x: (flash_attention(*x, window=7) * dout).sum(), argnums=(0,))(q, k, v)
    assert torch.equal(dq, plain["dq"])
    assert torch.equal(flash_attention(*(x.detach() for x in (q, k, v)), window=7), plain["out"])


def test_bounds_follow_the_content_of_a_buffer_that_is_filled_anew():
    q, k, v, dout = make_qkv(1, 24, 2, 2, 16, torch.float32)
    buffer = np.zeros(24, np.int64)
    documents = torch.from_numpy(buffer)
    for cut in (5, 9, 5, 20, *range(1, 20)):
        buffer[:] = np.arange(24) >= cut
        gold = oracle(q, k, v, dout, {"documents": buffer.copy()})
        assert rel(flash_attention(q, k, v, documents=documents), gold.out) <= F32_BAND
    assert sum(len(x) for x in _CACHE.values()) <= 32 * 8


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({"kernel": "fast"}, "kernel='fast' is unknown"),
        ({"window": 4, "causal": False}, "window=4 needs causal"),
        ({"scale": 0.0}, "scale=0.0"),
        ({"documents": torch.zeros(2, 9, dtype=torch.int32)}, r"expected \[8\]"),
        ({"documents": torch.zeros(3, 8, dtype=torch.int32)}, "hold 3 rows"),
        ({"dropout": 0.1}, "dropout"),
    ],
)
def test_refusals(kwargs, words):
    x = torch.zeros(2, 8, 2, 16)
    with pytest.raises((ValueError, TypeError), match=words):
        flash_attention(x, x, x, **kwargs)


def test_documents_with_unequal_lengths_are_refused():
    q, kv = torch.zeros(1, 4, 2, 16), torch.zeros(1, 8, 2, 16)
    with pytest.raises(ValueError, match="8 keys and 4 queries"):
        flash_attention(q, kv, kv, documents=torch.zeros(8, dtype=torch.int32))


class TestMerge:
    def halves(self):
        q, k, v, dout = make_qkv(1, 40, 2, 2, 16, torch.float64)
        a, c = (flash_attention(q, k[:, s], v[:, s], causal=False, return_lse=True) for s in (slice(0, 15), slice(15, 40)))
        return q, k, v, dout, a, c

    def test_two_halves_are_the_whole(self):
        q, k, v, dout, a, c = self.halves()
        out, lse = merge(*a, *c)
        dlse = torch.randn_like(lse)
        gold = oracle(q, k, v, dout, {"causal": False}, dlse=dlse)
        assert rel(out, gold.out) < 1e-12 and rel(lse, gold.lse) < 1e-12
        for x, y in zip(torch.autograd.grad((out * dout).sum() + (lse * dlse).sum(), (q, k, v)), gold.grads, strict=True):
            assert rel(x, y) < 1e-11

    def test_empty_partials(self):
        *_, (out, lse), _ = self.halves()
        out, lse = out.detach().requires_grad_(), lse.detach().requires_grad_()
        empty = torch.zeros_like(out), torch.full_like(lse, -math.inf)
        for merged in (merge(out, lse, *empty), merge(*empty, out, lse)):
            assert torch.equal(merged[0], out) and torch.equal(merged[1], lse)
            grads = torch.autograd.grad(merged[0].sum() + merged[1].sum(), (out, lse))
            assert all(g.isfinite().all() for g in grads)
        nothing = merge(*empty, *empty)
        assert (nothing[0] == 0).all() and (nothing[1] == -math.inf).all()
        for order in itertools.permutations([(out, lse), empty, empty, empty]):
            result = order[0]
            for partial in order[1:]:
                result = merge(*result, *partial)
            assert torch.equal(result[0], out) and torch.equal(result[1], lse)

    def test_shapes_are_never_broadcast(self):
        *_, (out, lse), _ = self.halves()
        for bad in ((out, lse[:, :1], out, lse), (out, lse, out[:, :1], lse), (out, lse, out, lse.mT)):
            with pytest.raises(ValueError, match="merge takes"):
                merge(*bad)
