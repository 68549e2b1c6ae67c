"""The row-wise kernels: in Triton's interpreter and compiled for GPUs without one, against PyTorch in fp64; on a GPU as well.

The interpreter must be chosen before triton is imported, so those cases run in one child process (this file run as a script).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ringattn.kernels import rowwise

LIMITS = {torch.float32: 2e-6, torch.bfloat16: 6e-3}


def rel(x: Tensor, want: Tensor) -> float:
    x, want = x.detach().double(), want.detach().double()
    return float((x - want).norm() / want.norm())


def draw(*shape: int, dtype: torch.dtype, device: str) -> Tensor:
    return torch.randn(*shape, device=device).to(dtype)


def swiglu(dtype: torch.dtype, device: str) -> dict[str, float]:
    gate_up, d_hidden = draw(7, 2 * 2050, dtype=dtype, device=device), draw(7, 2050, dtype=dtype, device=device)
    exact = gate_up.double().requires_grad_()
    want = F.silu(exact[:, :2050]) * exact[:, 2050:]
    (d_want,) = torch.autograd.grad(want, exact, d_hidden.double())
    hidden = rowwise.swiglu(gate_up)
    again, d_gate_up = rowwise.swiglu_backward(gate_up, d_hidden)
    return {"hidden": rel(hidden, want), "again": float((again != hidden).sum()), "d_gate_up": rel(d_gate_up, d_want)}


def norm(dtype: torch.dtype, device: str) -> dict[str, float]:
    rows, width = 600, 70  # more rows than programs
    d, x, residual = (draw(rows, width, dtype=dtype, device=device) for _ in range(3))
    weight = draw(width, dtype=dtype, device=device)
    exact = [t.double().requires_grad_() for t in (x, weight)]
    d_x_want, d_weight_want = torch.autograd.grad(F.rms_norm(exact[0], (width,), exact[1], 1e-5), exact, d.double())
    out, found = torch.empty_like(x), {}
    found["d_weight"] = rel(rowwise.rms_norm_backward(d, x, weight, 1e-5, None, out), d_weight_want)
    found["d_x"] = rel(out, d_x_want)
    rowwise.rms_norm_backward(d, x, weight, 1e-5, residual, out)
    return found | {"with residual": rel(out, d_x_want + residual.double())}


def rotation(dtype: torch.dtype, device: str) -> dict[str, float]:
    n, heads, kv, dim, phases, first = 37, 3, 2, 24, 50, 30  # rows run past the last phase and begin again
    qkv = draw(n, (heads + 2 * kv) * dim, dtype=dtype, device=device)
    angle = torch.rand(phases, dim // 2, device=device) * 6
    cos, sin = angle.cos(), angle.sin()
    parts = [torch.full((n, h, dim), float("nan"), dtype=dtype, device=device) for h in (heads, kv, kv)]
    rowwise.split_rotate(qkv, cos, sin, first, *parts)
    at = torch.arange(first, first + n, device=device) % phases
    exact = qkv.double().requires_grad_()
    q, k, v = exact.view(n, -1, dim).split([heads, kv, kv], 1)
    turn = torch.polar(torch.ones_like(angle[at]).double(), angle[at].double())[:, None]

    def turned(x: Tensor) -> Tensor:
        z = torch.complex(x[..., : dim // 2], x[..., dim // 2 :]) * turn
        return torch.cat([z.real, z.imag], -1)

    wanted = (turned(q), turned(k), v)
    found = {name: rel(a, b) for name, a, b in zip("qkv", parts, wanted, strict=True)}
    d = [draw(*t.shape, dtype=dtype, device=device) for t in parts]
    (want,) = torch.autograd.grad(wanted, exact, [t.double() for t in d])
    return found | {"d_qkv": rel(rowwise.split_rotate_backward(*d, cos, sin, first), want)}


def loss(dtype: torch.dtype, device: str, softcap: float = 0.0, z_loss: float = 0.0, vocab: int = 20_001) -> dict[str, float]:
    logits = 5 * torch.randn(5, vocab, device=device)
    labels = torch.tensor([3, -100, vocab - 1, 0, 9000], device=device)
    exact = logits.double().requires_grad_()
    z = softcap * torch.tanh(exact / softcap) if softcap else exact
    want = F.cross_entropy(z, labels, reduction="none") + z_loss * z.logsumexp(1).square() * (labels != -100)
    (d_want,) = torch.autograd.grad(want.sum(), exact)
    plain, none = rowwise.cross_entropy(logits.clone(), labels, softcap, z_loss, None)
    got, d = rowwise.cross_entropy(logits, labels, softcap, z_loss, dtype)
    assert none is None and d is not None and d.dtype == dtype
    return {
        "loss": rel(got, want) * (1e3 if dtype == torch.bfloat16 else 1), "the same without gradient": rel(plain, got),
        "d_logits": rel(d, d_want), "ignored row": float(d[1].abs().sum() + got[1].abs()),
    }  # fmt: skip


CASES: dict[str, Callable[[torch.dtype, str], dict[str, float]]] = {
    "swiglu": swiglu, "norm": norm, "rotation": rotation, "loss": loss,
    "loss, soft limit": lambda dtype, device: loss(dtype, device, 3.0),
    "loss, z": lambda dtype, device: loss(dtype, device, 0.0, 0.01),
    "loss, both, small": lambda dtype, device: loss(dtype, device, 3.0, 0.01, 9001),
}  # fmt: skip


def check(found: dict[str, float], dtype: torch.dtype) -> None:
    exactly = ("again", "ignored row")
    assert all(value <= (0.0 if key in exactly else LIMITS[dtype]) for key, value in found.items()), found


@pytest.mark.parametrize("dtype", [torch.float32], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_pytorch_path(case: str, dtype: torch.dtype) -> None:
    check(CASES[case](dtype, "cpu"), dtype)


@pytest.fixture(scope="module")
def interpreted() -> dict[str, dict[str, float]]:
    pytest.importorskip("triton")
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    child = subprocess.run([sys.executable, __file__], capture_output=True, text=True, env=environment, check=False)
    assert child.returncode == 0, child.stderr[-4000:]
    return dict(json.loads(line) for line in child.stdout.splitlines() if line.startswith("["))


@pytest.mark.parametrize("dtype", LIMITS, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_interpreted(interpreted: dict[str, dict[str, float]], case: str, dtype: torch.dtype) -> None:
    check(interpreted[f"{case} {dtype}"], dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", LIMITS, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_on_a_gpu(case: str, dtype: torch.dtype) -> None:
    check(CASES[case](dtype, "cuda"), dtype)


@pytest.mark.parametrize("arch", [80, 90, 100])
def test_compiles(arch: int) -> None:
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from ringattn.kernels import rowwise_triton as t

    b, f, i, l = "*bf16", "*fp32", "i32", "*i64"
    variants = [
        (t.swiglu_forward, [b, b, i], {"BLOCK": 2048}),
        (t.swiglu_backward, [b, b, i], {"BLOCK": 2048}),
        (t.rms_norm_backward, [b, b, b, b, b, f, i, i, "fp32"], {"RESIDUAL": True, "BLOCK": 4096}),
        (t.cross_entropy, [f, b, l, f, i, "fp32", "fp32"], {"CAP": True, "IGNORE": -100, "WANT": True, "RATIO": 2, "BLOCK": 8192}),
    ]
    variants += [
        (t.split_rotate, [b, b, b, b, f, f, i, i, i],
         {"H": 4, "HKV": 2, "HALF": 64, "BACKWARD": backward, "ROWS": 32, "WIDTH": 64}) for backward in (True, False)
    ]  # fmt: skip
    for kernel, types, constants in variants:
        names = kernel.arg_names
        signature = dict(zip(names, types, strict=False)) | dict.fromkeys(constants, "constexpr")
        source = ASTSource(kernel, signature, constexprs={(names.index(n),): v for n, v in constants.items()})
        warps = min(16, max(4, constants.get("BLOCK", 0) // 512))
        compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options={"num_warps": warps})
        assert compiled.asm["ptx"]


def main() -> None:
    import triton.runtime.interpreter as interpreter

    patch = interpreter._patch_lang_tensor

    def patch_lang_tensor(tensor, *args):  # noqa: ANN001, ANN002, ANN202
        result = patch(tensor, *args)
        tensor.__index__ = lambda self: int(np.asarray(self.handle.data).item())  # as in test_triton_interpreter.py
        return result

    interpreter._patch_lang_tensor = patch_lang_tensor
    rowwise.fused = lambda x: x.dtype != torch.float64  # type: ignore[assignment]
    torch.set_num_threads(1)
    for dtype in LIMITS:
        for name, case in CASES.items():
            print(json.dumps([f"{name} {dtype}", case(dtype, "cpu")]), flush=True)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))
    main()
