"""Every shipped variant of the Hopper kernels compiles for sm_90 on a machine without a GPU, and compiles well.

Well means: wgmma instructions, no spills worth the name, shared memory within the device's limit, and no ptxas message C75xx,
which says that the tensor cores were serialised or the register split ignored: the kernel would be right and several times slower.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

triton = pytest.importorskip("triton")
if not triton.__version__.startswith("3.6."):  # Gluon's names change from version to version; at run time the self-check decides
    pytest.skip(f"the Hopper kernels are written for triton 3.6, this is {triton.__version__}", allow_module_level=True)

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.experimental.gluon._runtime import GluonASTSource  # noqa: E402
from triton.experimental.gluon.language import NVMMASharedLayout  # noqa: E402

from ringattn.kernels import gluon_backward, gluon_forward  # noqa: E402
from ringattn.kernels.contract import KEY_BLOCK  # noqa: E402
from ringattn.kernels.gluon_configs import (  # noqa: E402
    BACKWARD,
    FORWARD,
    HEAD_DIMS,
    WARPGROUP_ROWS,
    backward_constants,
    forward_constants,
)

TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"
SHARED_MEMORY_LIMIT = 227 * 1024
# One or two loop constants wait in local memory while a warpgroup masks a tile, or go there before the loop and come back after it.
SPILL_LIMIT_BYTES = 32

HOPS = [(0, True), (0, False), (1, True), (1, False), (2, True), (2, False)]  # (carry, last)


def tensor_map(block: tuple[int, ...], dtype: str, swizzle: int = 128) -> str:
    layout = NVMMASharedLayout(swizzle_byte_width=swizzle, element_bitwidth=32 if dtype == "fp32" else 16, rank=len(block))
    return f"tensordesc<{dtype}{list(block)},{layout!r}>"


def compile_kernel(function, types: dict[str, str], constants: dict) -> tuple[str, int]:
    """(PTX, shared memory in bytes) of one variant. Arguments not in ``types`` are int32; strides are multiples of 16."""
    names = function.arg_names
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    aligned = [n for n in names if signature[n].startswith("*") or ("stride" in n and n not in constants)]
    source = GluonASTSource(
        fn=function,
        signature=signature,
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    kernel = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
    return kernel.asm["ptx"], kernel.metadata.shared


def assemble(ptx: str, folder: Path) -> tuple[str, str]:
    """(ptxas log, SASS) of PTX for sm_90a."""
    (folder / "kernel.ptx").write_text(ptx)
    cubin = str(folder / "kernel.cubin")
    log = subprocess.run(
        [TOOLS / "ptxas", "-arch=sm_90a", "-v", folder / "kernel.ptx", "-o", cubin], capture_output=True, text=True, check=True
    )
    sass = subprocess.run([TOOLS / "nvdisasm", "-c", cubin], capture_output=True, text=True, check=True)
    return log.stdout + log.stderr, sass.stdout


def check(ptx: str, shared: int, folder: Path, products: int) -> None:
    log, sass = assemble(ptx, folder)
    assert not re.search(r"C75\d\d", log), log
    spills = [int(n) for n in re.findall(r"(\d+) bytes spill", log)]
    assert len(spills) == 2, log
    assert max(spills) <= SPILL_LIMIT_BYTES, log
    assert shared <= SHARED_MEMORY_LIMIT
    assert len(re.findall(r"\bHGMMA", sass)) == products
    assert "USETMAXREG" in sass


def forward_types(head_dim: int, dtype: str) -> dict[str, str]:
    rows, keys = (1, 1, WARPGROUP_ROWS, head_dim), (1, 1, KEY_BLOCK, head_dim)
    types = {name: tensor_map(rows, dtype) for name in ("q_desc", "out_desc")}
    types |= {name: tensor_map(keys, dtype) for name in ("k_desc", "v_desc")}
    types |= dict.fromkeys(("acc_ptr", "m_ptr", "l_ptr", "lse_ptr", "sink_ptr"), "*fp32")
    types |= dict.fromkeys(("lo_ptr", "hi_ptr", "plan_ptr", "live_ptr"), "*i32")
    return types | {"scale_log2": "fp32"}


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("carry", "last"), HOPS)
def test_forward(head_dim: int, masked: bool, carry: int, last: bool, tmp_path: Path) -> None:
    config = FORWARD[head_dim]
    constants = forward_constants(config, head_dim, masked=masked, carry=carry, last=last)
    ptx, shared = compile_kernel(gluon_forward.forward_kernel, forward_types(head_dim, "bf16"), constants)
    # Scores and P V, each once before (or after) and once in the loop: 16 of the inner dim an instruction.
    steps = head_dim // 16 + KEY_BLOCK // 16
    check(ptx, shared, tmp_path, products=2 * config.consumers * steps)


def backward_types(head_dim: int, row_tile: int, dtype: str, gradient: str) -> dict[str, str]:
    rows, keys = (1, 1, row_tile, head_dim), (1, 1, KEY_BLOCK, head_dim)
    columns = head_dim // 2 if row_tile == 64 else head_dim
    types = {name: tensor_map(rows, dtype) for name in ("q_desc", "do_desc")}
    types |= {name: tensor_map(keys, dtype) for name in ("k_desc", "v_desc")}
    types |= {name: tensor_map((row_tile,), "fp32", 0) for name in ("lse_desc", "delta_desc")}
    types |= {"dq_desc": tensor_map((1, WARPGROUP_ROWS, columns), "fp32")}
    types |= dict.fromkeys(("dk_ptr", "dv_ptr"), f"*{gradient}")
    return types | {"key_ptr": "*i32", "plan_ptr": "*i32", "scale_log2": "fp32"}


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("gradient", ["fp32", "bf16"])
def test_backward(head_dim: int, masked: bool, gradient: str, tmp_path: Path) -> None:
    config = BACKWARD[head_dim]
    types = backward_types(head_dim, config.row_tile, "bf16", gradient)
    ptx, shared = compile_kernel(gluon_backward.backward_kernel, types, backward_constants(config, head_dim, masked=masked))
    # Per consumer and tile: S and dP over the head dim, dv and dk over the queries, dq over the keys; S once more ahead of the loop.
    steps = (3 if config.ahead else 2) * head_dim // 16 + 2 * config.row_tile // 16 + KEY_BLOCK // 16
    check(ptx, shared, tmp_path, products=2 * steps)
    assert "cp.reduce.async.bulk.tensor" in ptx


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_fp16(head_dim: int, tmp_path: Path) -> None:
    config, back = FORWARD[head_dim], BACKWARD[head_dim]
    constants = forward_constants(config, head_dim, masked=True, carry=1, last=True)
    ptx, shared = compile_kernel(gluon_forward.forward_kernel, forward_types(head_dim, "fp16"), constants)
    check(ptx, shared, tmp_path, products=2 * config.consumers * (head_dim // 16 + KEY_BLOCK // 16))
    types = backward_types(head_dim, back.row_tile, "fp16", "fp32")
    ptx, shared = compile_kernel(gluon_backward.backward_kernel, types, backward_constants(back, head_dim, masked=True))
    steps = (3 if back.ahead else 2) * head_dim // 16 + 2 * back.row_tile // 16 + KEY_BLOCK // 16
    check(ptx, shared, tmp_path, products=2 * steps)
