"""Shapes of the Hopper kernels: one readable table per head dim, chosen by measurement on an H200 and never at run time."""

from __future__ import annotations

from dataclasses import dataclass

from ringattn.kernels.contract import KEY_BLOCK

HEAD_DIMS = (64, 128)
WARPGROUP_ROWS = 64  # query rows (forward) or keys (backward) of one consumer warpgroup


@dataclass(frozen=True)
class ForwardConfig:
    """Shape of the forward kernel. Key tiles are KEY_BLOCK keys, the unit in which masks are planned.

    ``consumers``: warpgroups of 64 query rows. ``stages``: tiles of K and V in shared memory. ``registers`` a consumer thread.
    Pairs are (without, with) a mask: ``late``: round P after the wait for P V; ``settle``: pin that wait behind the exponentials;
    ``lazy``: let the running maximum lag by up to 2^8, and skip the rescaling of the accumulator while it does.
    ``section_programs``: programs that a section of heads should give at least (see ``_section``).
    """

    consumers: int
    stages: int
    registers: int
    late: tuple[bool, bool]
    settle: tuple[bool, bool] = (False, False)
    lazy: tuple[bool, bool] = (False, False)
    section_programs: int = 512

    @property
    def rows(self) -> int:
        return WARPGROUP_ROWS * self.consumers


@dataclass(frozen=True)
class BackwardConfig:
    """Shape of the backward kernel: query tile, stages of Q and dO, registers a consumer thread, whether the next tile's scores
    start before this tile's dk, programs that a section of heads should give at least."""

    row_tile: int
    stages: int
    registers: int
    ahead: bool
    section_programs: int = 512


# Under a mask, settle gave 670 against 655 TF/s at head dim 128 (causal, 16,384 tokens), 506 against 485 at 64; without one, nothing.
# With lazy as well it is 689, and no shape uses it: where one key stands out its p is no longer exactly 1 and so has a rounding error,
# which made out's error 1.11 times that of torch's FlashAttention-2 on inputs with outliers. Three consumers at head dim 64: 10 to
# 15 % over two. Three stages in the backward at head dim 128 fill the 227 KiB.
FORWARD = {
    64: ForwardConfig(consumers=3, stages=3, registers=160, late=(False, True), settle=(False, True)),
    128: ForwardConfig(consumers=2, stages=2, registers=240, late=(True, True), settle=(False, True)),
}
BACKWARD = {
    64: BackwardConfig(row_tile=128, stages=2, registers=240, ahead=False),
    128: BackwardConfig(row_tile=64, stages=3, registers=240, ahead=True),
}


def forward_constants(config: ForwardConfig, head_dim: int, *, masked: bool, carry: int, last: bool) -> dict[str, int | bool]:
    """Compile-time arguments of ``forward_kernel``. carry: 0 nothing, 1 a state in memory, 2 a sink."""
    return {
        "CONSUMERS": config.consumers, "BN": KEY_BLOCK, "D": head_dim, "STAGES": config.stages, "REGISTERS": config.registers,
        "MASKED": masked, "CARRY": carry, "LAST": last, "LATE": config.late[masked],
        "SETTLE": config.settle[masked], "LAZY": config.lazy[masked],
    }  # fmt: skip


def backward_constants(config: BackwardConfig, head_dim: int, *, masked: bool) -> dict[str, int | bool]:
    """Compile-time arguments of ``backward_kernel``."""
    return {
        "BM": config.row_tile, "D": head_dim, "STAGES": config.stages, "REGISTERS": config.registers, "MASKED": masked,
        "AHEAD": config.ahead,
    }  # fmt: skip
