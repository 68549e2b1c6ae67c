"""The host side of the Hopper kernels without a GPU: helper kernels in the interpreter, arguments on their names, refusals."""

from __future__ import annotations

import os
import subprocess
import sys
import weakref
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from ringattn.kernels.contract import Bounds, State
from ringattn.kernels.gluon_kernel import HELPER_ROWS, GluonKernel, _section
from ringattn.kernels.gluon_launch import Launcher

triton = pytest.importorskip("triton")


def test_helper_kernels_in_the_interpreter(rng: np.random.Generator) -> None:
    script = Path(__file__).with_name("interpreted_gluon_helpers.py")
    root = Path(__file__).parents[2]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(root)}
    command = [sys.executable, str(script), str(rng.integers(2**31))]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stdout + result.stderr


class Launches:
    """Stands in for a kernel: notes grid and arguments by name."""

    def __init__(self, kernel: Any, log: list[tuple[str, int, dict[str, Any]]]) -> None:
        self.kernel, self.log, self.arg_names = kernel, log, kernel.arg_names

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*args: Any, num_warps: int, **constants: Any) -> None:
            names = self.kernel.arg_names
            assert len(args) + len(constants) == len(names)
            assert set(constants) == set(names[len(args) :])
            self.log.append((self.kernel.fn.__name__, int(np.prod(grid)), {**dict(zip(names, args, strict=False)), **constants}))

        return launch


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> tuple[GluonKernel, list[tuple[str, int, dict[str, Any]]]]:
    from ringattn.kernels import gluon_backward, gluon_forward, gluon_helpers

    log: list[tuple[str, int, dict[str, Any]]] = []
    modules = [
        SimpleNamespace(**{name: Launches(getattr(module, name), log) for name in names})
        for module, names in (
            (gluon_forward, ("forward_kernel",)), (gluon_backward, ("backward_kernel",)),
            (gluon_helpers, ("plan_kernel", "rows_kernel", "finish_dq")),
        )
    ]  # fmt: skip
    kernel = GluonKernel()
    monkeypatch.setattr(kernel, "_load", lambda: (triton, *modules))
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    return kernel, log


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("full", [False, True])
def test_arguments_land_on_their_names(launches: Any, head_dim: int, full: bool) -> None:
    kernel, log = launches
    batch, queries, keys, heads, kv_heads = 2, 300, 256, 6, 2
    q, out, dout = (torch.zeros(batch, queries, heads, head_dim, dtype=torch.bfloat16) for _ in range(3))
    k, v = torch.zeros(2, batch, keys, kv_heads, head_dim, dtype=torch.bfloat16).unbind(0)
    hi = np.full((1, queries), keys) if full else np.minimum(np.arange(queries)[None] + 1, keys)
    bounds = Bounds.from_rows(np.zeros((1, queries), int), hi, keys)
    state, lse = State.empty(q), torch.empty(batch, heads, queries)
    kernel.forward(q, k, v, bounds, state, scale=0.5, first=True)
    kernel.forward(q, k, v, bounds, state, scale=0.5, first=False, out=out, lse=lse)
    kernel.forward(q, k, v, bounds, None, scale=0.5, first=True, out=out, lse=lse, sinks=torch.zeros(heads))
    rows = kernel.prepare(out, dout, lse, None)
    dq, dk, dv = (torch.zeros_like(x, dtype=torch.float32) for x in (q, k, v))
    for part in ("all", "kv", "q"):
        kernel.backward(q, k, v, dout, rows, bounds, scale=0.5, dq=dq, dk=dk, dv=dv, add_dq=True, part=part)

    names = [name for name, _, _ in log]
    plan = [] if full else ["plan_kernel"]  # made once, then kept with the bounds
    assert names == [*plan, *["forward_kernel"] * 3, "rows_kernel", "backward_kernel", "finish_dq", "backward_kernel", "finish_dq"]
    forward = [arguments for name, _, arguments in log if name == "forward_kernel"]
    assert [(x["CARRY"], x["LAST"], x["MASKED"]) for x in forward] == [(0, False, not full), (1, True, not full), (2, True, not full)]
    row_tiles = -(-queries // (64 * forward[0]["CONSUMERS"]))
    assert [grid for name, grid, _ in log if name == "forward_kernel"] == [row_tiles * batch * heads] * 3
    for x in forward:
        assert (x["sq"], x["heads"], x["group"], x["key_tiles"], x["row_tiles"]) == (queries, heads, 3, 2, row_tiles)
        assert (batch * heads) % x["section"] == 0
        assert x["q_desc"].shape == [batch, heads, queries, head_dim]
        assert x["k_desc"].shape == [batch, kv_heads, keys, head_dim]
        assert x["q_desc"].strides == [queries * heads * head_dim, head_dim, heads * head_dim, 1]
        assert x["lse_stride_h"] == queries
    assert forward[1]["acc_ptr"] is state.acc and forward[1]["acc_stride_s"] == heads * head_dim
    assert forward[1]["m_ptr"] is state.m and forward[1]["l_ptr"] is state.l and forward[1]["stat_stride_b"] == heads * queries
    for name, grid, x in log:
        if name == "backward_kernel":
            assert grid == 2 * batch * kv_heads and x["rows"] == 384 and x["dq_desc"].shape == [batch * heads, 384, head_dim]
            assert x["dk_ptr"] is dk and x["dv_ptr"] is dv and x["lse_desc"].base is rows.lse2 and x["sk"] == keys
            assert x["do_desc"].base is dout and x["delta_desc"].base is rows.padded_delta
        if name == "finish_dq":
            assert x["dq_ptr"] is dq and x["scale"] == 0.5 and x["ADD"] and grid == 384 // HELPER_ROWS * batch * heads


def test_plans_go_with_their_bounds(launches: Any) -> None:
    kernel, log = launches
    q = torch.zeros(1, 200, 2, 64, dtype=torch.bfloat16)
    out, lse = torch.empty_like(q), torch.empty(1, 2, 200)
    for _ in range(3):
        bounds = Bounds.from_rows(np.zeros((1, 200), int), np.arange(200)[None] + 1, 200)
        for _ in range(2):
            kernel.forward(q, q, q, bounds, None, scale=1.0, first=True, out=out, lse=lse)
        tables = weakref.ref(next(iter(bounds.derived.values())).query)
        del bounds
    assert [name for name, _, _ in log].count("plan_kernel") == 3
    log.clear()  # the log held the last bounds' tables
    assert tables() is None


def test_tensors_that_tma_cannot_address_are_copied(launches: Any) -> None:
    kernel, log = launches
    odd = torch.randn(1, 100, 2, 65, dtype=torch.float32).bfloat16()[..., :64]  # rows 130 bytes apart
    out, lse = torch.empty(1, 100, 2, 64, dtype=torch.bfloat16), torch.empty(1, 2, 100)
    bounds = Bounds.from_rows(np.zeros((1, 100), int), np.full((1, 100), 100), 100)
    kernel.forward(odd, odd, odd, bounds, None, scale=1.0, first=True, out=out, lse=lse)
    for name in ("q_desc", "k_desc", "v_desc"):
        copy = log[-1][2][name].base
        assert copy is not odd and torch.equal(copy, odd) and copy.is_contiguous()
    assert log[-1][2]["out_desc"].base is out


def test_second_launch_of_a_kind_goes_straight_to_compiled_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    calls: list[tuple[Any, ...]] = []

    class Compiled:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return lambda *args: calls.append(("compiled", grid, args))

    class Kernel:
        arg_names = ("x", "n", "scale", "A", "B")

        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return lambda *args, **constants: (calls.append(("triton", grid, args, constants)), Compiled())[1]

    launch, kernel, x = Launcher(), Kernel(), torch.zeros(8)
    launch(kernel, (3, 2), (x, 5, 0.5), {"B": 2, "A": True})
    assert calls.pop() == ("triton", (3, 2), (x, 5, 0.5), {"B": 2, "A": True, "num_warps": 4})
    launch(kernel, (4,), (x, 7, 0.25), {"B": 2, "A": True})
    assert calls.pop() == ("compiled", (4, 1, 1), (x, 7, 0.25, True, 2))
    for args, constants in (
        ((x, 16, 0.5), {"B": 2, "A": True}),  # divisible by 16
        ((x, 1, 0.5), {"B": 2, "A": True}),
        ((x, 2**31 + 1, 0.5), {"B": 2, "A": True}),
        ((x[1:], 5, 0.5), {"B": 2, "A": True}),  # another alignment
        ((x.half(), 5, 0.5), {"B": 2, "A": True}),
        ((x, 5, 0.5), {"B": 3, "A": True}),
    ):
        launch(kernel, (1,), args, constants)
        assert calls.pop()[0] == "triton"


def test_sections_divide_the_heads() -> None:
    for heads in (1, 2, 3, 7, 8, 12, 60):
        for tiles in (1, 4, 16, 128, 1000):
            section = _section(heads, tiles, 512)
            assert heads % section == 0 and section <= max(4, -(-512 // tiles))
    assert _section(16, 128, 512) == 4 and _section(16, 4, 512) == 16


def test_refusal_without_a_gpu() -> None:
    q = torch.zeros(1, 8, 2, 64, dtype=torch.bfloat16)
    assert "9.0" in (GluonKernel().refusal(q, q, softcap=None, sinks=None) or "")
    assert GluonKernel.available(torch.device("cpu")) is not None
