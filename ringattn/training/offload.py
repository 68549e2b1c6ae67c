"""``activation=offload``: what autograd saves inside the blocks waits in pinned host memory between forward and backward.

Forward: each saved tensor of a block is copied out on a side stream while later blocks compute. The GPU memory is let go two blocks later,
once the compute stream has waited for the copies, so that at most two blocks' tensors exist at any time, whatever the host's lead.
Backward: when a block begins, the tensors of the block before it start to come back on the side stream. The last block's never leave.
Storages are copied whole and once, however many views of them are saved; parameters, the rotary phases and tensors under
:data:`SMALLEST` bytes stay. On a CPU the same happens without streams: copies change no bits, so gradients are those without it.

A graph can be walked once: a second backward pass through it raises RuntimeError.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor

from ringattn import cost
from ringattn.config import Config, ConfigError
from ringattn.cost import GIB
from ringattn.model.config import ModelConfig
from ringattn.model.transformer import Block

SMALLEST = 1 << 16  # bytes
IN_FLIGHT = 2  # blocks whose tensors stay on the device while they are copied


class _Entry:
    """One storage: on the device, on its way, or on the host. ``handles``: packed views that have not been unpacked."""

    def __init__(self, storage: Tensor) -> None:
        self.device: Tensor | None = storage  # uint8 [bytes]
        self.host: Tensor | None = None
        self.ready: torch.cuda.Event | None = None  # the copy that was issued last, either way
        self.handles = 0


class _Group:
    """The entries of one block in one forward pass."""

    def __init__(self, before: _Group | None, free: dict[int, list[Tensor]]) -> None:
        self.before, self.entries, self.prefetched, self.free = before, dict[int, _Entry](), False, free

    def release(self, entry: _Entry) -> None:
        """The host buffer may serve again: the next copy into it is issued behind this one's, on the same stream."""
        if entry.host is not None:
            self.free.setdefault(entry.host.numel(), []).append(entry.host)
            entry.host = None

    def __del__(self) -> None:  # a graph that nobody walked back
        for entry in self.entries.values():
            self.release(entry)


class Offload:
    """One for a model. ``budget`` bytes of host memory.

    Raises RuntimeError, naming the key, when a forward pass would exceed the budget.
    """

    def __init__(self, layers: int, device: torch.device, budget: int, smallest: int | None = None) -> None:
        self.layers, self.budget, self.smallest = layers, budget, SMALLEST if smallest is None else smallest
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.free: dict[int, list[Tensor]] = {}  # host buffers by size, kept over steps: pinning is slow
        self.host_bytes = self.copied_out = self.copied_in = 0
        self.recent: list[_Group] = []

    def wrap(self, forward: Callable[..., Tensor], block: Block, layer: int) -> Callable[..., Tensor]:
        """``block.forward`` with its saved tensors in this object's care."""

        def offloaded(x: Tensor, cos: Tensor, sin: Tensor, handle: int) -> Tensor:
            if not torch.is_grad_enabled():
                return forward(x, cos, sin, handle)
            group = self._begin(layer)
            gathered = [p for p in block.parameters() if not isinstance(p, DTensor)]  # FSDP has put the whole ones in place by now
            stay = {t.untyped_storage().data_ptr() for t in (cos, sin, *gathered)}

            def pack(t: Tensor) -> Any:
                return self._pack(t, group, stay, copy=layer < self.layers - 1)

            with saved_tensors_hooks(pack, lambda packed: self._unpack(packed, group)):
                return forward(x, cos, sin, handle)

        return offloaded

    def _begin(self, layer: int) -> _Group:
        if layer == 0:
            self.recent = []
        group = _Group(self.recent[-1] if self.recent else None, self.free)
        self.recent.append(group)
        if len(self.recent) > IN_FLIGHT:
            for entry in self.recent[-1 - IN_FLIGHT].entries.values():
                _wait(entry)  # after this point in the compute stream the copy is done: the memory may be used again
                if entry.host is not None:
                    entry.device = None
        return group

    def _pack(self, t: Tensor, group: _Group, stay: set[int], *, copy: bool) -> Any:
        storage = t.untyped_storage()
        if isinstance(t, nn.Parameter) or storage.nbytes() < self.smallest or storage.data_ptr() in stay:
            return t
        entry = group.entries.get(storage.data_ptr())  # every entry of a group still holds its storage: no address is used twice
        if entry is None or entry.device is None:
            whole = torch.empty(0, dtype=torch.uint8, device=t.device).set_(storage)
            group.entries[storage.data_ptr()] = entry = _Entry(whole)
            if copy:
                self._copy_out(entry)
        entry.handles += 1
        return entry, t.dtype, t.shape, t.stride(), t.storage_offset()

    def _copy_out(self, entry: _Entry) -> None:
        assert entry.device is not None
        entry.host = self._host_buffer(entry.device.numel(), pinned=self.stream is not None)
        self._copy(entry, entry.host, entry.device)
        self.copied_out += 1

    def _copy(self, entry: _Entry, target: Tensor, source: Tensor) -> None:
        if self.stream is None:
            target.copy_(source)
            return
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            target.copy_(source, non_blocking=True)
            entry.ready = self.stream.record_event()

    def _host_buffer(self, size: int, *, pinned: bool) -> Tensor:
        if self.free.get(size):
            return self.free[size].pop()
        needed = 1 << (size - 1).bit_length() if pinned else size  # PyTorch rounds pinned memory up to powers of two
        if self.host_bytes + needed > self.budget:
            raise RuntimeError(
                f"offload_gib={self.budget / GIB:.3g}: the saved activations do not fit, {(self.host_bytes + needed) / GIB:.3g} GiB are "
                f"needed so far; raise offload_gib, shorten train.seq_len, or use activation=attention_saved or block"
            )
        self.host_bytes += needed
        return torch.empty(size, dtype=torch.uint8, pin_memory=pinned)

    def _fetch(self, group: _Group) -> None:
        if group.prefetched:
            return
        group.prefetched = True
        for entry in group.entries.values():
            if entry.device is None and entry.host is not None and entry.handles:
                # Memory of the compute stream, which the copy waits for: it may be freed there without a word to the side stream.
                entry.device = torch.empty(entry.host.numel(), dtype=torch.uint8, device=self.stream.device if self.stream else "cpu")
                self._copy(entry, entry.device, entry.host)
                self.copied_in += 1
            elif entry.device is not None:
                entry.ready = None
            group.release(entry)

    def _unpack(self, packed: Any, group: _Group) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        entry, dtype, shape, stride, offset = packed
        self._fetch(group)
        if group.before is not None:
            self._fetch(group.before)
        if entry.device is None:
            raise RuntimeError("activation=offload: a graph can be walked back once; run the forward pass again for a second backward pass")
        _wait(entry)
        entry.ready = None
        view = torch.empty(0, dtype=dtype, device=entry.device.device).set_(entry.device.untyped_storage(), offset, shape, stride)
        entry.handles -= 1
        if entry.handles == 0:
            entry.device = None
        return view


def host_budget(config: Config, host_ranks: int) -> int:
    """Bytes of host memory that the offloaded tensors of one of ``host_ranks`` ranks may take."""
    return int(0.8 * available_host_memory() / host_ranks if config.offload_gib is None else config.offload_gib * GIB)


def check_budget(config: Config, model: ModelConfig, world_size: int, host_ranks: int, compute_bytes: int) -> None:
    """Raises ConfigError, before anything is built, where ``offload_gib`` (or the free host memory) cannot hold what is offloaded."""
    work = cost.work_of(config, model, world_size, compute_bytes=compute_bytes)
    needed, limit = cost.host_bytes(work), host_budget(config, host_ranks)
    if needed <= limit:
        return
    states = cost.host_state_bytes(work)
    parts, ways = [], ["raise it"]
    if needed > states:
        smaller = work.tokens * model.layers * cost.saved_bytes_per_token(model, "attention_saved", compute_bytes)
        parts.append(f"saved activations take about {(needed - states) / GIB:.3g} GiB")
        ways.append(f"use activation=attention_saved (about {smaller / GIB:.3g} GiB on the device) or block")
    if states:
        parts.append(f"optimizer states take {states / GIB:.3g} GiB")
        ways.append("set optim.offload=false, or shard over more ranks")
    raise ConfigError([
        f"offload_gib={config.offload_gib}: a rank's {' and '.join(parts)} of host memory, allowed are {limit / GIB:.3g}; "
        + ", or ".join(ways)
    ])


def _wait(entry: _Entry) -> None:
    if entry.ready is not None:
        torch.cuda.current_stream().wait_event(entry.ready)


def available_host_memory() -> int:
    """Bytes that this machine could give to a new process (Linux's estimate; elsewhere all of the free pages)."""
    try:
        with open("/proc/meminfo") as file:
            return next(int(line.split()[1]) for line in file if line.startswith("MemAvailable")) * 1024
    except (OSError, StopIteration):
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
