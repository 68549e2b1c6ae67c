"""Replayed launches pass what Triton's own way would: a pretended sm_90 driver takes the arguments of the C function, no GPU needed."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.backends.nvidia import driver as nvidia  # noqa: E402
from triton.compiler import compiler  # noqa: E402
from triton.runtime import driver  # noqa: E402

from ringattn.kernels import gluon_kernel, triton_kernel  # noqa: E402
from ringattn.kernels.contract import Bounds, State  # noqa: E402
from ringattn.kernels.gluon_kernel import GluonKernel  # noqa: E402
from ringattn.kernels.triton_kernel import TritonKernel  # noqa: E402

KERNELS = [TritonKernel, GluonKernel]
SINKS = torch.ones(4)
TAKEN: list[tuple[Any, ...]] = []  # one list for all tests: Triton keeps compiled kernels and their launchers


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[Any, ...]]]:
    """Arguments of the C function behind Triton's launcher, for each launch."""
    TAKEN.clear()

    def take(*args: Any) -> None:
        TAKEN.append(args)

    class Utilities:
        def load_binary(self, *_: Any) -> tuple[int, int, int, int, int]:
            return 1, 2, 255, 0, 1024

        def fill_tma_descriptor(self, *args: Any) -> tuple[Any, ...]:
            return tuple(tuple(x) if isinstance(x, list) else x for x in args)

    class Launcher(nvidia.CudaLauncher):
        def __init__(self, src: Any, metadata: Any) -> None:
            launch = functools.partial(take, src.fn.__name__)
            self.launch = nvidia.wrap_handle_tensordesc(launch, dict(src.signature), getattr(metadata, "tensordesc_meta", None))
            self.num_ctas = 1
            for name in ("global_scratch_size", "global_scratch_align", "profile_scratch_size", "profile_scratch_align",
                         "launch_cooperative_grid", "launch_pdl"):  # fmt: skip
                setattr(self, name, getattr(metadata, name))

    class Driver:
        utils, launcher_cls = Utilities(), Launcher

        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cuda", 90, 32)

        def get_current_device(self) -> int:
            return -1  # as Tensor.get_device() on the CPU

        def get_current_stream(self, device: int) -> int:
            return 7

    monkeypatch.setattr(driver, "_active", Driver())
    monkeypatch.setattr(compiler, "max_shared_mem", lambda device: 232_448)
    monkeypatch.setattr(triton_kernel, "_arch", lambda tensor: 90)
    monkeypatch.setattr(gluon_kernel, "_on_device", lambda tensor: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_device", lambda: -1)
    yield TAKEN


def comparable(launch: tuple[Any, ...]) -> tuple[Any, ...]:
    """Kernel, grid, stream, function and arguments; tensors by their address."""
    name, *rest = launch
    return name, *rest[:7], rest[9], *(x.data_ptr() if isinstance(x, Tensor) else x for x in rest[13:])


def whole(kernel: Any, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, bounds: Bounds, scale: float = 0.1, kept: bool = True) -> None:
    """Every kind of launch. ``kept``: gradients in fp32, added to."""
    state = State.empty(q)
    out, lse = torch.empty(q.shape, dtype=q.dtype), torch.empty(q.shape[0], q.shape[2], q.shape[1])
    kernel.forward(q, k, v, bounds, state, scale=scale, first=True)
    kernel.forward(q, k, v, bounds, state, scale=scale, first=False, out=out, lse=lse)
    kernel.forward(q, k, v, bounds, None, scale=scale, first=True, out=out, lse=lse, sinks=SINKS)
    rows = kernel.prepare(out, dout, lse, None)
    dq, dk, dv = (torch.empty(x.shape, dtype=torch.float32 if kept else x.dtype) for x in (q, k, v))
    kernel.backward(q, k, v, dout, rows, bounds, scale=scale, dq=dq, dk=dk, dv=dv, add_dq=kept)


def tensors(rows: int = 150, heads: int = 4, key_heads: int = 2, dim: int = 64) -> list[Tensor]:
    shapes = ((2, rows, heads, dim), (2, rows, key_heads, dim), (2, rows, key_heads, dim), (2, rows, heads, dim))
    return [torch.randn(s).bfloat16() for s in shapes]


def bounds_of(rows: int, full: bool = False) -> Bounds:
    hi = np.full((1, rows), rows) if full else np.arange(rows)[None] + 1
    return Bounds.from_rows(np.zeros((1, rows), int), hi, rows)


def calls() -> list[tuple[Any, ...]]:
    """Arguments of ``whole`` in pairs or more that differ in one thing each."""
    base, other, same = tensors(), tensors(), tensors(key_heads=4)
    wide = torch.randn(2, 150, 4, 128).bfloat16()[..., :64]
    turned = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in other]
    causal, again = bounds_of(150), bounds_of(150)
    return [
        (*base, causal), (*other, causal), (*base, again), (*base, bounds_of(150, full=True)), (*base, causal, 0.2),
        (*base, causal, 0.1, False), (*turned, causal), (wide, *base[1:], causal), (*same, causal),
        (same[0], same[0], same[0], same[0], causal), (same[0], same[1], same[1], same[3], causal), (*tensors(rows=151), bounds_of(151)),
        (*tensors(rows=128), bounds_of(128)),
    ]  # fmt: skip


@pytest.mark.parametrize("cls", KERNELS)
def test_a_replay_passes_what_triton_would(cls: Any, taken: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, plain, problems = cls(), cls(), calls()
    monkeypatch.setattr(plain._replays, "add", lambda *_: None)
    rooms: list[Any] = []  # the same addresses for what a call allocates, both times
    empty = torch.empty

    def remembered(*args: Any, **kwargs: Any) -> Tensor:
        rooms.append(empty(*args, **kwargs))
        return rooms[-1]

    def given(*args: Any, **kwargs: Any) -> Tensor:
        return rooms.pop(0)

    for _ in range(2):
        for problem in problems:
            whole(kernel, *problem)  # the kernel compiles, tables of the mask are made
            taken.clear()
            monkeypatch.setattr(torch, "empty", remembered)
            whole(kernel, *problem)
            replayed = [comparable(x) for x in taken]
            taken.clear()
            monkeypatch.setattr(torch, "empty", given)
            whole(plain, *problem)
            monkeypatch.setattr(torch, "empty", empty)
            assert replayed == [comparable(x) for x in taken]
            assert len(replayed) == 6 and not rooms
    assert kernel._replays._records


@pytest.mark.parametrize("cls", KERNELS)
def test_replays_are_taken_and_give_way_to_hooks(cls: Any, taken: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    from triton import knobs

    kernel, problem = cls(), (*tensors(), bounds_of(150))
    whole(kernel, *problem)

    def fail(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("went the long way")

    with monkeypatch.context() as patch:
        patch.setattr(kernel, "_launch" if cls is GluonKernel else "_plan", fail)
        patch.setattr(compiler.CompiledKernel, "__getitem__", fail)
        taken.clear()
        whole(kernel, *problem)
        assert len(taken) == 6
    seen: list[Any] = []
    hook = lambda metadata: seen.append(metadata)  # noqa: E731
    knobs.runtime.launch_enter_hook.add(hook)
    try:
        taken.clear()
        whole(kernel, *problem)
    finally:
        knobs.runtime.launch_enter_hook.remove(hook)
    assert len(taken) == 6 and all(x[12] is not None for x in taken)  # what carries the hooks


def test_nothing_is_recorded_with_a_launcher_of_another_make(taken: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvidia, "_BASE_ARGS_FORMAT", "iiiKKppOOOOO")
    kernel = TritonKernel()
    with contextlib.suppress(Exception):
        whole(kernel, *tensors(), bounds_of(150))
    assert not kernel._replays._records
