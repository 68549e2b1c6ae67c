"""The Hopper kernels against dense fp64 attention, on a GPU of compute capability 9.0: masks, hops, layouts, poisoned memory."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from ringattn.kernels.contract import KEY_BLOCK, Bounds, State, sink_gradient
from ringattn.kernels.gluon_kernel import GluonKernel
from ringattn.kernels.reference import dense_attention

BAND = {torch.bfloat16: 6e-3, torch.float16: 8e-4}  # about twice what a correct kernel shows; the smallest mask bug is 3e-2


@dataclass(frozen=True)
class Case:
    """One attention problem over ``hops`` shards of ``keys`` keys each."""

    name: str
    head_dim: int = 128
    batch: int = 1
    queries: int = 256
    keys: int = 256
    heads: int = 2
    kv_heads: int = 2
    hops: int = 1
    mask: str = "causal"
    per_row: bool = False
    dtype: torch.dtype = torch.bfloat16
    sinks: bool = False
    dlse: bool = False
    layout: str = "packed"  # packed: [B, S, H, D] in memory; guarded: odd slices of larger poisoned buffers; heads: [B, H, S, D]
    split: bool = False  # the last hop's gradients in two parts, as the ring asks for them
    scale: float | None = None


CASES = [
    Case("full"),
    Case("full hd64", head_dim=64),
    Case("full ragged", mask="full", queries=200, keys=300),
    Case("full rectangle", mask="full", queries=384, keys=512, heads=3, kv_heads=1, hops=3, batch=2),
    Case("full rectangle hd64", mask="full", queries=384, keys=512, heads=3, kv_heads=1, hops=3, batch=2, head_dim=64),
    Case("causal"),
    Case("causal long", queries=2048, keys=2048),
    Case("causal long hd64", queries=2048, keys=2048, head_dim=64),
    Case("causal odd gqa", queries=333, keys=333, heads=8, kv_heads=2, batch=2),
    Case("causal odd gqa hd64", queries=333, keys=333, heads=8, kv_heads=2, batch=2, head_dim=64),
    Case("causal hops", queries=300, keys=170, hops=4, heads=4),
    Case("causal hops hd64", queries=300, keys=170, hops=4, heads=4, head_dim=64),
    Case("causal fewer keys", queries=400, keys=100),
    Case("window", mask="window", queries=1000, keys=500, hops=2),
    Case("window hd64", mask="window", queries=1000, keys=500, hops=2, head_dim=64),
    Case("ragged", mask="ragged", queries=700, keys=450, hops=3, per_row=True, batch=2, heads=4, layout="guarded", split=True),
    Case("ragged hd64", mask="ragged", queries=700, keys=450, hops=3, per_row=True, batch=2, heads=4, layout="guarded", head_dim=64),
    Case("holes", mask="holes", queries=500, keys=1500, hops=2),
    Case("holes hd64", mask="holes", queries=500, keys=1500, hops=2, head_dim=64, per_row=True, batch=3),
    Case("nothing visible", mask="empty", queries=130, keys=130),
    Case("nothing visible hd64", mask="empty", queries=130, keys=130, hops=2, head_dim=64),
    Case("one row", queries=1, keys=1, mask="full"),
    Case("one row hd64", queries=1, keys=300, mask="full", head_dim=64),
    Case("one key", queries=300, keys=1, mask="full", hops=2),
    Case("tiny", queries=5, keys=20, heads=1, kv_heads=1, mask="full", hops=2),
    Case("fp16", dtype=torch.float16, queries=500, keys=250, hops=2, dlse=True),
    Case("fp16 hd64", dtype=torch.float16, queries=500, keys=250, hops=2, dlse=True, head_dim=64),
    Case("sinks", sinks=True, queries=400, keys=200, hops=2, mask="ragged", heads=4, kv_heads=1),
    Case("sinks one hop hd64", sinks=True, queries=400, keys=400, mask="ragged", head_dim=64, dlse=True),
    Case("heads first", layout="heads", queries=400, keys=200, hops=2, batch=2, split=True),
    Case("split", queries=512, keys=256, hops=2, mask="full", split=True),
    Case("scale", scale=0.3, queries=300, keys=300),
]  # fmt: skip


def draw_mask(case: Case, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Half-open key intervals over all hops, int64 [Bb, Sq], monotone."""
    rows, total = case.queries, case.keys * case.hops
    shape = (case.batch if case.per_row else 1, rows)
    own = np.broadcast_to(np.arange(rows) + total - rows, shape)
    zero = np.zeros(shape, np.int64)
    match case.mask:
        case "full":
            return zero, zero + total
        case "causal":
            return zero, np.clip(own + 1, 0, total)
        case "window":
            return np.clip(own - 100, 0, total), np.clip(own + 1, 0, total)
        case "empty":
            return zero + total // 2, zero + total // 2
        case "ragged":
            lo = np.sort(rng.integers(0, total + 1, shape), 1)
            hi = np.maximum.accumulate(np.clip(lo + rng.integers(-40, total // 2, shape), 0, total), 1)
            return lo, np.maximum(lo, hi)
        case "holes":  # two groups of rows far apart, empty rows where they meet, nothing for the rest
            cut = np.arange(rows)
            lo = np.select([cut < 200, cut < 210, cut < 400], [30, 700, total - 900], total - 100)
            hi = np.select([cut < 200, cut < 210, cut < 400], [70, 700, total - 300], total - 100)
            return np.broadcast_to(lo, shape).astype(np.int64), np.broadcast_to(hi, shape).astype(np.int64)
    raise ValueError(case.mask)


def place(x: Tensor, layout: str) -> Tensor:
    """x [B, S, H, D] with the same values at other strides."""
    if layout == "heads":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "guarded":
        batch, length, heads, width = x.shape
        room = torch.full((batch, length + 37, heads + 1, width + 16), torch.nan, dtype=x.dtype, device=x.device)
        view = room[:, 5 : 5 + length, 1:, 8 : 8 + width]
        view.copy_(x)
        return view
    return x


def run_case(case: Case, seed: int, kernel: GluonKernel | None = None) -> dict[str, float]:
    """Relative L2 errors of out, lse, delta, dq, dk, dv (and dsinks) against fp64. Raises AssertionError for anything else wrong."""
    kernel = kernel or GluonKernel()
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    device, total = torch.device("cuda"), case.keys * case.hops
    scale = case.scale or case.head_dim**-0.5
    q, dout = (torch.randn(case.batch, case.queries, case.heads, case.head_dim, device=device).to(case.dtype) for _ in range(2))
    k, v = (torch.randn(case.batch, total, case.kv_heads, case.head_dim, device=device).to(case.dtype) for _ in range(2))
    sinks = torch.randn(case.heads, device=device) if case.sinks else None
    dlse = torch.randn(case.batch, case.heads, case.queries, device=device) if case.dlse else None
    lo, hi = draw_mask(case, rng)

    # What the answer must be.
    key = torch.arange(total, device=device)
    lo_t, hi_t = (torch.from_numpy(np.ascontiguousarray(x)).to(device) for x in (lo, hi))
    mask = (key >= lo_t[..., None]) & (key < hi_t[..., None])
    leaves = [x.double().requires_grad_() for x in (q, k, v, *(() if sinks is None else (sinks,)))]
    gold_out, gold_lse = dense_attention(*leaves[:3], mask, scale=scale, sinks=leaves[3] if sinks is not None else None)
    objective = (gold_out * dout.double()).sum()
    dead = torch.isinf(gold_lse)
    if dlse is not None:
        objective = objective + torch.where(dead, 0.0, gold_lse * dlse.double()).sum()
    grads = torch.autograd.grad(objective, leaves)

    # Blocks of keys that no row sees may hold anything.
    hops: list[tuple[Tensor, Tensor, Bounds]] = []
    for hop in range(case.hops):
        start = hop * case.keys
        bounds = Bounds.from_rows(
            np.clip(lo - start, 0, case.keys), np.clip(hi - start, 0, case.keys), case.keys, device
        )
        hop_k, hop_v = (x[:, start : start + case.keys].clone() for x in (k, v))
        seen = bounds.q_lo < bounds.q_hi
        for b in range(case.batch):
            for block in range(0, case.keys, KEY_BLOCK):
                part = slice(block, block + KEY_BLOCK)
                if not seen[b if case.per_row else 0, part].any():
                    hop_k[b, part], hop_v[b, part] = torch.nan, torch.nan
        hops.append((place(hop_k, case.layout), place(hop_v, case.layout), bounds))
    q_in, dout_in = place(q, case.layout), place(dout, case.layout)

    out = place(torch.zeros_like(q), case.layout)
    lse_room = torch.full((case.batch, case.heads, case.queries + 3), 7.0, device=device)
    lse = lse_room[:, :, : case.queries]
    state = State.empty(q)
    for x in (state.acc, state.m, state.l):
        x.fill_(torch.nan)
    for i, (hop_k, hop_v, bounds) in enumerate(hops):
        first, last = i == 0, i == case.hops - 1
        kernel.forward(
            q_in, hop_k, hop_v, bounds, None if first and last else state, scale=scale, first=first,
            out=out if last else None, lse=lse if last else None, sinks=sinks,
        )  # fmt: skip
    rows = kernel.prepare(out, dout_in, lse, dlse)
    wide = torch.float32 if case.hops > 1 or case.split else case.dtype
    dq = place(torch.zeros(q.shape, dtype=wide, device=device), case.layout)
    dks, dvs = [], []
    for i, (hop_k, hop_v, bounds) in enumerate(hops):
        dk, dv = (place(torch.full(hop_k.shape, torch.nan, dtype=wide, device=device), case.layout) for _ in range(2))
        parts = ("kv", "q") if case.split and i == case.hops - 1 else ("all",)
        for part in parts:
            kernel.backward(
                q_in, hop_k, hop_v, dout_in, rows, bounds, scale=scale, dq=dq, dk=dk, dv=dv, add_dq=case.hops > 1, part=part
            )
        dks.append(dk)
        dvs.append(dv)
    torch.cuda.synchronize()

    assert (lse_room[:, :, case.queries :] == 7.0).all(), "lse written beyond its end"
    for name, x in (("out", out), ("dq", dq)):
        if case.layout == "guarded":
            room = x._base
            assert room is not None
            outside = torch.ones(room.shape, dtype=torch.bool, device=device)
            outside[:, 5 : 5 + x.shape[1], 1:, 8 : 8 + x.shape[3]] = False
            assert room[outside].isnan().all(), f"{name} written outside its rows"
    if sinks is None:
        unseen = ~mask.any(-1)
        assert (out[unseen.expand(case.batch, -1)] == 0).all(), "out of rows that see nothing"
        assert (lse.transpose(1, 2)[unseen.expand(case.batch, -1)] == -torch.inf).all(), "lse of rows that see nothing"
        assert (dq[unseen.expand(case.batch, -1)] == 0).all(), "dq of rows that see nothing"
    dead = dead | torch.isinf(lse)
    delta = (gold_out.detach() * dout.double()).sum(-1).transpose(1, 2) - (0.0 if dlse is None else dlse.double())
    got = {"out": (out, gold_out), "lse": (lse[~dead], gold_lse[~dead]), "delta": (rows.delta, delta), "dq": (dq, grads[0])}
    got |= {"dk": (torch.cat(dks, 1), grads[1]), "dv": (torch.cat(dvs, 1), grads[2])}
    if sinks is not None:
        got["dsinks"] = (sink_gradient(sinks, lse, rows.delta), grads[3])
    return {name: error(x, y.detach()) for name, (x, y) in got.items()}


def error(x: Tensor, gold: Tensor) -> float:
    """Relative L2 error; where the right answer is (almost) nothing, the size of the answer."""
    distance, size = (x.double() - gold).norm(), gold.norm()
    return (distance if size <= 1e-6 * gold.numel() ** 0.5 else distance / size).item()


@pytest.fixture(scope="module", autouse=True)
def hopper() -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs compute capability 9.0")


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_case(case: Case, rng: np.random.Generator) -> None:
    errors = run_case(case, int(rng.integers(2**31)))
    bad = {name: e for name, e in errors.items() if not e < BAND[case.dtype]}
    assert not bad, errors


@pytest.mark.gpu
def test_available() -> None:
    assert GluonKernel.available(torch.device("cuda")) is None


@pytest.mark.gpu
def test_forward_repeats_bit_for_bit(rng: np.random.Generator) -> None:
    q, k, v = (torch.randn(2, 500, 4, 128, device="cuda").bfloat16() for _ in range(3))
    row = np.arange(500)[None]
    bounds = Bounds.from_rows(np.zeros_like(row), row + 1, 500, "cuda")
    kernel, results = GluonKernel(), []
    for _ in range(20):
        out, lse = torch.empty_like(q), torch.empty(2, 4, 500, device="cuda")
        kernel.forward(q, k, v, bounds, None, scale=0.1, first=True, out=out, lse=lse)
        results.append((out, lse))
    assert all(torch.equal(results[0][0], out) and torch.equal(results[0][1], lse) for out, lse in results)


@pytest.mark.gpu
def test_refusals() -> None:
    kernel = GluonKernel()
    q = torch.zeros(1, 8, 2, 96, device="cuda", dtype=torch.bfloat16)
    assert "head dim 96" in (kernel.refusal(q, q, softcap=None, sinks=None) or "")
    assert "float32" in (kernel.refusal(q[..., :64].float(), q[..., :64].float(), softcap=None, sinks=None) or "")
    assert "softcap" in (kernel.refusal(q[..., :64], q[..., :64], softcap=3.0, sinks=None) or "")
    assert kernel.refusal(q[..., :64], q[..., :64], softcap=None, sinks=None) is None
