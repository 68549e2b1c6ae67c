"""Tile sizes of the Triton kernels: static tables, and the order in which to fall back when a launch does not compile.

Nothing is tuned at run time. ``scripts/tune_kernel.py`` measures candidates on the GPU at hand; put what it prints here.
A table a (architecture, load style), one for fp32 everywhere. Lines: kernel ("forward", "dkdv", "dq"), widest head dim that the
line serves and, where it matters, mask class: "full" (every row sees every key) or "bounds" (anything else).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

Op = Literal["forward", "dkdv", "dq"]
Mask = Literal["full", "bounds"]

ARCHITECTURES = (80, 89, 90, 100, 120)
WIDTHS = (32, 64, 96, 128, 192, 256)
SHARED_MEMORY_BYTES = {80: 166_912, 89: 101_376, 90: 232_448, 100: 232_448, 120: 101_376}  # a block may use at most this


@dataclass(frozen=True)
class Config:
    """Query rows and key rows of a tile, warps, pipeline stages.

    ``branch``: one loop that asks at each tile whether to mask, instead of a loop of unmasked tiles and a loop of masked ones.
    ``hoist``: let LLVM move loop-invariant code out of the loop (it moves matrix descriptors too, and then spills them).
    ``parts``: hold a head dim such as 96 as 64 + 32 instead of padding it to 128 (with pointers the second part costs too many
    registers).
    ``registers``: the most that a thread may use, where that lets one more block run on a multiprocessor. What then spills must be
    needed only before and after the loop (which it is not with softcap: there the limit is not set).
    """

    block_m: int
    block_n: int
    warps: int
    stages: int
    branch: bool = True
    hoist: bool = False
    parts: bool = False
    registers: int | None = None

    @property
    def options(self) -> dict[str, int]:
        """The compiler's options."""
        limit = {} if self.registers is None else {"maxnreg": self.registers}
        return {"num_warps": self.warps, "num_stages": self.stages, **limit}


def head_widths(dim: int, parts: bool) -> tuple[int, int]:
    """The widths W0 + W1 >= dim in which a head is held: powers of two, W1 = 0 for one part (always where two are no smaller).

    >>> [head_widths(d, parts=True) for d in (64, 80, 96, 112, 192)]
    [(64, 0), (64, 16), (64, 32), (128, 0), (128, 64)]
    """
    whole = max(16, 1 << (dim - 1).bit_length())
    half = whole // 2
    rest = max(16, 1 << max(dim - half - 1, 0).bit_length())
    return (half, rest) if parts and half >= 16 and dim < whole and half + rest < whole else (whole, 0)


def architecture(capability: tuple[int, int]) -> int | None:
    """The table's architecture for a compute capability, None if there is none (older than sm_80)."""
    major, minor = capability
    match major:
        case 8:
            return 80 if minor in (0, 7) else 89  # sm_86 and sm_89 have less shared memory
        case 9:
            return 90
        case 10:
            return 100
        case _:
            return 120 if major > 10 else None


def configs(arch: int, op: Op, head_dim: int, element_bytes: int, mask: Mask, descriptors: bool) -> Iterator[Config]:
    """Configurations to try, best first: the narrowest line that serves the head dim, then ever smaller ones."""
    table = _TABLES[arch, descriptors] if element_bytes == 2 else _FP32
    for width in WIDTHS:
        if width >= head_dim:
            line = table.get((op, width, mask)) or table.get((op, width))
            if line is not None:
                yield line
                break
    yield from _LAST_RESORT


C = Config
_LAST_RESORT = (C(32, 32, 4, 1), C(16, 16, 4, 1))
_Table = dict[tuple[str, int] | tuple[str, int, str], Config]

# sm_80, sm_86, sm_89: pointer loads, mma.sync. Chosen to fit the smaller shared memory (99 KiB) and the registers.
_POINTERS_80: _Table = {
    ("forward", 32): C(128, 64, 4, 2),
    ("forward", 64): C(128, 64, 4, 2),
    ("forward", 128): C(128, 64, 8, 2),
    ("forward", 256): C(64, 32, 8, 2),
    ("dkdv", 32): C(64, 64, 4, 2),
    ("dkdv", 64): C(64, 64, 4, 2, branch=False),
    ("dkdv", 128): C(64, 64, 8, 2),
    ("dkdv", 256): C(32, 32, 4, 1),
    ("dq", 32): C(128, 64, 8, 2),
    ("dq", 64): C(128, 64, 8, 2, branch=False),
    ("dq", 128): C(128, 32, 8, 2, branch=False),
    ("dq", 256): C(64, 32, 8, 1),
}

# sm_90 and sm_100 with tensors that the copy engine cannot read (misaligned, or a stride of 0).
_POINTERS_90: _Table = {
    ("forward", 32): C(128, 64, 4, 2),
    ("forward", 64): C(128, 64, 4, 2),
    ("forward", 128): C(128, 64, 8, 2),
    ("forward", 256): C(128, 32, 8, 2),
    ("dkdv", 32): C(64, 64, 8, 2),
    ("dkdv", 64): C(64, 64, 8, 2),
    ("dkdv", 128): C(64, 64, 8, 1),
    ("dkdv", 256): C(32, 32, 8, 1),
    ("dq", 32): C(128, 64, 8, 2),
    ("dq", 64): C(128, 64, 8, 2),
    ("dq", 128): C(128, 64, 8, 2),
    ("dq", 256): C(64, 32, 8, 1),
}

_DESCRIPTORS_90: _Table = {
    ("forward", 32): C(128, 64, 4, 3),
    ("forward", 64): C(64, 64, 4, 2),  # 417 / 427 TF/s causal / full on an H200; 128 x 64 with 4 or 8 warps 400 to 418
    ("forward", 96): C(128, 64, 4, 2, parts=True),
    ("forward", 128): C(128, 64, 4, 2),
    ("forward", 192): C(128, 64, 8, 2, parts=True),
    ("forward", 256): C(128, 64, 8, 2),
    ("dkdv", 32): C(64, 64, 4, 2),
    ("dkdv", 64): C(64, 64, 4, 2),
    ("dkdv", 64, "bounds"): C(64, 64, 4, 2, registers=168),  # of 202: three blocks a multiprocessor, as without a mask
    ("dkdv", 96): C(64, 64, 4, 2, parts=True),
    ("dkdv", 128): C(64, 64, 4, 2),
    ("dkdv", 192): C(64, 64, 8, 1, parts=True),
    ("dkdv", 256): C(64, 64, 8, 1),
    ("dq", 32): C(128, 64, 4, 3),
    ("dq", 64): C(64, 64, 4, 2),  # 646 of its own matmul TF/s, full; 128 x 64 with 8 warps 601
    ("dq", 96): C(128, 64, 8, 3, parts=True),
    ("dq", 128): C(128, 64, 8, 3),
    ("dq", 192): C(128, 64, 8, 2, parts=True),
    ("dq", 256): C(64, 64, 8, 2),
}

_DESCRIPTORS_100: _Table = {
    **_DESCRIPTORS_90,
    ("dkdv", 64, "bounds"): C(64, 64, 4, 2),
    ("forward", 128): C(128, 128, 8, 2),
    ("forward", 256): C(64, 64, 8, 2),
    ("dkdv", 96): C(64, 64, 8, 2, parts=True),
    ("dkdv", 128): C(64, 64, 8, 2),
    ("dkdv", 192): C(64, 64, 8, 1),
    ("dq", 192): C(64, 64, 8, 1, parts=True),
    ("dq", 256): C(64, 64, 8, 1),
}

_DESCRIPTORS_120: _Table = {
    ("forward", 32): C(128, 64, 4, 2),
    ("forward", 64): C(128, 64, 4, 2),
    ("forward", 128): C(128, 64, 8, 2),
    ("forward", 256): C(64, 32, 8, 2),
    ("dkdv", 32): C(64, 64, 4, 2),
    ("dkdv", 64): C(32, 64, 4, 2),
    ("dkdv", 128): C(64, 64, 8, 2),
    ("dkdv", 256): C(32, 32, 8, 1),
    ("dq", 32): C(128, 64, 8, 2),
    ("dq", 64): C(128, 32, 4, 2),
    ("dq", 128): C(128, 32, 8, 2),
    ("dq", 256): C(64, 32, 8, 1),
}

# fp32 on every architecture: pointer loads; exact products run on the ordinary units, from registers.
_FP32: _Table = {
    ("forward", 32): C(64, 32, 4, 1),
    ("forward", 64): C(32, 32, 4, 1),
    ("forward", 128): C(16, 32, 4, 1),
    ("forward", 256): C(16, 16, 4, 1),
    ("dkdv", 32): C(32, 64, 8, 1),
    ("dkdv", 64): C(32, 32, 8, 1),
    ("dkdv", 128): C(16, 32, 8, 1),
    ("dkdv", 256): C(16, 16, 8, 1),
    ("dq", 32): C(32, 32, 4, 1),
    ("dq", 64): C(32, 32, 8, 1),
    ("dq", 128): C(32, 16, 8, 1),
    ("dq", 256): C(16, 16, 4, 1),
}

_TABLES: dict[tuple[int, bool], _Table] = {
    (80, False): _POINTERS_80,
    (89, False): _POINTERS_80,
    (90, False): _POINTERS_90,
    (90, True): _DESCRIPTORS_90,
    (100, False): _POINTERS_90,
    (100, True): _DESCRIPTORS_100,
    (120, False): _POINTERS_80,
    (120, True): _DESCRIPTORS_120,
}
