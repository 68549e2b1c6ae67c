"""The Hopper (sm_90) kernel: TMA, mbarriers and wgmma in Gluon, behind the contract of ``contract.py``. Host side.

Takes bf16 and fp16, head dims 64 and 128, any Sq, Sk >= 1, GQA, sinks; softcap and other head dims are refused by name, and the
portable Triton kernel takes them. Tensors reach the device through TMA descriptors, which want a 16-byte aligned base and strides
of 16-byte multiples; a tensor without these is copied first (nothing that a model or a ring produces is).

Device code: ``gluon_forward.py``, ``gluon_backward.py``; ``gluon_helpers.py`` has the small kernels around them. Triton is
imported when the first kernel is made, so importing this module works without it.

Figures and the experiments behind the shapes below: FlashAttention-2 (arXiv 2307.08691), FlashAttention-3 (arXiv 2407.08608).
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from functools import lru_cache
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ringattn.kernels.contract import KEY_BLOCK, LOG2_E, Bounds, Part, State
from ringattn.kernels.gluon_configs import (
    BACKWARD,
    FORWARD,
    HEAD_DIMS,
    WARPGROUP_ROWS,
    BackwardConfig,
    ForwardConfig,
    backward_constants,
    forward_constants,
)
from ringattn.kernels.gluon_launch import Launcher, TensorMap
from ringattn.kernels.gluon_plan import Plan, make_plan, tiles
from ringattn.kernels.replay import Replays

if TYPE_CHECKING:
    from ringattn.kernels.contract import Kernel

DTYPES = (torch.bfloat16, torch.float16)
ROW_PADDING = 128  # rows of the backward's workspace come in multiples of the largest query tile
HELPER_ROWS = 32  # rows of one program of the helper kernels


@dataclass
class Rows:
    """What the backward of one shard of queries needs: lse in base 2 and delta, fp32 [B, H, rows padded], and dq's workspace.

    The workspace is zero between hops. ``pending``: the hop whose dq lies in it since a call with part "kv", to be fetched with
    part "q". ``dout``: dO where it had to be copied for TMA.
    """

    lse2: Tensor
    padded_delta: Tensor
    workspace: Tensor
    queries: int
    dout: Tensor | None
    pending: tuple[int, ...] | None = None

    @property
    def delta(self) -> Tensor:
        """delta [B, H, Sq], a view."""
        return self.padded_delta[:, :, : self.queries]


class GluonKernel:
    """Forward and fused backward for Hopper.

    dq is added up in fp32 in no fixed order, so gradients may differ in their last bits from run to run. ``deterministic``: take
    the portable Triton kernel for the backward instead (slower, repeatable).

    ``forward_config``, ``backward_config``: other shapes than the table's, for tuning.
    """

    name = "gluon"

    def __init__(
        self, deterministic: bool = False, *, forward_config: ForwardConfig | None = None, backward_config: BackwardConfig | None = None
    ) -> None:
        self.deterministic = deterministic
        self._forward_config = forward_config
        self._backward_config = backward_config
        self._modules: tuple[Any, ModuleType, ModuleType, ModuleType] | None = None
        self._launch = Launcher()
        self._replays = Replays()
        self._layouts: dict[tuple[int, int, int], Any] = {}
        self._backward_kernel: Kernel | None = None

    @property
    def fused_backward(self) -> bool:
        """Whether dq, dk and dv come out of one kernel, so that part "kv" leaves nearly nothing for part "q"."""
        return not self.deterministic

    @staticmethod
    def available(device: torch.device) -> str | None:
        """Why the kernel cannot be used on this device, or None. Compiles and runs a self-check the first time (seconds)."""
        if device.type != "cuda":
            return f"device {device} is not a CUDA device"
        index = device.index if device.index is not None else torch.cuda.current_device()
        return _availability(index)

    def refusal(self, q: Tensor, k: Tensor, *, softcap: float | None, sinks: Tensor | None) -> str | None:
        """Why this kernel cannot take these inputs, or None."""
        if not q.is_cuda:
            return f"it runs on CUDA devices of compute capability 9.0, the inputs are on {q.device}"
        if _capability(q.device.index) != (9, 0):
            return f"it is made for compute capability 9.0, {q.device} has {'.'.join(map(str, _capability(q.device.index)))}"
        if q.dtype not in DTYPES or k.dtype != q.dtype:
            return f"dtype {q.dtype} is not one of bfloat16, float16"
        if q.shape[-1] not in HEAD_DIMS:
            return f"head dim {q.shape[-1]} is not one of {', '.join(map(str, HEAD_DIMS))}"
        if softcap is not None:
            return f"softcap={softcap} is not offered"
        if min(q.shape[0], q.shape[1], k.shape[1]) < 1:
            return f"empty inputs, q {tuple(q.shape)}, k {tuple(k.shape)}"
        if q.shape[0] * q.shape[2] * (q.shape[1] + ROW_PADDING) >= 2**31 or q.shape[0] * q.shape[2] > 65535:
            return f"q {tuple(q.shape)} has too many rows"
        return None

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, bounds: Bounds, state: State | None, *, scale: float,
        softcap: float | None = None, first: bool, out: Tensor | None = None, lse: Tensor | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        """See :class:`ringattn.kernels.contract.Kernel`. Raises ValueError for softcap and for a missing state, out or lse."""
        if softcap is not None:
            raise ValueError(f"softcap={softcap} is not offered by kernel='gluon'")
        last = out is not None
        if (lse is not None) != last:
            raise ValueError("out and lse are given together, at the last hop")
        if state is None and not (first and last):
            raise ValueError("state is needed where a hop is not both first and last")
        _, forward_module, _, _ = self._load()
        batch, queries, heads, head_dim = q.shape
        keys = k.shape[1]
        config = self._forward_config or FORWARD[head_dim]
        carry = 1 if not first else 2 if sinks is not None else 0
        # The last key tile must be whole, or zeros read from beyond the end would count as keys.
        masked = not (bounds.full and keys % KEY_BLOCK == 0)
        row_tiles, key_tiles = tiles(queries, config.rows), tiles(keys, KEY_BLOCK)

        with _on_device(q):
            if masked:
                plan = self._plan(bounds, config.rows)
                tables = (plan.lo, plan.hi, plan.query, plan.live)
            else:
                tables = (bounds.lo, bounds.lo, bounds.lo, bounds.lo)
            acc, m, l = (None, None, None) if state is None else (state.acc, state.m, state.l)
            fixed = ("forward", first, masked, scale, config)
            key, addresses = self._replays.key(fixed, q.get_device(), (q, k, v, out, lse, acc, m, l, sinks, *tables))
            if self._replays.run(key, addresses):
                return
            q, k, v = (_aligned(x) for x in (q, k, v))
            target = out if out is None or _is_aligned(out) else torch.empty_like(out, memory_format=torch.contiguous_format)
            q_desc = self._descriptor(q, WARPGROUP_ROWS)
            out_desc = q_desc if target is None else self._descriptor(target, WARPGROUP_ROWS)
            # Pointers that a variant does not use are filled with what is at hand.
            stats = lse if m is None else m
            assert stats is not None
            acc, m, l = (stats, stats, stats) if state is None else (state.acc, state.m, state.l)
            log_sums = stats if lse is None else lse
            _check_unit_stride(acc=acc, m=m, l=l, lse=log_sums)
            acc_strides = acc.stride()[:3] if state is not None else (0, 0, 0)
            arguments = (
                q_desc, self._descriptor(k, KEY_BLOCK), self._descriptor(v, KEY_BLOCK), out_desc, acc, m, l, log_sums,
                sinks if carry == 2 else log_sums, *tables, float(scale) * LOG2_E,
                queries, heads, heads // k.shape[2], _section(batch * heads, row_tiles, config.section_programs), row_tiles, key_tiles,
                int(bounds.lo.shape[0] > 1), *acc_strides, *m.stride()[:2], *log_sums.stride()[:2],
            )  # fmt: skip
            constants = forward_constants(config, head_dim, masked=masked, carry=carry, last=last)
            launched = self._launch(forward_module.forward_kernel, (row_tiles * batch * heads,), arguments, constants)
            self._replays.add(key, addresses, launched)
            if out is not None and target is not out:
                out.copy_(target)  # type: ignore[arg-type]

    def prepare(self, out: Tensor, dout: Tensor, lse: Tensor, dlse: Tensor | None) -> Any:
        """See :class:`ringattn.kernels.contract.Kernel`. The workspace takes 4 bytes an element of dq."""
        if self.deterministic:
            return self._portable().prepare(out, dout, lse, dlse)
        triton, _, _, helpers = self._load()
        batch, queries, heads, head_dim = out.shape
        rows = triton.cdiv(queries, ROW_PADDING) * ROW_PADDING
        with _on_device(out):
            lse2, delta = torch.empty(2, batch, heads, rows, dtype=torch.float32, device=out.device).unbind(0)
            workspace = torch.empty(batch, heads, rows, head_dim, dtype=torch.float32, device=out.device)
            result = Rows(lse2, delta, workspace, queries, None if _is_aligned(dout) else _aligned(dout))
            key, addresses = self._replays.key(("prepare",), out.get_device(), (out, dout, lse, dlse, lse2, delta, workspace))
            if self._replays.run(key, addresses):
                return result
            slopes = lse if dlse is None else dlse
            arguments = (
                out, dout, lse, slopes, lse2, delta, workspace, queries, rows, heads,
                *out.stride(), *dout.stride(), *lse.stride(), *slopes.stride(),
            )  # fmt: skip
            constants = {"D": head_dim, "TILE": HELPER_ROWS, "WITH_DLSE": dlse is not None}
            launched = self._launch(helpers.rows_kernel, (rows // HELPER_ROWS, batch * heads), arguments, constants)
            self._replays.add(key, addresses, launched)
            return result

    def backward(
        self, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, rows: Any, bounds: Bounds, *, scale: float,
        softcap: float | None = None, dq: Tensor, dk: Tensor, dv: Tensor, add_dq: bool, part: Part = "all",
    ) -> None:
        """See :class:`ringattn.kernels.contract.Kernel`.

        The kernel computes dq, dk and dv together. Part "kv" leaves dq in the workspace of ``rows``; part "q" right after it, on
        the same k, v and bounds, only fetches it from there. (In any other order "q" costs as much as "all".)
        """
        if self.deterministic:
            self._portable().backward(
                q, k, v, dout, rows, bounds, scale=scale, softcap=softcap, dq=dq, dk=dk, dv=dv, add_dq=add_dq, part=part
            )
            return
        if softcap is not None:
            raise ValueError(f"softcap={softcap} is not offered by kernel='gluon'")
        hop = (k.data_ptr(), v.data_ptr(), bounds.lo.data_ptr(), bounds.hi.data_ptr(), k.shape[1])
        with _on_device(q):
            if part == "q" and rows.pending == hop:
                self._fetch_dq(rows, dq, scale, add_dq)
                return
            if rows.pending is not None:
                rows.workspace.zero_()
                rows.pending = None
            if part == "q":
                dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (k, v))
            self._fused(q, k, v, dout, rows, bounds, scale, dk, dv)
            if part == "kv":
                rows.pending = hop
            else:
                self._fetch_dq(rows, dq, scale, add_dq)

    def _fused(
        self, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, rows: Rows, bounds: Bounds, scale: float, dk: Tensor, dv: Tensor
    ) -> None:
        """dk, dv and the workspace of one hop."""
        _, _, backward_module, _ = self._load()
        batch, queries, heads, head_dim = q.shape
        keys, kv_heads = k.shape[1:3]
        config = self._backward_config or BACKWARD[head_dim]
        masked = not (bounds.full and keys % KEY_BLOCK == 0)
        key_tiles = tiles(keys, KEY_BLOCK)
        dout = dout if rows.dout is None else rows.dout
        if masked:
            plan = self._plan(bounds, (self._forward_config or FORWARD[head_dim]).rows)
            tables = (plan.keys, plan.key_rows)
        else:
            tables = (bounds.lo, bounds.lo)
        inputs = (q, k, v, dout, rows.lse2, rows.padded_delta, rows.workspace, dk, dv, *tables)
        key, addresses = self._replays.key(("backward", masked, scale, config), q.get_device(), inputs)
        if self._replays.run(key, addresses):
            return
        q, k, v = (_aligned(x) for x in (q, k, v))
        _check_unit_stride(dk=dk, dv=dv)
        padded = rows.lse2.shape[2]
        columns = head_dim // 2 if config.row_tile == 64 else head_dim
        workspace = rows.workspace.view(batch * heads, padded, head_dim)
        arguments = (
            self._descriptor(q, config.row_tile), self._descriptor(k, KEY_BLOCK), self._descriptor(v, KEY_BLOCK),
            self._descriptor(dout, config.row_tile), self._vector(rows.lse2, config.row_tile),
            self._vector(rows.padded_delta, config.row_tile),
            self._tensor_map(workspace, workspace.shape, workspace.stride(), (1, WARPGROUP_ROWS, columns), 128, 32),
            dk, dv, *tables, float(scale) * LOG2_E, queries, keys, padded, heads, kv_heads, heads // kv_heads,
            _section(batch * kv_heads, key_tiles, config.section_programs), key_tiles, int(bounds.lo.shape[0] > 1),
            *dk.stride()[:3], *dv.stride()[:3],
        )  # fmt: skip
        constants = backward_constants(config, head_dim, masked=masked)
        launched = self._launch(backward_module.backward_kernel, (key_tiles * batch * kv_heads,), arguments, constants)
        self._replays.add(key, addresses, launched)

    def _fetch_dq(self, rows: Rows, dq: Tensor, scale: float, add: bool) -> None:
        """Move the workspace to dq and leave it zero."""
        rows.pending = None
        key, addresses = self._replays.key(("dq", scale, add, rows.queries), dq.get_device(), (rows.workspace, dq))
        if self._replays.run(key, addresses):
            return
        _, _, _, helpers = self._load()
        batch, heads, padded, head_dim = rows.workspace.shape
        _check_unit_stride(dq=dq)
        arguments = (rows.workspace, dq, float(scale), rows.queries, padded, heads, *dq.stride()[:3])
        constants = {"D": head_dim, "TILE": HELPER_ROWS, "ADD": add}
        self._replays.add(key, addresses, self._launch(helpers.finish_dq, (padded // HELPER_ROWS, batch * heads), arguments, constants))

    def _plan(self, bounds: Bounds, rows: int) -> Plan:
        """The tables of a mask, kept as long as the bounds live: bounds never change."""
        plan: Plan | None = bounds.derived.get(("gluon", rows))
        if plan is None:
            plan = bounds.derived["gluon", rows] = make_plan(bounds, rows, self._load()[3])
        return plan

    def _portable(self) -> Kernel:
        if self._backward_kernel is None:
            from ringattn.kernels.triton_kernel import TritonKernel

            self._backward_kernel = TritonKernel()
        return self._backward_kernel

    def _load(self) -> tuple[Any, ModuleType, ModuleType, ModuleType]:
        """triton and the modules of device code. Raises ImportError without triton, or with one that has no such Gluon."""
        if self._modules is None:
            import triton

            from ringattn.kernels import gluon_backward, gluon_forward, gluon_helpers

            self._modules = (triton, gluon_forward, gluon_backward, gluon_helpers)
        return self._modules

    def _descriptor(self, x: Tensor, rows: int) -> TensorMap:
        """TMA descriptor of x [B, S, H, D], seen as (B, H, S, D), that moves ``rows`` rows of one head."""
        batch, length, heads, width = x.shape
        batch_stride, row_stride, head_stride, _ = x.stride()
        strides = [s if n > 1 else width for s, n in ((batch_stride, batch), (head_stride, heads), (row_stride, length))]
        return self._tensor_map(x, (batch, heads, length, width), (*strides, 1), (1, 1, rows, width), 128, 16)

    def _vector(self, x: Tensor, rows: int) -> TensorMap:
        """TMA descriptor of contiguous fp32 values, ``rows`` at a time."""
        return self._tensor_map(x, (x.numel(),), (1,), (rows,), 0, 32)

    def _tensor_map(
        self, x: Tensor, shape: tuple[int, ...], strides: tuple[int, ...], block: tuple[int, ...], swizzle: int, bits: int
    ) -> TensorMap:
        key = (swizzle, bits, len(block))
        if key not in self._layouts:
            from triton.experimental.gluon.language import NVMMASharedLayout

            self._layouts[key] = NVMMASharedLayout(swizzle_byte_width=swizzle, element_bitwidth=bits, rank=len(block))
        return TensorMap(x, list(shape), list(strides), list(block), self._layouts[key])


def _section(heads: int, per_head: int, programs: int) -> int:
    """How many heads are worked on side by side: a divisor of ``heads``, at least 4 or enough for ``programs`` programs if it can.

    Few heads share the L2 cache better; many let the heaviest tiles of all heads start first.
    """
    wanted = max(4, tiles(programs, per_head))
    return max(n for n in range(1, min(heads, wanted) + 1) if heads % n == 0)


def _is_aligned(x: Tensor) -> bool:
    """Whether TMA can address x [B, S, H, D] as it lies."""
    unit = 16 // x.element_size()
    strides = [s for s, n in zip(x.stride()[:3], x.shape[:3], strict=True) if n > 1]
    return x.stride(3) == 1 and x.data_ptr() % 16 == 0 and all(s > 0 and s % unit == 0 for s in strides)


def _aligned(x: Tensor) -> Tensor:
    """x, or a copy that TMA can address."""
    return x if _is_aligned(x) else x.clone(memory_format=torch.contiguous_format)


def _on_device(x: Tensor) -> Any:
    """Make the tensor's GPU the current one, where it is not: kernels are launched on the current one."""
    return nullcontext() if x.device.index == torch.cuda.current_device() else torch.cuda.device(x.device)


def _check_unit_stride(**tensors: Tensor) -> None:
    for name, x in tensors.items():
        if x.stride(-1) != 1:
            raise ValueError(f"{name} has stride {x.stride(-1)} in its last dim, kernel='gluon' needs 1")


@lru_cache(maxsize=64)
def _capability(index: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)


@lru_cache(maxsize=64)
def _availability(index: int) -> str | None:
    if _capability(index) != (9, 0):
        return f"compute capability {'.'.join(map(str, _capability(index)))} is not 9.0"
    try:
        from ringattn.kernels.gluon_check import self_check

        return self_check(torch.device("cuda", index))
    except Exception as error:  # whatever the compiler or the driver raises: another kernel takes over, and the log says why
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'}"
