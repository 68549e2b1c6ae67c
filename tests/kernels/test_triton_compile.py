"""Every line of the Triton kernels' tables compiles for its architecture on a machine without a GPU, and compiles well.

Well means: no spills to speak of, shared memory within the device's limit, and on sm_90 wgmma instructions that ptxas has not
serialised (its messages C75xx).
"""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

triton = pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from ringattn.kernels import triton_configs  # noqa: E402
from ringattn.kernels.triton_backward import attention_dkdv, attention_dq, attention_rows  # noqa: E402
from ringattn.kernels.triton_configs import SHARED_MEMORY_BYTES, Config, configs, head_widths  # noqa: E402
from ringattn.kernels.triton_forward import attention_forward  # noqa: E402

TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"
KERNELS = {"forward": attention_forward, "dkdv": attention_dkdv, "dq": attention_dq}
# Loads from local memory in the whole program. A value that is needed only before and after the loop costs nothing there, and
# off sm_90 (where nothing spills) ptxas' choices differ from one tile size to the next.
SPILL_LOADS = {80: 6, 89: 6, 90: 0, 100: 0, 120: 6}


@dataclass(frozen=True)
class Variant:
    arch: int
    descriptors: bool
    op: str
    dim: int
    dtype: str = "bf16"
    mask: str = "bounds"
    first: bool = False
    last: bool = False
    cap: bool = False
    config: Config | None = None

    def __str__(self) -> str:
        extra = [self.dtype, self.mask, *(n for n in ("first", "last", "cap") if getattr(self, n))]
        return f"sm_{self.arch}-{'descriptors' if self.descriptors else 'pointers'}-{self.op}-{self.dim}-{'-'.join(extra)}"

    def choice(self) -> Config:
        size = 4 if self.dtype == "fp32" else 2
        return self.config or next(iter(configs(self.arch, self.op, self.dim, size, self.mask, self.descriptors)))


def variants() -> list[Variant]:
    """Each line of each table once, with carried state and bounds (the most registers), and the variants of sm_90's hottest lines."""
    found = []
    for (arch, descriptors), table in triton_configs._TABLES.items():
        if (arch, descriptors) in ((89, False), (100, False), (120, False)):  # another architecture's table: a sample
            found += [Variant(arch, descriptors, "dkdv", 128)]
        else:
            found += [Variant(arch, descriptors, line[0], line[1], mask=line[2] if len(line) > 2 else "bounds") for line in table]
    found += [Variant(80, False, line[0], line[1], "fp32") for line in triton_configs._FP32 if line[1] > 32]
    hot = Variant(90, True, "forward", 128)
    found += [Variant(90, True, op, dim, mask="full") for op in KERNELS for dim in (64, 128)]
    found += [replace(hot, first=True, last=True), replace(hot, first=True, last=True, mask="full"), replace(hot, last=True, dtype="fp16")]
    found += [replace(hot, op=op, cap=True) for op in KERNELS]
    found += [Variant(90, False, "dkdv", 64, "fp32")]
    return found


def signature(v: Variant, c: Config, function: Any, constants: dict[str, Any]) -> tuple[dict[str, str], dict, dict]:
    """(types, constants, alignment) of a kernel's arguments, as a launch with aligned tensors gives them."""
    widths = head_widths(v.dim, c.parts)
    pointers = {"LO": "i32", "HI": "i32", "OUT": v.dtype, "SINKS": v.dtype}
    types, values, attributes = {}, {}, {}
    for i, p in enumerate(function.params):
        tile = re.fullmatch(r"(Q|K|V|DO)([01])", p.name)
        if p.is_constexpr:
            types[p.name], values[(i,)] = "constexpr", constants[p.name]
        elif p.annotation_type:
            types[p.name] = p.annotation_type
        elif tile and v.descriptors:
            width = widths[int(tile[2])]
            rows = c.block_m if tile[1] in ("Q", "DO") else c.block_n
            types[p.name] = f"tensordesc<{v.dtype}[1, 1, {rows}, {width}]>" if width else "constexpr"
            if not width:
                values[(i,)] = None
        elif p.name in ("LSE2", "DELTA") and v.descriptors and v.op == "dkdv":
            types[p.name] = f"tensordesc<fp32[1, {c.block_m}]>"
        else:
            types[p.name] = "*" + (v.dtype if tile else pointers.get(p.name, "fp32"))
            if not p.do_not_specialize_on_alignment:
                attributes[(i,)] = [["tt.divisibility", 16]]
    return types, values, attributes


def compile_variant(v: Variant) -> Any:
    c, function = v.choice(), KERNELS[v.op]
    w0, w1 = head_widths(v.dim, c.parts)
    full = v.mask == "full"
    constants = {
        "FIRST": v.first, "LAST": v.last, "SINK": v.first and v.cap, "ADD": True, "FULL": full, "EVEN": full, "CAP": v.cap, "D": v.dim,
        "W0": w0, "W1": w1, "BM": c.block_m, "BN": c.block_n, "STAGES": c.stages, "BRANCH": c.branch, "NO_LICM": not c.hoist, "VEC": 8,
        "DESC": v.descriptors, "PRECISION": "ieee", "INTERPRET": False,
    }  # fmt: skip
    types, values, attributes = signature(v, c, function, constants)
    source = ASTSource(fn=function, signature=types, constexprs=values, attrs=attributes)
    return triton.compile(source, target=GPUTarget("cuda", v.arch, 32), options=c.options)


def disassemble(kernel: Any, folder: Path) -> str:
    cubin = folder / "kernel.cubin"
    cubin.write_bytes(kernel.asm["cubin"])
    return subprocess.run([TOOLS / "nvdisasm", "-c", cubin], capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("v", variants(), ids=str)
def test_compiles_well(v: Variant, tmp_path: Path) -> None:
    kernel = compile_variant(v)
    sass = disassemble(kernel, tmp_path)
    limit = SHARED_MEMORY_BYTES[89 if v.arch == 80 else v.arch]  # the table of sm_80 serves sm_89
    assert kernel.metadata.shared <= limit
    spills = len(re.findall(r"\bLDL", sass))
    # With softcap a tile of tanh's slope lives beside p: the one exception on sm_90, but for lines that limit the registers.
    allowed = 12 if v.cap and v.op == "dkdv" else 4 if v.choice().registers else SPILL_LOADS[v.arch]
    assert spills <= allowed, f"{spills} loads of spilled registers"
    if v.choice().registers:  # what is loaded back is used after the loop only
        assert "HGMMA" not in sass[sass.index("LDL") :]
    products = {90: r"\bHGMMA", 100: r"\bUTC\w*MMA"}.get(v.arch, r"\bHMMA")
    if v.arch == 90 and min(v.choice().block_m, v.choice().block_n) < 64:  # wgmma needs 64 rows
        products = r"\bH\w*MMA"
    if v.dtype != "fp32":
        assert re.search(products, sass)
    if v.descriptors:
        assert "UTMALDG" in sass
    if v.arch == 90 and v.descriptors:
        (tmp_path / "kernel.ptx").write_text(kernel.asm["ptx"])
        assembled = subprocess.run([TOOLS / "ptxas", "-arch=sm_90a", "-v", tmp_path / "kernel.ptx", "-o", tmp_path / "out.cubin"],
                                   capture_output=True, text=True, check=True)  # fmt: skip
        assert not re.search(r"C75\d\d", assembled.stderr + assembled.stdout), assembled.stderr


def test_last_resorts_fit_every_device() -> None:
    """The configurations that any failing launch falls back to compile in little shared memory, for the widest head."""
    for op in KERNELS:
        c = triton_configs._LAST_RESORT[-1]
        kernel = compile_variant(Variant(80, False, op, 256, config=c))
        assert kernel.metadata.shared <= SHARED_MEMORY_BYTES[120]


def test_rows_kernel_compiles() -> None:
    constants = {"HAS_DLSE": True, "D": 128, "W": 128, "BM": 32, "VEC": 8, "INTERPRET": False}
    v = Variant(90, False, "rows", 128)
    pointers = {"OUT", "DOUT"}
    types, values, attributes = signature(v, Config(32, 32, 4, 1), attention_rows, constants)
    types |= dict.fromkeys(pointers, "*bf16")
    kernel = triton.compile(ASTSource(fn=attention_rows, signature=types, constexprs=values, attrs=attributes),
                            target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})  # fmt: skip
    assert "cubin" in kernel.asm


def test_every_head_dim_has_a_line() -> None:
    for arch in triton_configs.ARCHITECTURES:
        for dim in range(16, 257, 8):
            for op in KERNELS:
                for size in (2, 4):
                    for descriptors in (False, True)[: 2 if arch >= 90 else 1]:
                        chosen = list(configs(arch, op, dim, size, "bounds", descriptors))
                        assert len(chosen) >= 2, "nothing to fall back to"
                        assert all(c.block_m <= 128 and c.block_n <= 128 for c in chosen)
                        assert sum(head_widths(dim, chosen[0].parts)) >= dim
