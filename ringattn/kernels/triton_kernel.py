"""The Triton kernel's host side: one hop of attention, forward and backward, on CUDA (sm_80 and later). See contract.py.

Inputs bf16, fp16 or fp32 of any strides (last dim contiguous; anything else is copied), head dim 16 to 256 in steps of 8. fp32
products are exact to fp32 (``input_precision="ieee"``) unless "tf32" or "tf32x3" is asked for. No atomics: equal inputs give equal
bits. Nothing here synchronises with the device, allocates (but for ``prepare``) or tunes; the first launch of each kind compiles.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal

import torch
import triton
from torch import Tensor
from triton.runtime.errors import OutOfResources, PTXASError

from ringattn.kernels.contract import LOG2_E, Bounds, Part, State
from ringattn.kernels.replay import Launched, Replays
from ringattn.kernels.triton_backward import attention_dkdv, attention_dq, attention_rows
from ringattn.kernels.triton_configs import Config, Mask, Op, architecture, configs, head_widths
from ringattn.kernels.triton_forward import attention_forward
from ringattn.kernels.triton_launch import Plan, alignment, describable, row_strides, tensor_map, vector_length

log = logging.getLogger(__name__)

InputPrecision = Literal["ieee", "tf32x3", "tf32"]
ROW_BLOCK = 128  # rows of lse and delta are padded to a multiple of this, the largest query tile
L2_BUDGET_BYTES = 24 << 20  # keys and values of the heads at work at one time should fit this much of the L2 cache
_MAX_ROW_STRIDE = 1 << 23  # offsets within a tile are 32 bit
_MAX_PLANS = 1024

Choose = Callable[[int, Op, int, int, Mask, bool], Iterable[Config]]


@dataclass(frozen=True)
class Rows:
    """Per query row, fp32 [B, H, padded]: lse in base 2 (+inf for -inf and for padding) and delta."""

    lse2: Tensor
    padded_delta: Tensor
    rows: int

    @property
    def delta(self) -> Tensor:
        """fp32 [B, H, Sq], a view."""
        return self.padded_delta[..., : self.rows]


class TritonKernel:
    """The :class:`~ringattn.kernels.contract.Kernel` in portable Triton.

    ``input_precision``: of fp32 products. ``choose``: takes the place of the table of configurations (for tuning and tests).
    """

    name = "triton"

    def __init__(self, input_precision: InputPrecision = "ieee", choose: Choose = configs) -> None:
        if input_precision not in ("ieee", "tf32x3", "tf32"):
            raise ValueError(f"input_precision={input_precision!r}: must be 'ieee', 'tf32x3' or 'tf32'")
        self.input_precision = input_precision
        self.interpreted = not isinstance(attention_forward, triton.JITFunction)
        self._choose = choose
        self._choices: dict[Any, list[Config]] = {}
        self._compiled: dict[Any, Any] = {}
        self._plans: dict[Any, Plan] = {}
        self._replays = Replays()

    def refusal(self, q: Tensor, k: Tensor, *, softcap: float | None, sinks: Tensor | None) -> str | None:
        """Why this kernel cannot take these inputs, or None if it can."""
        if q.dtype not in (torch.bfloat16, torch.float16, torch.float32):
            return f"dtype {q.dtype}: the Triton kernel takes bfloat16, float16 and float32"
        if k.dtype != q.dtype:
            return f"dtypes {q.dtype} and {k.dtype}: queries and keys must have the same"
        dim = q.shape[-1]
        if dim % 8 or not 16 <= dim <= 256:
            return f"head dim {dim}: the Triton kernel takes multiples of 8 from 16 to 256"
        if self.interpreted:
            return None
        if q.device.type != "cuda" or torch.version.hip:
            return f"device {q.device}: the Triton kernel needs an NVIDIA GPU"
        if _architecture(q.device.index) is None:
            return f"device {q.device}: the Triton kernel needs compute capability 8.0 or later"
        return None

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, bounds: Bounds, state: State | None, *, scale: float,
        softcap: float | None = None, first: bool, out: Tensor | None = None, lse: Tensor | None = None,
        sinks: Tensor | None = None,
    ) -> None:  # fmt: skip
        """Continue the online softmax over one hop; see the contract."""
        last = out is not None and lse is not None
        if state is None and not (first and last):
            raise ValueError("a hop that is not both first and last needs state")
        if q.numel() == 0 or (bounds.pairs == 0 and not first and not last):
            return
        if k.shape[1] == 0:
            _forward_without_keys(state, first, out, lse, sinks)
            return
        q, k, v = _rows_contiguous(q), _rows_contiguous(k), _rows_contiguous(v)
        (b, sq, h, d), (_, sk, hkv, _) = q.shape, k.shape
        # What this hop has no use for is stood in for by a tensor that it has: a kernel's arguments always have one type.
        acc, m, l = (state.acc, state.m, state.l) if state is not None else (out, lse, lse)  # noqa: E741
        out_, lse_ = (out, lse) if last else (acc, m)
        assert acc is not None and m is not None and l is not None and out_ is not None and lse_ is not None
        if m.stride() != l.stride():
            raise ValueError(f"state.m and state.l must have the same strides, not {m.stride()} and {l.stride()}")
        sink = sinks.contiguous() if sinks is not None and first else None
        factor, cap = _factors(scale, softcap)
        self._launch(
            attention_forward, "forward", bounds.full, softcap is not None, tiles=(q, k, v), lines=(),
            pointers=(out_, lse_, acc, m, l, lse_ if sink is None else sink, bounds.lo, bounds.hi),
            scalars=(factor, cap, sq, sk, h, h // hkv, _section(2 * sk * d * k.itemsize, h // hkv, b * h), b, _batch_stride(bounds.lo)),
            outputs=(out_, acc), extra=(lse_.stride(0), lse_.stride(1), m.stride(0), m.stride(1)),
            flags={"FIRST": first, "LAST": last, "SINK": sink is not None},
        )  # fmt: skip

    def prepare(self, out: Tensor, dout: Tensor, lse: Tensor, dlse: Tensor | None) -> Rows:
        """delta and base-2 lse of each row, once a pass; see the contract."""
        out, dout = _rows_contiguous(out), _rows_contiguous(dout)
        b, sq, h, d = out.shape
        padded = triton.cdiv(sq, ROW_BLOCK) * ROW_BLOCK
        lse2, delta = torch.empty(2, b, h, padded, dtype=torch.float32, device=out.device).unbind(0)
        if lse2.numel():
            with _on_device(out):
                replay, addresses = self._replays.key(("rows",), out.get_device(), (out, dout, lse, dlse, lse2, delta))
                if self._replays.run(replay, addresses):
                    return Rows(lse2, delta, sq)
            lse = lse if lse.stride(-1) == 1 else lse.contiguous()
            other = lse if dlse is None else dlse if dlse.stride(-1) == 1 else dlse.contiguous()
            width = max(16, triton.next_power_of_2(d))
            block = 32 if width <= 128 else 16
            vec = vector_length((out, dout))
            args = (out, dout, lse, other, lse2, delta, sq, padded, h, *row_strides(out, vec), *row_strides(dout, vec),
                    lse.stride(0), lse.stride(1), other.stride(0), other.stride(1))  # fmt: skip
            constants = {"HAS_DLSE": dlse is not None, "D": d, "W": width, "BM": block, "VEC": vec, "INTERPRET": self.interpreted}
            key = ("rows", out.device.index, *constants.values(), *(t.dtype for t in args[:4]), alignment((out, dout)))
            with _on_device(out):
                launched = self._run(attention_rows, Plan(key, key, Config(block, 0, 4, 1), b * h * (padded // block), constants), args)
            self._replays.add(replay, addresses, launched)
        return Rows(lse2, delta, sq)

    def backward(
        self, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, rows: Rows, bounds: Bounds, *, scale: float,
        softcap: float | None = None, dq: Tensor, dk: Tensor, dv: Tensor, add_dq: bool, part: Part = "all",
    ) -> None:  # fmt: skip
        """The gradients of one hop; see the contract."""
        if bounds.pairs == 0 or q.numel() == 0 or k.numel() == 0:
            if part != "q":
                dk.zero_()
                dv.zero_()
            if part != "kv" and not add_dq:
                dq.zero_()
            return
        q, k, v, dout = _rows_contiguous(q), _rows_contiguous(k), _rows_contiguous(v), _rows_contiguous(dout)
        (b, sq, h, d), (_, sk, hkv, _) = q.shape, k.shape
        factor, cap = _factors(scale, softcap)
        common = (factor, cap, scale, sq, sk, rows.lse2.shape[2], h, h // hkv)
        tiles, lines = (q, k, v, dout), (rows.lse2, rows.padded_delta)
        if part != "q":
            self._launch(
                attention_dkdv, "dkdv", bounds.full, softcap is not None, tiles=tiles, lines=lines,
                pointers=(dk, dv, bounds.q_lo, bounds.q_hi),
                scalars=(*common, _section(2 * sq * d * q.itemsize * (h // hkv), 1, b * hkv), b, _batch_stride(bounds.q_lo)),
                outputs=(dk, dv), extra=(), flags={},
            )  # fmt: skip
        if part != "kv":
            self._launch(
                attention_dq, "dq", bounds.full, softcap is not None, tiles=tiles, lines=lines, pointers=(dq, bounds.lo, bounds.hi),
                scalars=(*common, _section(2 * sk * d * k.itemsize, h // hkv, b * h), b, _batch_stride(bounds.lo)),
                outputs=(dq,), extra=(), flags={"ADD": add_dq},
            )  # fmt: skip

    def _launch(
        self, fn: Any, op: Op, full: bool, cap: bool, *, tiles: tuple[Tensor, ...], lines: tuple[Tensor, ...],
        pointers: tuple[Tensor, ...], scalars: tuple[Any, ...], outputs: tuple[Tensor, ...], extra: tuple[int, ...],
        flags: dict[str, bool],
    ) -> None:  # fmt: skip
        """Launch one kernel with the first configuration that compiles.

        The kernel's arguments are ``tiles`` (q, k, v and in the backward dout: two arguments each, see triton_common), ``lines``
        (fp32 [B, H, padded]), ``pointers``, ``scalars``, the strides of ``tiles`` and ``outputs``, ``extra``, and the constants.
        """
        with _on_device(tiles[0]):
            fixed = (op, full, cap, scalars, extra, *flags.values())
            replay, addresses = self._replays.key(fixed, tiles[0].get_device(), (*tiles, *lines, *pointers))
            if self._replays.run(replay, addresses):
                return
        strided = (*tiles, *outputs)
        addressed = (*tiles, *pointers)
        key = (
            op, full, cap, *flags.values(), *(x for t in strided for x in (t.shape, t.stride())), *(t.dtype for t in addressed),
            alignment(strided), tiles[0].device.index,
        )  # fmt: skip
        with _on_device(tiles[0]):
            plan = self._plans.get(key)
            if plan is None:
                if len(self._plans) >= _MAX_PLANS:  # every sequence length has its own
                    self._plans.clear()
                plan = self._plans[key] = self._plan(fn, op, full, cap, tiles, strided, flags, addressed)
            while True:
                args = (*plan.loads(tiles, lines), *pointers, *scalars, *plan.strides, *extra)
                try:
                    self._replays.add(replay, addresses, self._run(fn, plan, args))
                    return
                except (OutOfResources, triton.CompilationError, PTXASError, RuntimeError) as error:
                    choices = self._choices[plan.kind]
                    if plan.compiled is not None or len(choices) == 1 or "CUDA" in str(error):
                        raise
                    log.warning("the Triton kernel %s (head dim %d, %s) does not compile with %s (%s: %s): taking %s from now on",
                                op, tiles[0].shape[-1], tiles[0].dtype, choices[0], type(error).__name__, str(error)[:200],
                                choices[1])  # fmt: skip
                    choices.pop(0)
                    plan = self._plans[key] = self._plan(fn, op, full, cap, tiles, strided, flags, addressed)

    def _plan(
        self, fn: Any, op: Op, full: bool, cap: bool, tiles: tuple[Tensor, ...], strided: tuple[Tensor, ...], flags: dict[str, bool],
        addressed: tuple[Tensor, ...],
    ) -> Plan:  # fmt: skip
        """How to launch a kernel on tensors of these shapes and strides."""
        q, k = tiles[0], tiles[1]
        (b, sq, h, dim), (_, sk, hkv, _) = q.shape, k.shape
        arch = 80 if self.interpreted else _arch(q)
        descriptors = not self.interpreted and q.itemsize == 2 and arch >= 90 and all(describable(t) for t in tiles)
        vec = vector_length(strided)
        mask: Mask = "full" if full else "bounds"
        kind = (op, mask, dim, q.dtype, q.device.index, cap, *flags.values(), vec, descriptors, *(t.dtype for t in addressed),
                alignment(strided[len(tiles) if descriptors else 0 :]))  # fmt: skip
        if kind not in self._choices:
            self._choices[kind] = list(self._choose(arch, op, dim, q.itemsize, mask, descriptors))
        c = self._choices[kind][0]
        if cap:
            c = replace(c, registers=None)
        w0, w1 = head_widths(dim, c.parts)
        constants = {
            **flags, "FULL": full, **({} if op == "dkdv" else {"EVEN": full and sk % c.block_n == 0}), "CAP": cap, "D": dim, "W0": w0,
            "W1": w1, "BM": c.block_m, "BN": c.block_n, "STAGES": c.stages, "BRANCH": c.branch, "NO_LICM": not c.hoist, "VEC": vec,
            "DESC": descriptors, "PRECISION": self.input_precision, "INTERPRET": self.interpreted,
        }  # fmt: skip
        grid = triton.cdiv(sk, c.block_n) * b * hkv if op == "dkdv" else triton.cdiv(sq, c.block_m) * b * h
        rows = (c.block_m, c.block_n, c.block_n, c.block_m)[: len(tiles)]
        maps = [tensor_map(t, n, w0, w1) for t, n in zip(tiles, rows, strict=True)] if descriptors else None
        strides = tuple(x for t in strided for x in row_strides(t, vec))
        return Plan((kind, c, constants.get("EVEN")), kind, c, grid, constants, strides, maps, c.block_m if op == "dkdv" else 0)

    def _run(self, fn: Any, plan: Plan, args: tuple[Any, ...]) -> Launched | None:
        """Launch; from the second launch of a kind on without Triton's inspection of arguments, which costs more than all the rest."""
        if plan.compiled is None:
            plan.compiled = self._compiled.get(plan.variant)
        everything = (*args, *plan.constants.values())
        if plan.compiled is not None:
            plan.compiled[(plan.grid, 1, 1)](*everything)
            return Launched(plan.compiled, (plan.grid, 1, 1), everything)
        compiled = fn[(plan.grid,)](*args, **plan.constants, **plan.config.options)
        if compiled is None:  # the interpreter
            return None
        assert tuple(plan.constants) == tuple(p.name for p in fn.params if p.is_constexpr)
        plan.compiled = self._compiled[plan.variant] = compiled
        return Launched(compiled, (plan.grid, 1, 1), everything)


def _rows_contiguous(t: Tensor) -> Tensor:
    """``t``, copied if its last dim is not contiguous (or a tile of its rows would span more than 32-bit offsets)."""
    return t if t.stride(-1) == 1 and t.stride(1) < _MAX_ROW_STRIDE else t.contiguous()


def _batch_stride(bounds: Tensor) -> int:
    return bounds.stride(0) if bounds.shape[0] > 1 else 0


def _section(head_bytes: int, group: int, heads: int) -> int:
    """How many heads to work on at one time (see tile_of): whole groups, whose other side's tensors fit the L2 cache together."""
    return max(1, min(heads, L2_BUDGET_BYTES // head_bytes * group or group))


def _factors(scale: float, softcap: float | None) -> tuple[float, float]:
    """What the scores are multiplied by, and what tanh of that is multiplied by to give a base-2 exponent."""
    return (scale * LOG2_E, 1.0) if softcap is None else (scale / softcap, softcap * LOG2_E)


def _arch(t: Tensor) -> int:
    arch = _architecture(t.device.index)
    if arch is None:
        raise ValueError(f"device {t.device}: the Triton kernel needs compute capability 8.0 or later")
    return arch


@lru_cache(maxsize=64)
def _architecture(device: int) -> int | None:
    return architecture(torch.cuda.get_device_capability(device))


def _on_device(t: Tensor) -> Any:
    """Make the tensor's GPU the current one, where it is not: Triton launches on the current one."""
    return nullcontext() if t.device.type != "cuda" or t.device.index == torch.cuda.current_device() else torch.cuda.device(t.device)


def _forward_without_keys(state: State | None, first: bool, out: Tensor | None, lse: Tensor | None, sinks: Tensor | None) -> None:
    """A hop with no key at all: there is nothing to launch a kernel on."""
    start = torch.tensor(float("-inf")) if sinks is None else sinks[None, :, None]
    if out is None or lse is None:
        if first and state is not None:
            state.acc.zero_()
            state.m.copy_(start * LOG2_E)
            state.l.fill_(0.0 if sinks is None else 1.0)
    elif first:
        out.zero_()
        lse.copy_(start)
    else:
        assert state is not None
        out.copy_(torch.where(state.l > 0, 1 / state.l, 0.0).transpose(1, 2).unsqueeze(-1) * state.acc)
        lse.copy_((state.m + state.l.log2()) / LOG2_E)
