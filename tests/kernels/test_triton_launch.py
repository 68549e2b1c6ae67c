"""The Triton kernel's host side without a GPU: a pretended driver takes the launches and keeps their arguments."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

triton = pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import compiler  # noqa: E402
from triton.runtime import driver  # noqa: E402
from triton.runtime.errors import OutOfResources  # noqa: E402

from ringattn.kernels import triton_kernel  # noqa: E402
from ringattn.kernels.contract import Bounds, State  # noqa: E402
from ringattn.kernels.triton_configs import Config, configs  # noqa: E402
from ringattn.kernels.triton_kernel import TritonKernel  # noqa: E402

Launch = tuple[str, int, dict[str, Any], dict[str, str]]


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Launch]]:
    """(kernel, grid, arguments, types) of every launch, as the driver of an sm_90 device gets them."""
    taken: list[Launch] = []

    class Utilities:
        def load_binary(self, *_: Any) -> tuple[int, int, int, int, int]:
            return 1, 2, 255, 0, 1024

    class Launcher:
        def __init__(self, source: Any, metadata: Any) -> None:
            self.name, self.types = source.fn.__name__, source.signature

        def __call__(self, x: int, *rest: Any) -> None:
            args = rest[8:]  # after y, z, stream, function, packed metadata, launch metadata and two hooks
            assert len(args) == len(self.types)
            taken.append((self.name, x, dict(zip(self.types, args, strict=True)), dict(self.types)))

    class Driver:
        utils, launcher_cls = Utilities(), Launcher

        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cuda", 90, 32)

        def get_current_device(self) -> int:
            return 0

        def get_current_stream(self, device: int) -> int:
            return 0

    monkeypatch.setattr(driver, "_active", Driver())
    monkeypatch.setattr(compiler, "max_shared_mem", lambda device: 232_448)
    monkeypatch.setattr(triton_kernel, "_arch", lambda tensor: 90)
    yield taken


def problem(dim: int = 64, rows: int = 150, heads: int = 4, key_heads: int = 2, dtype: torch.dtype = torch.bfloat16) -> tuple[Any, ...]:
    q, dout = torch.randn(2, 2, rows, heads, dim).to(dtype).unbind(0)
    k, v = torch.randn(2, 2, rows, key_heads, dim).to(dtype).unbind(0)
    bounds = Bounds.from_rows(np.zeros((1, rows), int), np.arange(rows)[None] + 1, rows)
    return q, k, v, dout, bounds


def all_launches(kernel: TritonKernel, q: Any, k: Any, v: Any, dout: Any, bounds: Bounds) -> None:
    state, out, lse = State.empty(q), torch.empty_like(q), torch.empty(q.shape[0], q.shape[2], q.shape[1])
    kernel.forward(q, k, v, bounds, state, scale=0.1, first=True)
    kernel.forward(q, k, v, bounds, state, scale=0.1, first=False, out=out, lse=lse)
    rows = kernel.prepare(out, dout, lse, None)
    grads = [torch.empty_like(x, dtype=torch.float32) for x in (q, k, v)]
    kernel.backward(q, k, v, dout, rows, bounds, scale=0.1, dq=grads[0], dk=grads[1], dv=grads[2], add_dq=True)


def comparable(launch: Launch) -> Any:
    name, grid, args, types = launch
    plain = {k: x if isinstance(x, (int, float, str, bool)) else type(x).__name__ for k, x in args.items()}
    return name, grid, plain, types


def test_later_launches_pass_what_the_first_did(launches: list[Launch]) -> None:
    """The first launch goes through Triton's own inspection of arguments, later ones through the shortcut."""
    kernel, given = TritonKernel(), problem()
    all_launches(kernel, *given)
    first = [comparable(x) for x in launches]
    assert [x[0] for x in first] == ["attention_forward"] * 2 + ["attention_rows", "attention_dkdv", "attention_dq"]
    launches.clear()
    all_launches(kernel, *given)
    assert [comparable(x) for x in launches] == first
    grid, args, types = launches[0][1:]
    tile = next(configs(90, "forward", 64, 2, "bounds", True)).block_m
    assert grid == -(-150 // tile) * 4 * 2 and types["K0"] == "tensordesc<bf16[1, 1, 64, 64]>"
    assert args["K0"].shape == [2, 2, 150, 64] and args["K0"].strides == [150 * 128, 64, 128, 1]


def test_lengths_do_not_recompile(launches: list[Launch]) -> None:
    kernel = TritonKernel()
    all_launches(kernel, *problem(rows=150))
    before = len(kernel._compiled)
    for rows in (2, 16, 128, 1000):  # Triton compiles anew for multiples of 16, if one lets it
        all_launches(kernel, *problem(rows=rows))
    assert len(kernel._compiled) == before


@pytest.mark.parametrize("view", ["misaligned", "stride 0"])
def test_tensors_that_cannot_be_described_go_by_pointers(launches: list[Launch], view: str) -> None:
    q, k, v, dout, bounds = problem()
    k = torch.randn(k.numel() + 1).to(k.dtype)[1:].view(k.shape) if view == "misaligned" else k[:, :1].expand(k.shape)
    TritonKernel().forward(q, k, v, bounds, State.empty(q), scale=0.1, first=True)
    assert launches[0][3]["K0"] == "*bf16" and launches[0][2]["K0"].data_ptr() == k.data_ptr()


def test_a_configuration_that_does_not_compile_is_replaced_once(launches: list[Launch], caplog: pytest.LogCaptureFixture) -> None:
    def choose(*_: Any) -> list[Config]:
        return [Config(128, 128, 4, 8), Config(64, 32, 4, 1)]  # eight stages do not fit the shared memory

    kernel, (q, k, v, _, bounds) = TritonKernel(choose=choose), problem()
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            kernel.forward(q, k, v, bounds, State.empty(q), scale=0.1, first=True)
    assert len(launches) == 2 and all(x[2]["BN"] == 32 for x in launches)
    assert sum("does not compile" in r.message for r in caplog.records) == 1
    with pytest.raises(OutOfResources):
        TritonKernel(choose=lambda *_: [Config(128, 128, 4, 8)]).forward(q, k, v, bounds, State.empty(q), scale=0.1, first=True)
