"""The Triton kernels on a CPU, in Triton's interpreter, against an fp64 oracle: the whole contract at small shapes.

The interpreter must be chosen before triton is imported, so all cases run in one child process (this file run as a script); the
tests here read its report. It checks no alignment, no shared memory and no tf32: see test_triton_compile.py and test_triton_gpu.py.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import subprocess
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from ringattn.kernels.contract import Bounds, Kernel, State, sink_gradient
from ringattn.kernels.triton_configs import Config

LIMITS = {"float32": 2e-6, "float16": 2e-3, "bfloat16": 1e-2}


@dataclass(frozen=True)
class Case:
    """One problem: ``hops`` shards of ``keys`` keys, one shard of ``rows`` queries."""

    name: str
    mask: str = "ragged"  # full | causal | window | ragged | hole | dead
    batch: int = 1
    rows: int = 70
    keys: int = 50
    heads: int = 2
    key_heads: int = 1
    dim: int = 32
    dtype: str = "float32"
    hops: int = 2
    bounds_rows: int = 1
    softcap: float | None = None
    sinks: bool = False
    dlse: bool = False
    dout: str = "contiguous"  # contiguous | transposed | sliced | expanded | one
    part: str = "all"  # all | split
    tiles: tuple[int, int] = (32, 32)
    branch: bool = True
    parts: bool = False
    grad_dtype: str = "float32"


CASES = [
    Case("full", "full", hops=1, keys=64, rows=64),
    Case("full, odd lengths", "full", hops=1, rows=33, keys=45),
    Case("full, three hops, split loops", "full", hops=3, branch=False),
    Case("causal", "causal", hops=1, rows=100, keys=100, branch=False),
    Case("causal, two hops", "causal", rows=100, keys=50, dlse=True),
    Case("causal, wide query tile", "causal", hops=1, rows=130, keys=130, tiles=(64, 16), branch=False),
    Case("causal, wide key tile", "causal", hops=1, rows=130, keys=130, tiles=(16, 64)),
    Case("window", "window", hops=1, rows=120, keys=120),
    Case("window, three hops", "window", hops=3, rows=120, keys=40, branch=False, part="split"),
    Case("ragged, three hops", hops=3, dlse=True),
    Case("ragged, split loops", hops=3, branch=False, dlse=True, part="split"),
    Case("ragged, bounds per batch row", batch=2, bounds_rows=2, branch=False),
    Case("ragged, bounds shared by the batch", batch=2, dout="transposed"),
    Case("key blocks of NaN", "hole", rows=60, keys=400, hops=2, dim=16),
    Case("key blocks of NaN, split loops", "hole", rows=60, keys=400, hops=1, dim=16, branch=False, tiles=(64, 64)),
    Case("no visible key at all", "dead"),
    Case("no visible key but a sink", "dead", sinks=True),
    Case("groups of 2", heads=4, key_heads=2, batch=2),
    Case("groups of 8", heads=8, key_heads=1, rows=40, keys=40),
    Case("no groups", heads=2, key_heads=2),
    *(Case(f"head dim {d}", dim=d, rows=40, keys=40, dlse=True, branch=d % 32 == 0) for d in (16, 64, 80, 112, 128)),
    *(Case(f"head dim {d} in two parts", dim=d, rows=40, keys=40, hops=3, softcap=3.0 if d == 96 else None, parts=True)
      for d in (40, 48, 80, 96, 192)),
    *(Case(f"{t}, head dim {d}", dtype=t, dim=d, rows=40, keys=40, parts=True) for t in ("float16", "bfloat16") for d in (64, 80)),
    Case("float16, causal", "causal", hops=1, dtype="float16", grad_dtype="float16", rows=100, keys=100, heads=4, key_heads=2),
    Case("bfloat16, three hops", dtype="bfloat16", hops=3, sinks=True, dlse=True, dout="expanded"),
    Case("strided dout", dout="sliced"),
    Case("dout of stride 0", dout="expanded"),
    Case("dout of one number", dout="one"),
    Case("sinks", sinks=True, hops=3, dlse=True),
    Case("sinks, one hop", sinks=True, hops=1, heads=4, key_heads=2),
    Case("softcap", softcap=1.5, hops=3, dlse=True),
    Case("softcap and sinks", softcap=20.0, sinks=True, hops=1, branch=False, mask="causal", rows=64, keys=64),
    Case("one query, one key", "full", rows=1, keys=1, hops=1, dim=16),
    Case("one query", rows=1, keys=45),
    Case("one key", "full", rows=45, keys=1, hops=3),
    Case("no keys in the shard", "full", keys=0, hops=1),
    Case("no keys in the shard, a sink", "full", keys=0, hops=2, sinks=True),
]


@pytest.fixture(scope="module")
def report() -> dict[str, dict[str, float | str]]:
    """What the child process found, by case."""
    root = Path(__file__).parents[2]
    env = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(root), *sys.path])}
    done = subprocess.run([sys.executable, __file__], capture_output=True, text=True, env=env, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    return dict(json.loads(line) for line in done.stdout.splitlines())


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_case(case: Case, report: dict[str, dict[str, float | str]]) -> None:
    pytest.importorskip("triton")
    found = report[case.name]
    assert "error" not in found, found["error"]
    limit = LIMITS[case.dtype]
    wrong = {k: v for k, v in found.items() if k != "seed" and not (isinstance(v, (int, float)) and v <= limit)}
    assert not wrong, f"relative errors above {limit}: {wrong} (all: {found})"


def test_every_case_is_reported_once(report: dict[str, dict[str, float | str]]) -> None:
    assert set(report) == {c.name for c in CASES} and len(report) == len(CASES)


# ---------------------------------------------------------------- the child process


def intervals(case: Case, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """lo, hi [Bb, rows] over all hops' keys, monotone."""
    n, total = case.rows, case.keys * case.hops
    i = np.arange(n)
    own = (i + 1) * total // n if total < n else i + 1 + (total - n)  # bottom-right
    match case.mask:
        case "full":
            lo, hi = np.zeros(n, int), np.full(n, total)
        case "causal":
            lo, hi = np.zeros(n, int), own
        case "window":
            lo, hi = np.maximum(own - 17, 0), own
        case "dead":
            lo = hi = np.sort(rng.integers(0, total + 1, n))
        case "hole":  # rows in two or three far apart places; rows between them that see nothing
            lo = np.concatenate([np.zeros(n // 3), np.full(n // 3, 150), np.full(n - 2 * (n // 3), 300)]).astype(int)
            hi = lo + np.where(i % 5 == 0, 0, 1) * rng.integers(1, 90, n)
            hi = np.maximum(np.where(np.arange(n) // max(n // 3, 1) == 1, lo, hi), lo)
            hi = np.maximum.accumulate(hi)
            hi = np.where(lo == 150, 150, hi)
        case _:
            lo = np.sort(rng.integers(0, total, (case.bounds_rows, n)), 1)
            hi = np.minimum(np.maximum.accumulate(lo + rng.integers(0, total // 2 + 1, lo.shape), 1), total)
            some = rng.random(lo.shape) < 0.2
            lo = np.minimum.accumulate(np.where(some, np.maximum(lo, hi), lo)[:, ::-1], 1)[:, ::-1]
            return np.minimum(lo, hi), hi
    return np.broadcast_to(lo, (case.bounds_rows, n)), np.broadcast_to(hi, (case.bounds_rows, n))


def oracle(q: Tensor, k: Tensor, v: Tensor, lo: np.ndarray, hi: np.ndarray, scale: float, cap: float | None, sinks: Tensor | None):  # noqa: ANN201
    """Dense attention in fp64: out [B, Sq, H, D], lse [B, H, Sq]."""
    group = q.shape[2] // k.shape[2]
    k, v = (t.repeat_interleave(group, 2) for t in (k, v))
    s = torch.einsum("bihd,bjhd->bhij", q, k) * scale
    if cap is not None:
        s = cap * torch.tanh(s / cap)
    j = torch.arange(k.shape[1], device=q.device)
    lo_t, hi_t = (torch.from_numpy(np.ascontiguousarray(x)).to(q.device)[..., None] for x in (lo, hi))
    visible = ((j >= lo_t) & (j < hi_t))[:, None]
    s = s.masked_fill(~visible, -math.inf)
    if sinks is not None:
        s = torch.cat([s, sinks[None, :, None, None].expand(*s.shape[:3], 1)], -1)
        v = torch.cat([v, torch.zeros_like(v[:, :1])], 1)
    dead = (s == -math.inf).all(-1, keepdim=True)
    lse = torch.logsumexp(s.masked_fill(dead, 0.0), -1, keepdim=True) if s.shape[-1] else s.new_zeros(*s.shape[:3], 1)
    p = torch.exp(s - lse).masked_fill(dead, 0.0)
    return torch.einsum("bhij,bjhd->bihd", p, v), lse.masked_fill(dead, -math.inf)[..., 0]


def guarded(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor]:
    """A tensor full of NaN inside a larger one, which has 2 more rows and 8 more columns."""
    whole = torch.full((shape[0], shape[1] + 2, *shape[2:-1], shape[-1] + 8), math.nan, dtype=dtype, device=device)
    return whole[:, 1:-1, ..., : shape[-1]], whole


def written_outside(whole: Tensor) -> int:
    """How many elements of a guarded tensor's border are no longer NaN."""
    border = torch.ones(whole.shape, dtype=torch.bool, device=whole.device)
    border[:, 1:-1, ..., :-8] = False
    return int((~whole[border].isnan()).sum())


def relative(x: Tensor, y: Tensor) -> float:
    """||x - y|| / ||y||; infinite entries must be equal, and then count as 0."""
    x, y = x.double(), y.double()
    both = torch.isinf(y) & (x == y)
    x, y = x.masked_fill(both, 0), y.masked_fill(both, 0)
    norm = y.norm().item()
    error = (x - y).norm().item()
    return error / norm if norm > 1e-12 else error


def run(case: Case, seed: int, kernel: Kernel, device: str = "cpu") -> dict[str, float]:
    """Relative errors of a kernel on a case, by what they are of; zeros for what must be exact."""
    rng = np.random.default_rng(seed)
    torch.manual_seed(seed)
    dtype, grad_dtype = getattr(torch, case.dtype), getattr(torch, case.grad_dtype)
    b, n, h, hkv, d, total = case.batch, case.rows, case.heads, case.key_heads, case.dim, case.keys * case.hops
    q = torch.randn(b, h, n, d, device=device).to(dtype).transpose(1, 2)
    packed = torch.randn(b, total, 2, hkv, d, device=device).to(dtype)  # keys and values as slices of one tensor
    k, v = packed.unbind(2)
    match case.dout:
        case "contiguous":
            dout = torch.randn(b, n, h, d, device=device).to(dtype)
        case "transposed":
            dout = torch.randn(b, h, n, d, device=device).to(dtype).transpose(1, 2)
        case "sliced":
            dout = torch.randn(b, n, h, d + 3, device=device).to(dtype)[..., 1 : d + 1]
        case "expanded":
            dout = torch.randn(1, 1, 1, d, device=device).to(dtype).expand(b, n, h, d)
        case _:
            dout = torch.tensor(0.7, device=device).to(dtype).expand(b, n, h, d)
    sinks = torch.randn(h, device=device) if case.sinks else None
    dlse = torch.randn(b, n, h, device=device).transpose(1, 2) if case.dlse else None
    scale = 0.7 * d**-0.5
    lo, hi = intervals(case, rng)

    leaves = [t.double().requires_grad_() for t in (q, k, v)]
    sinks64 = sinks.double().requires_grad_() if sinks is not None else None
    out64, lse64 = oracle(*leaves, lo, hi, scale, case.softcap, sinks64)
    loss = (out64 * dout.double()).sum()
    alive = lse64 > -math.inf
    if dlse is not None:
        loss = loss + (lse64.masked_fill(~alive, 0.0) * dlse).sum()
    want = torch.autograd.grad(loss, [*leaves, *([sinks64] if sinks64 is not None else [])], allow_unused=True)
    dq64, dk64, dv64 = (g if g is not None else torch.zeros_like(t) for g, t in zip(want, leaves, strict=False))

    seen = np.zeros(total, bool)
    for a, e in zip(lo.ravel(), hi.ravel(), strict=True):
        seen[a:e] = True
    hop_bounds = []
    poisoned = 0
    for hop in range(case.hops):
        start = hop * case.keys
        for block in range(start, start + case.keys, 128):  # blocks are counted within a hop
            stop = min(block + 128, start + case.keys)
            if not seen[block:stop].any():
                packed[:, block:stop] = math.nan
                poisoned += 1
        clip = [np.clip(x - start, 0, case.keys) for x in (lo, hi)]
        hop_bounds.append(Bounds.from_rows(*clip, case.keys, device))

    assert poisoned or case.mask != "hole"

    assert kernel.refusal(q, k, softcap=case.softcap, sinks=sinks) is None
    out, out_whole = guarded((b, n, h, d), dtype, device)
    lse = torch.full((b, h, n), math.nan, device=device)
    state = State.empty(q)
    for t in (state.acc, state.m, state.l):
        t.fill_(math.nan)
    for hop in range(case.hops):
        last = hop == case.hops - 1
        keys = slice(hop * case.keys, (hop + 1) * case.keys)
        kernel.forward(q, k[:, keys], v[:, keys], hop_bounds[hop], None if case.hops == 1 else state, scale=scale, softcap=case.softcap,
                       first=hop == 0, out=out if last else None, lse=lse if last else None, sinks=sinks)  # fmt: skip
    rows = kernel.prepare(out, dout, lse, dlse)
    dq, dq_whole = guarded((b, n, h, d), torch.float32, device)
    dk, dk_whole = guarded((b, total, hkv, d), grad_dtype, device)
    dv, dv_whole = guarded((b, total, hkv, d), grad_dtype, device)
    for hop in range(case.hops):
        keys = slice(hop * case.keys, (hop + 1) * case.keys)
        for part in ("kv", "q") if case.part == "split" else ("all",):
            kernel.backward(q, k[:, keys], v[:, keys], dout, rows, hop_bounds[hop], scale=scale, softcap=case.softcap, dq=dq,
                            dk=dk[:, keys], dv=dv[:, keys], add_dq=hop > 0, part=part)  # fmt: skip
    found = {
        "out": relative(out, out64), "lse": relative(lse, lse64), "dq": relative(dq, dq64), "dk": relative(dk, dk64),
        "dv": relative(dv, dv64),
        "dead rows": float(out[~alive.transpose(1, 2)].abs().sum() + dq[~alive.transpose(1, 2)].abs().sum()),
        "written outside": float(sum(written_outside(x) for x in (out_whole, dq_whole, dk_whole, dv_whole))),
    }  # fmt: skip
    if sinks is not None:
        found["dsinks"] = relative(sink_gradient(sinks, lse, rows.delta), want[3])
    return found


def main() -> None:
    import triton.runtime.interpreter as interpreter

    # `range` over a tensor calls tensor.__index__, which the interpreter of triton <= 3.6 writes as int(array of one element):
    # an error since numpy 2.4.
    patch = interpreter._patch_lang_tensor

    def patch_lang_tensor(tensor, *args):  # noqa: ANN001, ANN002, ANN202
        result = patch(tensor, *args)
        tensor.__index__ = lambda self: int(np.asarray(self.handle.data).item())
        return result

    interpreter._patch_lang_tensor = patch_lang_tensor
    from ringattn.kernels.triton_kernel import TritonKernel

    torch.set_num_threads(1)
    wanted = sys.argv[1:]
    for case in CASES:
        if wanted and case.name not in wanted:
            continue
        seed = int(np.random.SeedSequence().entropy) % 2**32  # type: ignore[arg-type]
        config = Config(*case.tiles, 4, 1, branch=case.branch, parts=case.parts)
        try:
            found: dict = run(case, seed, TritonKernel(choose=lambda *_, c=config: [c])) | {"seed": seed}
        except Exception:
            found = {"error": f"{dataclasses.asdict(case)}\nseed {seed}\n{traceback.format_exc()[-3000:]}"}
        print(json.dumps([case.name, found]), flush=True)


if __name__ == "__main__":
    main()
