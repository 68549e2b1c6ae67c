"""What the ring's scripts share: a problem, the ways to solve it (ours and the peers'), and processes to run them in.

A :class:`Candidate` solves one :class:`Problem` on the processes at hand: ``step()`` is one forward and backward pass of attention over
this process's rows. Its constructor raises where it cannot, with the reason.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import os
import socket
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from ringattn import Layout, Ring, flash_attention, make_schedule
from ringattn.kernels.intervals import mask_intervals
from ringattn.ring.attention import attend
from ringattn.ring.transport import use_transport


@dataclass(frozen=True)
class Problem:
    """Attention over one sequence of ``seq_len`` tokens. ``window`` 0: none. ``documents``: how many are packed, 0: none."""

    seq_len: int
    heads: int
    kv_heads: int
    head_dim: int
    causal: bool
    window: int
    documents: int
    dtype: torch.dtype
    batch: int = 1

    @property
    def plain(self) -> bool:
        """Causal or full, nothing else: what every peer can do."""
        return not self.window and not self.documents

    def mask(self) -> dict[str, Any]:
        """Keyword arguments of make_schedule: the same ragged documents on every rank."""
        mask: dict[str, Any] = {"causal": self.causal, "window": self.window or None}
        if self.documents:
            starts = np.random.default_rng(self.seq_len).choice(np.arange(1, self.seq_len), self.documents - 1, replace=False)
            mask["documents"] = torch.from_numpy(np.cumsum(np.bincount(starts, minlength=self.seq_len)))
        return mask

    @property
    def flops(self) -> float:
        """Of forward and backward, by visible pairs: 4 D a pair and head forward, 2.5 times that backward."""
        lo, hi = mask_intervals(self.seq_len, **self.mask())
        return 3.5 * 4.0 * self.head_dim * self.heads * self.batch * float(np.maximum(hi - lo + 1, 0).sum()) / lo.shape[0]

    def tensors(self, rows: int, device: torch.device, heads_first: bool = False) -> list[Tensor]:
        """q, k, v that require gradients and dout, of ``rows`` rows of this rank's own."""
        made = []
        for heads in (self.heads, self.kv_heads, self.kv_heads, self.heads):
            shape = (self.batch, heads, rows) if heads_first else (self.batch, rows, heads)
            made.append(torch.randn(*shape, self.head_dim, device=device, dtype=self.dtype))
        return [x.requires_grad_(i < 3) for i, x in enumerate(made)]


class Candidate(Protocol):
    """A way to solve a problem."""

    name: str
    ring: Ring | None  # whose transfers can be measured

    def step(self) -> list[Tensor]:
        """out, dq, dk, dv of this process's rows."""
        ...

    def around(self) -> contextlib.AbstractContextManager[None]:
        """What must be in force while steps are taken."""
        ...


class Base:
    """``solve(q, k, v)`` on fixed inputs, forward and backward."""

    name: str
    ring: Ring | None = None
    inputs: list[Tensor]

    def solve(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        raise NotImplementedError

    def step(self) -> list[Tensor]:
        q, k, v, dout = self.inputs
        out = self.solve(q, k, v)
        return [out.detach(), *torch.autograd.grad(out, (q, k, v), dout)]

    def around(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


class Single(Base):
    """The whole problem on one device, with our kernel: what a perfect ring of N takes N times as long for."""

    def __init__(self, problem: Problem, device: torch.device, kernel: str) -> None:
        self.name, self.kernel, self.mask = "one device", kernel, problem.mask()
        self.inputs = problem.tensors(problem.seq_len, device)

    def solve(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = flash_attention(q, k, v, kernel=self.kernel, **self.mask)
        assert isinstance(out, Tensor)
        return out


class Ours(Base):
    """Our ring: a layout, an exchange, a transport, and perhaps a Ulysses axis of ``ulysses`` neighbouring processes."""

    def __init__(
        self, problem: Problem, device: torch.device, kernel: str, *, layout: str = "zigzag", exchange: str = "ring",
        transport: str = "p2p", ulysses: int = 1, virtual: int = 1, wire: str = "exact", inner: int = 0,
    ) -> None:
        self.name = self.describe(layout, exchange, transport, ulysses, virtual, wire, inner)
        processes = dist.get_world_size() if dist.is_initialized() else 1
        mask = problem.mask()
        if inner and ulysses > 1:
            raise ValueError("two levels are timed without a Ulysses axis")
        if ulysses == 1:
            outer = dist.new_group() if inner and dist.is_initialized() else None
            ring = Ring(virtual=virtual, inner=inner or None, outer_group=outer)
        else:
            groups = {}
            ranks = torch.arange(processes).view(-1, ulysses)
            for axis, table in (("ulysses", ranks), ("ring", ranks.T)):
                for row in table.tolist():
                    group = dist.new_group(row)
                    if dist.get_rank() in row:
                        groups[axis] = group
            ring = Ring(groups["ring"], virtual, groups["ulysses"])
        self.all_of_it, self.ring = ring, ring if ring.processes > 1 else None  # nothing to measure in a ring of one process
        if layout == "balanced" and not problem.documents:
            raise ValueError("balanced is planned for documents, and there are none")
        if transport != "p2p":
            use_transport(ring, transport, device)
        planned = {"documents": mask["documents"], "window": problem.window or None} if layout == "balanced" else {}
        place = Layout(layout, problem.seq_len, ring.size, ulysses=ulysses, **planned)
        self.schedule = make_schedule(place, ring, exchange=exchange, wire=wire, device=device, **mask)
        self.kernel = kernel
        self.inputs = problem.tensors(problem.seq_len // processes, device)

    @staticmethod
    def describe(layout: str, exchange: str, transport: str, ulysses: int, virtual: int, wire: str, inner: int = 0) -> str:
        """E.g. ``ring zigzag push``."""
        options = f" {transport}" * (transport != "p2p") + f" ulysses {ulysses}" * (ulysses > 1) + f" virtual {virtual}" * (virtual > 1)
        options += f" inner {inner}" * bool(inner)
        return f"{exchange} {layout}{options}" + f" wire {wire}" * (wire != "exact")

    def solve(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q, k, v, self.schedule.handle, ring=self.all_of_it, kernel=self.kernel)


class TorchContextParallel(Base):
    """PyTorch's context_parallel around scaled_dot_product_attention with the FlashAttention-2 that PyTorch brings along."""

    def __init__(self, problem: Problem, device: torch.device, method: str) -> None:
        from torch.distributed.device_mesh import init_device_mesh

        if not problem.plain:
            raise ValueError("context_parallel has no windows and no documents")
        self.name, self.method, self.causal = f"torch CP {method}", method, problem.causal
        self.device, self.seq_len, self.groups = device, problem.seq_len, problem.heads // problem.kv_heads
        self.mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        self.inputs = problem.tensors(problem.seq_len // dist.get_world_size(), device, heads_first=True)

    @contextlib.contextmanager
    def around(self) -> Iterator[None]:  # type: ignore[override]
        from torch.distributed.tensor.experimental._attention import context_parallel, set_rotate_method
        from torch.nn.attention import SDPBackend, sdpa_kernel

        set_rotate_method(self.method)
        placeholder = torch.zeros(1, self.seq_len, device=self.device)  # it wants something to shard; q, k, v are shards already
        sharding = context_parallel(self.mesh, buffers=[placeholder], buffer_seq_dims=[1], no_restore_buffers={placeholder})
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION), sharding:
            yield

    def solve(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.groups > 1:
            k, v = (x.repeat_interleave(self.groups, 1) for x in (k, v))
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal)


class RingFlashAttention(Base):
    """ring-flash-attn, from where it is installed or from ``folder``; without flash-attn, on the stand-in beside this file."""

    def __init__(self, problem: Problem, device: torch.device, variant: str, folder: str) -> None:
        self.name, self.causal = f"ring-flash-attn {variant}", problem.causal
        if not problem.plain or (variant == "zigzag" and not problem.causal):
            raise ValueError("it takes neither windows nor documents, and zigzag only causal masks")
        if problem.dtype == torch.float32:
            raise ValueError("its gradients are wrong in fp32, where its buffer for dq is also its sum")
        module = "zigzag_ring_flash_attn" if variant == "zigzag" else "ring_flash_attn"
        self.function: Callable[..., Tensor] = getattr(load_ring_flash_attention(folder, module), f"{module}_func")
        self.inputs = problem.tensors(problem.seq_len // dist.get_world_size(), device)

    def solve(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.function(q, k, v, causal=self.causal)


def load_ring_flash_attention(folder: str, module: str) -> Any:
    """One module of the package, without its package file, which imports adapters for versions of transformers that are gone."""
    if folder and folder not in sys.path:
        sys.path.append(folder)
    if importlib.util.find_spec("flash_attn") is None:
        sys.path.append(str(Path(__file__).parent / "peers"))
    package = "ring_flash_attn"
    if package not in sys.modules:
        spec = importlib.util.find_spec(package)
        if spec is None or spec.submodule_search_locations is None:
            raise ImportError("ring-flash-attn is not installed")
        stub = types.ModuleType(package)
        stub.__path__ = list(spec.submodule_search_locations)
        sys.modules[package] = stub
    return importlib.import_module(f"{package}.{module}")


def add_arguments(parser: argparse.ArgumentParser, heads: int, kv_heads: int, head_dim: int, out: str) -> None:
    """What every script about a :class:`Problem` asks for; the numbers are its defaults."""
    parser.add_argument("--heads", type=int, default=heads)
    parser.add_argument("--kv-heads", type=int, default=kv_heads)
    parser.add_argument("--head-dim", type=int, default=head_dim)
    parser.add_argument("--full", action="store_true", help="not causal")
    parser.add_argument("--window", type=int, default=0, help="0: none")
    parser.add_argument("--documents", type=int, default=0, help="packed documents of random lengths, 0: none")
    parser.add_argument("--kernel", default="auto")
    parser.add_argument("--wire", default="exact", help="dtype of travelling dK / dV: exact or bf16")
    parser.add_argument("--virtual", type=int, default=1, help="virtual shards a process")
    parser.add_argument("--processes", type=int, default=1, help="start so many (without torchrun)")
    parser.add_argument("--out", type=Path, default=Path(out))


def _enter(rank: int, world: int, port: int, function: Callable[..., None], args: tuple) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    _join(function, args)


def _join(function: Callable[..., None], args: tuple) -> None:
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=timedelta(seconds=120))
    try:
        function(device, *args)
    finally:
        dist.destroy_process_group()


def run_processes(function: Callable[..., None], processes: int, *args: Any) -> None:
    """``function(device, *args)``: on the ranks that torchrun has started, or on ``processes`` of our own (1: this one, alone)."""
    if dist.is_torchelastic_launched():
        _join(function, args)
    elif processes > 1:
        if torch.cuda.is_available() and processes > torch.cuda.device_count():
            raise SystemExit(
                f"--processes={processes}: this machine has {torch.cuda.device_count()} GPU(s), one a process; --virtual plays more shards"
            )
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        mp.spawn(_enter, (processes, port, function, args), processes)
    else:
        function(torch.device("cuda" if torch.cuda.is_available() else "cpu"), *args)
