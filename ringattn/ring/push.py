"""A transport for one node: the copy engines push each shard into the neighbour's symmetric memory, without taking an SM.

A message is a copy on a side stream into the receiver's buffer, then a counter written there. Two counters for each pair of
processes, in symmetric memory, only ever grow: ``ready`` (receives that the receiver has posted, so the sender may write) and
``arrived`` (messages the sender has completed, so the receiver may read). Streams wait for them in hardware
(cuStreamWaitValue32), so neither the host nor an SM spins. Both sides post in the same order, so the n-th message of a pair is the
n-th receive.

Buffers are made by a collective call and kept for the life of the ring; every process asks for the same ones in the same order.
Same bytes as point-to-point, hence the same bits.
"""

from __future__ import annotations

import ctypes
from collections import Counter, defaultdict
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ringattn.ring.hang import watch_of
from ringattn.ring.ring import Ring
from ringattn.ring.transport import Message, Note

READY, ARRIVED = 0, 1
WAIT_GREATER_OR_EQUAL = 0  # CU_STREAM_WAIT_VALUE_GEQ: signed difference, so counters may wrap


@cache
def _driver() -> Any:
    return ctypes.CDLL("libcuda.so.1")


def _stream_op(name: str, stream: torch.cuda.Stream, address: int, value: int) -> None:
    status = getattr(_driver(), name)(
        ctypes.c_void_p(stream.cuda_stream), ctypes.c_uint64(address), ctypes.c_uint32(value), ctypes.c_uint(WAIT_GREATER_OR_EQUAL)
    )
    if status:
        raise RuntimeError(f"{name} failed with CUDA driver error {status}")


def push_refusal(ring: Ring, device: torch.device) -> str | None:
    """Why this ring cannot push, or None. Local knowledge only: the processes of a ring must agree on the answer."""
    if device.type != "cuda" or ring.processes < 2:
        return "it needs two or more processes with a CUDA device each"
    if ring.processes > torch.cuda.device_count():
        return "the ring spans more than one node"
    peers = [d for d in range(torch.cuda.device_count()) if d != device.index]
    if not all(torch.cuda.can_device_access_peer(device, d) for d in peers):
        return "the GPUs have no peer access to each other"
    return None


class SymmetricPush:
    """Copy-engine push between the processes of one node; see the module docstring."""

    def __init__(self, ring: Ring, device: torch.device) -> None:
        import torch.distributed._symmetric_memory as symmetric

        assert ring.group is not None
        self.ring, self.device, self._symmetric = ring, device, symmetric
        self._group_name = ring.group.group_name
        self._stream = torch.cuda.Stream(device, priority=-1)
        self._handles: dict[int, tuple[Any, Tensor]] = {}  # by address of the own buffer
        self._views: dict[tuple[int, int], Tensor] = {}  # (address, process): the peer's twin buffer
        self._free: defaultdict[tuple[Any, ...], list[Tensor]] = defaultdict(list)
        self._posted: Counter[int] = Counter()  # receives posted, by the process they come from
        self._sent: Counter[int] = Counter()  # messages sent, by the process they go to
        # counters[i, p]: what process p has signalled to this one
        self._counters = self._make((2, ring.processes), torch.int32)
        self._counters.zero_()
        torch.cuda.synchronize(device)
        dist.barrier(ring.group)

    def _make(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        buffer: Tensor = self._symmetric.empty(*shape, dtype=dtype, device=self.device)
        handle = self._symmetric.rendezvous(buffer, group=self._group_name)
        self._handles[buffer.data_ptr()] = (handle, buffer)
        return buffer

    def _twin(self, buffer: Tensor, process: int) -> Tensor:
        key = (buffer.data_ptr(), process)
        if key not in self._views:
            handle, own = self._handles[key[0]]
            self._views[key] = handle.get_buffer(process, own.shape, own.dtype)
        return self._views[key]

    def _counter(self, kind: int, process: int) -> int:
        """Address of the counter that ``process`` signals to this process."""
        return self._counters[kind, process].data_ptr()

    def _remote_counter(self, kind: int, process: int) -> int:
        """Address, on ``process``, of the counter that this process signals."""
        return self._twin(self._counters, process)[kind, self.ring.rank].data_ptr()

    def allocate(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        free = self._free[tuple(shape), dtype]
        return free.pop() if free else self._make(tuple(shape), dtype)

    def release(self, buffer: Tensor) -> None:
        self._free[tuple(buffer.shape), buffer.dtype].append(buffer)

    def post(self, sends: list[Message], receives: list[Message], note: Note) -> Any:
        compute = torch.cuda.current_stream(self.device)
        expected: dict[int, int] = {}
        for m in receives:  # in stream order: the buffer's last use lies before, so the neighbour may write it
            self._posted[m.process] += 1
            expected[m.process] = self._posted[m.process]
        for process, count in expected.items():
            _stream_op("cuStreamWriteValue32_v2", compute, self._remote_counter(READY, process), count)
        self._stream.wait_stream(compute)
        with torch.cuda.stream(self._stream):
            for m in sends:
                self._sent[m.process] += 1
                _stream_op("cuStreamWaitValue32_v2", self._stream, self._counter(READY, m.process), self._sent[m.process])
                self._twin(m.twin, m.process)[m.rows].copy_(m.payload, non_blocking=True)
                _stream_op("cuStreamWriteValue32_v2", self._stream, self._remote_counter(ARRIVED, m.process), self._sent[m.process])
            done = self._stream.record_event()
        return expected, done

    def wait(self, ticket: Any) -> None:
        expected, done = ticket
        compute = torch.cuda.current_stream(self.device)
        for process, count in expected.items():
            _stream_op("cuStreamWaitValue32_v2", compute, self._counter(ARRIVED, process), count)
        compute.wait_event(done)
        watch_of(self.ring).enqueued(compute.record_event())
