"""``flash_attention``: exact attention on one device through any kernel.

Forward and backward are two registered ops, which take the mask as the user gave it and find index bounds (cached by content) and
kernel inside, so torch.compile sees one opaque node each. Autograd is attached outside of them, by a plain autograd.Function. In
eager mode, where nobody listens to the dispatcher, it calls what is behind the ops itself: short sequences wait for the host.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ringattn.kernels.checks import check_inputs
from ringattn.kernels.contract import Bounds, accumulate_dtype, sink_gradient
from ringattn.kernels.intervals import ArrayLike, mask_intervals
from ringattn.kernels.select import select_kernel

NO_SOFTCAP, NO_WINDOW = 0.0, 0  # op schemas carry plain numbers


def flash_attention(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = True, scale: float | None = None, window: int | None = None,
    documents: ArrayLike | None = None, visible: tuple[ArrayLike, ArrayLike] | None = None, softcap: float | None = None,
    sinks: Tensor | None = None, return_lse: bool = False, kernel: str = "auto", deterministic: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """FlashAttention-2 (arXiv 2307.08691) on one device, differentiable in q, k, v, sinks and through lse.

    Args:
        q: [B, Sq, H, D]; k, v: [B, Sk, Hkv, D], H a multiple of Hkv; fp16, bf16, fp32 or fp64 (CPU), any strides.
        causal: a query sees the keys up to its own position; with Sq != Sk aligned at the last key (bottom-right).
        scale: multiplies q.k, > 0; default D ** -0.5.
        window: a query sees itself and the window - 1 keys before it; needs causal.
        documents: int [Sk] or [B, Sk], ids never decreasing, -1 at the tail is padding; queries see their own document only.
        visible: (lo, hi), int [Sq] or [B, Sq] each, inclusive and never decreasing; intersects with the other masks.
        softcap: scores become softcap * tanh(scores / softcap).
        sinks: [H], one more logit per head with value 0 (attention sinks).
        return_lse: also return the log-sum-exp, natural logarithm, fp32 (fp64 for fp64 inputs) [B, H, Sq].
        kernel: auto | gluon | triton | torch | reference, or one of others: flash | cudnn (torch's) | fa4 (where installed), which take
            full and causal masks and no softcap, sinks or gradient through lse.
        deterministic: allow only kernels whose gradients have the same bits from run to run.

    Returns:
        out [B, Sq, H, D] in q's dtype (0 for rows that see no key), and lse (-inf for such rows) if asked for.

    Raises:
        ValueError: for shapes, dtypes, masks or a kernel that do not fit, naming the argument, its value and what is allowed.
    """
    scale = check_inputs(q, k, v, scale=scale, softcap=softcap, sinks=sinks)
    if window is not None and window < 1:
        raise ValueError(f"window={window} must be at least 1 (the query itself)")
    lo, hi = visible or (None, None)
    args = (
        q, k, v, _tensor(documents), _tensor(lo), _tensor(hi), sinks, causal, window or NO_WINDOW, scale, softcap or NO_SOFTCAP, kernel,
        deterministic,
    )  # fmt: skip
    if not _is_eager(q):
        out, lse = _Traced.apply(*args)
    elif torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v, sinks) if x is not None):
        out, lse = _Eager.apply(*args)
    else:
        out, lse = _forward(*args)
    return (out, lse) if return_lse else out


def _tensor(values: ArrayLike | None) -> Tensor | None:
    return None if values is None else torch.as_tensor(values)


Content = tuple[object, ...]
_CACHE: OrderedDict[tuple[object, ...], list[tuple[Content, Bounds]]] = OrderedDict()  # both oldest first
_MAX_SHAPES, _MAX_CONTENTS = 32, 8


def find_bounds(
    queries: int, keys: int, device: torch.device, causal: bool, window: int | None, documents: ArrayLike | None,
    visible: tuple[ArrayLike, ArrayLike] | None,
) -> Bounds:
    """Index bounds of a whole-sequence call: positions are indices. Cached by content.

    Contents are compared, not hashed: a comparison stops at the first byte that differs and costs a tenth of a good hash.
    """
    shape = (queries, keys, device, causal, window)
    known = _CACHE.get(shape)
    if known is None:
        known = _CACHE[shape] = []
        if len(_CACHE) > _MAX_SHAPES:
            _CACHE.popitem(last=False)
    content = () if documents is None and visible is None else tuple(_content(x) for x in (documents, *(visible or ())))
    for found, bounds in reversed(known):
        if found == content:
            return bounds
    lo, hi = mask_intervals(queries, keys, causal=causal, window=window, documents=documents, visible=visible)
    bounds = Bounds.from_rows(np.clip(lo, 0, keys), hi + 1, keys, device)
    known.append((content, bounds))
    del known[:-_MAX_CONTENTS]
    return bounds


def _content(values: ArrayLike | None) -> object:
    """An integer array's shape, dtype and bytes."""
    if values is None:
        return None
    array = values.detach().cpu().numpy() if isinstance(values, Tensor) else np.asarray(values)
    return array.shape, array.dtype.str, array.tobytes()


_OPTIONS = (
    "Tensor? documents, Tensor? visible_lo, Tensor? visible_hi, Tensor? sinks, bool causal, int window, float scale, float softcap, "
    "str kernel, bool deterministic"
)
torch.library.define("ringattn::flash_forward", f"(Tensor q, Tensor k, Tensor v, {_OPTIONS}) -> (Tensor, Tensor)")
torch.library.define(
    "ringattn::flash_backward",
    f"(Tensor dout, Tensor? dlse, Tensor out, Tensor lse, Tensor q, Tensor k, Tensor v, {_OPTIONS}) -> (Tensor, Tensor, Tensor, Tensor)",
)


def _find(q, k, documents, visible_lo, visible_hi, causal, window) -> Bounds:
    visible = None if visible_lo is None else (visible_lo, visible_hi)
    bounds = find_bounds(q.shape[1], k.shape[1], q.device, causal, window or None, documents, visible)
    if bounds.lo.shape[0] not in (1, q.shape[0]):
        raise ValueError(f"documents or visible hold {bounds.lo.shape[0]} rows, expected 1 or the batch size {q.shape[0]}")
    return bounds


def _forward(q, k, v, documents, visible_lo, visible_hi, sinks, causal, window, scale, softcap, kernel, deterministic):
    impl = select_kernel(kernel, q, k, softcap=softcap or None, sinks=sinks, deterministic=deterministic)
    bounds = _find(q, k, documents, visible_lo, visible_hi, causal, window)
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    lse = q.new_empty(q.shape[0], q.shape[2], q.shape[1], dtype=accumulate_dtype(q.dtype))
    impl.forward(q, k, v, bounds, None, scale=scale, softcap=softcap or None, first=True, out=out, lse=lse, sinks=sinks)
    return out, lse


def _backward(
    dout, dlse, out, lse, q, k, v, documents, visible_lo, visible_hi, sinks, causal, window, scale, softcap, kernel, deterministic
):
    impl = select_kernel(kernel, q, k, softcap=softcap or None, sinks=sinks, deterministic=deterministic)
    bounds = _find(q, k, documents, visible_lo, visible_hi, causal, window)
    rows = impl.prepare(out, dout, lse, dlse)
    dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    impl.backward(q, k, v, dout, rows, bounds, scale=scale, softcap=softcap or None, dq=dq, dk=dk, dv=dv, add_dq=False)
    dsinks = sink_gradient(sinks, lse, rows.delta) if sinks is not None else q.new_empty(0)
    return dq, dk, dv, dsinks


torch.library.impl("ringattn::flash_forward", "default", torch.no_grad()(_forward))
torch.library.impl("ringattn::flash_backward", "default", torch.no_grad()(_backward))


@torch.library.register_fake("ringattn::flash_forward")
def _(q, k, v, *options):
    lse = q.new_empty(q.shape[0], q.shape[2], q.shape[1], dtype=accumulate_dtype(q.dtype))
    return torch.empty_like(q, memory_format=torch.contiguous_format), lse


@torch.library.register_fake("ringattn::flash_backward")
def _(dout, dlse, out, lse, q, k, v, documents, visible_lo, visible_hi, sinks, *options):
    dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    return dq, dk, dv, torch.empty_like(sinks) if sinks is not None else q.new_empty(0)


def _save(ctx, inputs, output):
    ctx.save_for_backward(*output, *inputs[:7])
    ctx.options = inputs[7:]
    ctx.set_materialize_grads(False)


@once_differentiable
def _differentiate(ctx, *grad_outputs):
    dout, dlse = grad_outputs
    out, lse, q, k, v, *spans, sinks = ctx.saved_tensors
    dout = torch.zeros_like(out) if dout is None else dout
    run: Callable[..., tuple[Tensor, ...]] = _backward if _is_eager(q) else torch.ops.ringattn.flash_backward
    dq, dk, dv, dsinks = run(dout, dlse, out, lse, q, k, v, *spans, sinks, *ctx.options)
    return dq, dk, dv, None, None, None, dsinks if sinks is not None else None, None, None, None, None, None, None


class _Eager(torch.autograd.Function):
    """(q, k, v, documents, visible_lo, visible_hi, sinks, *options) -> (out, lse), differentiable in q, k, v, sinks and through lse."""

    @staticmethod
    def forward(ctx, *args):
        output = _forward(*args)
        _save(ctx, args, output)
        return output

    backward = staticmethod(_differentiate)  # type: ignore[assignment]


class _Traced(torch.autograd.Function):
    """The same by the registered ops, for torch.compile, dispatch modes and function transforms (whose form costs 13 us more a call)."""

    @staticmethod
    def forward(*args):
        return torch.ops.ringattn.flash_forward(*args)

    setup_context = staticmethod(_save)
    backward = staticmethod(_differentiate)  # type: ignore[assignment]


def _is_eager(q: Tensor) -> bool:
    """Whether a call may go past the dispatcher: nothing traces, records or replaces ops, and tensors are ordinary ones."""
    return (
        not torch.compiler.is_compiling()
        and type(q) in (Tensor, torch.nn.Parameter)
        and torch._C._len_torch_dispatch_stack() == 0
        and torch._C._functorch.peek_interpreter_stack() is None
        and not torch._C._get_tracing_state()
    )
