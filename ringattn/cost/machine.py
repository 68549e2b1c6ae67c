"""What a machine can do, as a handful of numbers: built-in profiles, and profiles measured by scripts/profile_machine.py.

Peaks, memory and link widths of the built-in profiles are NVIDIA's data sheets (SXM modules, dense bf16, one direction of a link, network
as in a DGX). What training reaches of them was measured on one H200 and, for links, two (docs/benchmarks.md); the other profiles
assume the same shares and say so in ``source``. Plain arithmetic, no torch.
"""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

GB, GIB, TERA = 1e9, 2**30, 1e12


@dataclass(frozen=True)
class Machine:
    """One GPU, its host and its links. Rates are those that training reaches, not peaks, unless named so.

    ``memory_gib`` of the device; ``reserve_gib`` of it that the framework cannot use (CUDA context, communicators, kernels)
    ``peak_flops``      dense bf16, FLOP/s, for MFU
    ``matmul``          (sqrt(K * N), TF/s) points of a bf16 product [8192, K] x [K, N], ascending; ``outer`` the same for A^T B
                        added to an fp32 sum
    ``memory_gbs``      reads + writes of elementwise work on whole tensors; ``strided_gbs`` of that with strided and broadcast operands
    ``attention``       head dim -> TF/s of visible pairs (forward, backward counted 2.5 x) of long causal sequences
    ``attention_half``  mean visible keys a query at which a kernel reaches half of that (masks of many short documents)
    ``link_gbs``, ``network_gbs``  neighbour exchange within a node of ``node_gpus`` and between nodes, each way, a GPU
    ``latency_us``      start of a message
    ``host_gbs``, ``host_gib``     copies to pinned host memory, and how much of that a GPU may take
    ``host_step_ms``, ``host_layer_ms``, ``host_hop_us``  what Python and launches cost the host: a step, a layer (forward and
                        backward), a hop of the ring on top
    """

    name: str
    memory_gib: float
    peak_flops: float
    matmul: tuple[tuple[float, float], ...]
    outer: tuple[tuple[float, float], ...]
    memory_gbs: float
    strided_gbs: float
    attention: dict[int, tuple[float, float]]
    attention_half: float
    link_gbs: float
    node_gpus: int
    network_gbs: float
    host_gbs: float
    host_gib: float
    latency_us: float = 20.0
    reserve_gib: float = 2.5
    host_step_ms: float = 6.0
    host_layer_ms: float = 4.6
    host_hop_us: float = 330.0
    source: str = ""
    raw: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)

    @property
    def usable_bytes(self) -> float:
        """Bytes that tensors may take."""
        return (self.memory_gib - self.reserve_gib) * GIB

    def matmul_rate(self, k: float, n: float, *, outer: bool = False) -> float:
        """FLOP/s of a product with many rows and a [K, N] weight."""
        return interpolate(self.outer if outer else self.matmul, math.sqrt(k * n)) * TERA

    def attention_rates(self, head_dim: int, keys: float) -> tuple[float, float]:
        """FLOP/s of visible pairs, forward and backward, where a query sees ``keys`` keys in the mean."""
        nearest = min(self.attention, key=lambda d: abs(math.log(d / head_dim)))
        share = keys / (keys + self.attention_half) * min(1.0, head_dim / nearest)
        forward, backward = self.attention[nearest]
        return forward * share * TERA, backward * share * TERA

    def save(self, path: Path) -> None:
        """Write a profile that :func:`find_machine` reads."""
        path.write_text(json.dumps(dataclasses.asdict(self), indent=1))


def interpolate(points: tuple[tuple[float, float], ...], x: float) -> float:
    """Piecewise linear in log x, constant beyond the ends."""
    if x <= points[0][0]:
        return points[0][1]
    for (x0, y0), (x1, y1) in zip(points, points[1:], strict=False):
        if x <= x1:
            return y0 + (y1 - y0) * math.log(x / x0) / math.log(x1 / x0)
    return points[-1][1]


# Rates of the H200 are those of training steps, fitted to 34 of them (docs/benchmarks.md): products run at 736 TF/s there, a few percent
# above what the same shapes reach in a loop of nothing else; elementwise work at half of a copy's rate, torch's kernels for
# broadcast and strided operands not being vectorised.
H200 = Machine(
    name="h200", memory_gib=139.8, peak_flops=989e12,
    matmul=((768.0, 600.0), (2048.0, 730.0), (6000.0, 750.0)), outer=((768.0, 430.0), (2048.0, 600.0), (6000.0, 645.0)),
    memory_gbs=3900.0, strided_gbs=2050.0, attention={64: (540.0, 500.0), 128: (700.0, 610.0)}, attention_half=250.0,
    link_gbs=250.0, node_gpus=8, network_gbs=40.0, host_gbs=55.0, host_gib=200.0,
    host_step_ms=6.0, host_layer_ms=4.6, host_hop_us=330.0,
    source="measured on one H200 (two for the links); network: data sheet x 0.8",
)


def scaled(
    name: str, *, memory_gib: float, peak: float, memory: float, link: float, network: float, host: float, host_gib: float
) -> Machine:
    """A profile that reaches the H200's shares of its own peaks (TF/s, GB/s)."""
    compute, width = peak / 989.0, memory / 4800.0

    def curve(points: tuple[tuple[float, float], ...]) -> tuple[tuple[float, float], ...]:
        return tuple((x, y * compute) for x, y in points)

    return dataclasses.replace(
        H200, name=name, memory_gib=memory_gib, peak_flops=peak * TERA, matmul=curve(H200.matmul), outer=curve(H200.outer),
        memory_gbs=H200.memory_gbs * width, strided_gbs=H200.strided_gbs * width,
        attention={d: (f * compute, b * compute) for d, (f, b) in H200.attention.items()},
        attention_half=H200.attention_half, link_gbs=H200.link_gbs * link / 450.0, network_gbs=network * 0.8,
        host_gbs=host, host_gib=host_gib, source="data sheet; shares of the peaks assumed as measured on an H200",
    )


MACHINES = {
    "a100": scaled("a100", memory_gib=79.1, peak=312, memory=2039, link=300, network=25, host=24, host_gib=120),
    "h100": scaled("h100", memory_gib=79.1, peak=989, memory=3350, link=450, network=50, host=50, host_gib=200),
    "h200": H200,
    "b200": scaled("b200", memory_gib=178.0, peak=2250, memory=7700, link=900, network=50, host=50, host_gib=250),
}


def find_machine(name: str) -> Machine:
    """A built-in profile by name, or the profile in a file. Raises ValueError, naming what there is."""
    if name.lower() in MACHINES:
        return MACHINES[name.lower()]
    path = Path(name)
    if not path.is_file():
        known = ", ".join(MACHINES)
        raise ValueError(f"machine={name}: is neither {known} nor a file written by scripts/profile_machine.py")
    try:
        raw = json.loads(path.read_text())
        raw["attention"] = {int(d): tuple(rates) for d, rates in raw["attention"].items()}
        raw |= {key: tuple(tuple(point) for point in raw[key]) for key in ("matmul", "outer")}
        return Machine(**raw)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"machine={name}: is not a profile written by scripts/profile_machine.py ({error})") from None


def machine_of(device_name: str) -> Machine | None:
    """The built-in profile of a device named as ``torch.cuda.get_device_name`` does; None where there is none."""
    plain = device_name.lower()
    return next((m for name, m in MACHINES.items() if name in plain.replace("gh200", "h200").replace("gb200", "b200")), None)
