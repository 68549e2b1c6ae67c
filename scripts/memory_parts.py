"""Parts of the model by themselves: the loss head's peak and time, and the row-wise kernels beside PyTorch's."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ringattn.kernels import rowwise
from ringattn.model.loss import choose_chunk, linear_cross_entropy
from ringattn.model.rope import rotate

MIB = 1 << 20


def milliseconds(work: Callable[[], Any], repeats: int = 7) -> float:
    """Median time of ``work`` on the GPU, after one warm-up."""
    work()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return median(times)


def head_inputs(tokens: int, width: int, vocab: int) -> tuple[Tensor, Tensor, Tensor]:
    """bf16 hidden states and weight that want gradients, and labels of which a few are ignored."""
    hidden = torch.randn(tokens, width, device="cuda", dtype=torch.bfloat16).requires_grad_()
    weight = (torch.randn(vocab, width, device="cuda", dtype=torch.bfloat16) * 0.02).requires_grad_()
    labels = torch.randint(vocab, (tokens,), device="cuda")
    labels[::17] = -100
    return hidden, weight, labels


def head_peak(tokens: int, width: int, vocab: int) -> dict[str, Any]:
    """Peak of forward and backward beyond the inputs, the weight's gradient (one fp32 matrix) and the hidden states' gradient."""
    hidden, weight, labels = head_inputs(tokens, width, vocab)
    linear_cross_entropy(hidden[:256], weight, labels[:256]).backward()  # cuBLAS's own workspace is not the head's
    hidden.grad = weight.grad = None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    loss = linear_cross_entropy(hidden, weight, labels)
    loss.backward()
    beyond = torch.cuda.max_memory_allocated() - before - weight.numel() * 4 - hidden.numel() * 2
    chunk = choose_chunk(vocab, weight.dtype)
    return {"tokens": tokens, "vocab": vocab, "chunk": chunk, "beyond_mib": beyond / MIB, "loss": float(loss) / tokens}


def head_time(tokens: int, width: int, vocab: int, chunks: list[int]) -> dict[str, Any]:
    """Forward and backward, milliseconds: ours by chunk, dense PyTorch, and Liger's where it is installed."""
    hidden, weight, labels = head_inputs(tokens, width, vocab)

    def step(loss: Callable[[], Tensor]) -> Callable[[], None]:
        def work() -> None:
            hidden.grad = weight.grad = None
            loss().backward()

        return work

    def dense() -> Tensor:
        return F.cross_entropy((hidden @ weight.t()).float(), labels, ignore_index=-100, reduction="sum")

    found: dict[str, Any] = {"tokens": tokens, "vocab": vocab, "dense": milliseconds(step(dense))}
    torch.cuda.empty_cache()
    for chunk in chunks:
        name = f"chunk {chunk or choose_chunk(vocab, weight.dtype)}"
        found[name] = milliseconds(step(lambda c=chunk: linear_cross_entropy(hidden, weight, labels, chunk=c)))
    liger = liger_loss()
    if liger is not None:
        found["liger"] = milliseconds(step(lambda: liger(weight, hidden, labels)))
    return found


def liger_loss() -> Any:
    """Liger's fused loss ``(weight, hidden, labels)``, None where it is not installed."""
    if importlib.util.find_spec("liger_kernel") is None:
        return None
    from liger_kernel.transformers.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyLoss

    return LigerFusedLinearCrossEntropyLoss(ignore_index=-100, reduction="sum")


def head_error(tokens: int = 1500, width: int = 512, vocab: int = 20_011) -> dict[str, float]:
    """Relative error against fp64 on bf16 inputs, of ours, dense PyTorch and Liger's; some chunks have no label at all."""
    hidden, weight, labels = head_inputs(tokens, width, vocab)
    labels[300:800] = -100
    h, w = (t.detach().double().requires_grad_() for t in (hidden, weight))
    want = F.cross_entropy(h @ w.t(), labels, ignore_index=-100, reduction="sum")
    wanted = (want, *torch.autograd.grad(want, (h, w)))
    found = {}
    losses = {
        "ours": linear_cross_entropy(hidden, weight, labels, chunk=128),
        "dense": F.cross_entropy((hidden @ weight.t()).float(), labels, ignore_index=-100, reduction="sum"),
    }
    liger = liger_loss()
    if liger is not None:
        losses["liger"] = liger(weight, hidden, labels)
    for name, loss in losses.items():
        results = (loss, *torch.autograd.grad(loss, (hidden, weight)))
        for part, a, b in zip(("loss", "d_hidden", "d_weight"), results, wanted, strict=True):
            found[f"{name} {part}"] = float((a.detach().double() - b.detach()).norm() / b.detach().norm())
    return found


def row_times(rows: int = 8192, width: int = 2048, hidden: int = 8192, heads: int = 16, dim: int = 128) -> dict[str, dict[str, float]]:
    """Each row-wise kernel against PyTorch's eager operations and torch.compile's, milliseconds, and TB/s of ours."""

    def new(*shape: int) -> Tensor:
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)

    def torch_path(work: Callable[[], Any]) -> Callable[[], Any]:
        def plain() -> Any:
            keep, rowwise.fused = rowwise.fused, lambda _x: False  # type: ignore[assignment]
            try:
                return work()
            finally:
                rowwise.fused = keep  # type: ignore[assignment]

        return plain

    gate_up, d_hidden, x, d, weight = new(rows, 2 * hidden), new(rows, hidden), new(rows, width), new(rows, width), new(width)
    out = torch.empty_like(x)
    qkv, phase = new(rows, 3 * heads * dim), torch.rand(rows, dim // 2, device="cuda")
    parts = [new(rows, heads, dim) for _ in range(3)]
    logits, labels = torch.randn(1024, 128_256, device="cuda"), torch.randint(128_256, (1024,), device="cuda")
    cases: dict[str, tuple[Callable[[], Any], float]] = {
        "swiglu": (lambda: rowwise.swiglu(gate_up), gate_up.nbytes * 1.5),
        "swiglu backward": (lambda: rowwise.swiglu_backward(gate_up, d_hidden), gate_up.nbytes * 3),
        "rms norm backward": (lambda: rowwise.rms_norm_backward(d, x, weight, 1e-5, d, out), x.nbytes * 4),
        "split and rotate": (lambda: rowwise.split_rotate(qkv, phase, phase, 0, *parts), qkv.nbytes * 2),
        "split and rotate backward": (lambda: rowwise.split_rotate_backward(*parts, phase, phase, 0), qkv.nbytes * 2),
        "cross entropy": (lambda: rowwise.cross_entropy(logits, labels, 0.0, 0.0, torch.bfloat16), logits.nbytes * 2.5),
    }
    found: dict[str, dict[str, float]] = {}
    for name, (work, traffic) in cases.items():
        ours = milliseconds(work)
        found[name] = {"ours_ms": ours, "torch_ms": milliseconds(torch_path(work)), "ours_tb_s": traffic / ours / 1e9}
    for name, function, args in (
        ("swiglu", lambda g: F.silu(g[:, :hidden]) * g[:, hidden:], (gate_up,)),
        ("split and rotate", lambda q: rotate(q.view(1, rows, -1, dim)[:, :, : 2 * heads], phase[None], phase[None]), (qkv,)),
    ):
        compiled = torch.compile(function)
        found[name]["compiled_ms"] = milliseconds(lambda c=compiled, a=args: c(*a))
    return found
