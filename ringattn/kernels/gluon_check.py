"""The self-check of the Hopper kernels: a small attention problem, compiled, run and compared before the kernel is chosen."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ringattn.kernels.contract import Bounds, State
from ringattn.kernels.gluon_configs import HEAD_DIMS
from ringattn.kernels.gluon_kernel import GluonKernel


def self_check(device: torch.device) -> str | None:
    """Compare forward and backward with a dense computation on small ragged shapes: two hops, GQA, causal. None, or what is wrong."""
    kernel = GluonKernel()
    generator = torch.Generator(device).manual_seed(0)
    for head_dim in HEAD_DIMS:
        # Whatever context the first user of the kernel happens to be in.
        with torch.inference_mode(False), torch.enable_grad(), torch.autocast("cuda", enabled=False):
            errors = check_case(kernel, head_dim, device, generator)
        for name, error in errors.items():
            if not error < 1e-2:  # correct: 2e-3 to 4e-3; NaN fails too
                return f"self-check: relative error {error:.1e} of {name} at head dim {head_dim}"
    return None


def check_case(kernel: GluonKernel, head_dim: int, device: torch.device, generator: torch.Generator) -> dict[str, float]:
    """Relative L2 errors of out, lse, dq, dk, dv against fp64: the causal attention of 333 rows over two hops of 333 keys."""
    length, heads, kv_heads = 333, 4, 2
    scale = head_dim**-0.5

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device, generator=generator).to(torch.bfloat16)

    q, dout = draw(1, length, heads, head_dim), draw(1, length, heads, head_dim)
    k, v = draw(1, 2 * length, kv_heads, head_dim), draw(1, 2 * length, kv_heads, head_dim)
    row = torch.arange(length, dtype=torch.int64)
    hops = [
        Bounds.from_rows(torch.zeros(1, length, dtype=torch.int64).numpy(), torch.full((1, length), length).numpy(), length, device),
        Bounds.from_rows(torch.zeros(1, length, dtype=torch.int64).numpy(), (row + 1)[None].numpy(), length, device),
    ]
    state, out, lse = State.empty(q), torch.empty_like(q), torch.empty(1, heads, length, dtype=torch.float32, device=device)
    halves = [(k[:, i * length : (i + 1) * length], v[:, i * length : (i + 1) * length]) for i in range(2)]
    kernel.forward(q, *halves[0], hops[0], state, scale=scale, first=True)
    kernel.forward(q, *halves[1], hops[1], state, scale=scale, first=False, out=out, lse=lse)
    rows = kernel.prepare(out, dout, lse, None)
    dq = torch.zeros_like(q, dtype=torch.float32)
    dk, dv = (torch.empty_like(x, dtype=torch.float32) for x in (k, v))
    for i, bounds in enumerate(hops):
        part = slice(i * length, (i + 1) * length)
        kernel.backward(q, *halves[i], dout, rows, bounds, scale=scale, dq=dq, dk=dk[:, part], dv=dv[:, part], add_dq=True)

    wide = [x.double().transpose(1, 2).requires_grad_() for x in (q, k, v)]
    full = [wide[0], *(x.repeat_interleave(heads // kv_heads, 1) for x in wide[1:])]
    scores = full[0] @ full[1].transpose(2, 3) * scale
    hidden = torch.arange(2 * length, device=device)[None] > torch.arange(length, device=device)[:, None] + length
    scores = scores.masked_fill(hidden, -math.inf)
    expected = scores.softmax(3) @ full[2]
    grads = torch.autograd.grad(expected, wide, dout.double().transpose(1, 2))
    pairs = {
        "out": (out, expected.transpose(1, 2)), "lse": (lse, scores.logsumexp(3)),
        **{n: (x, g.transpose(1, 2)) for n, x, g in zip(("dq", "dk", "dv"), (dq, dk, dv), grads, strict=True)},
    }  # fmt: skip
    return {name: ((x.double() - y).norm() / y.norm()).item() for name, (x, y) in pairs.items()}
