"""Exposed communication: how long computation stood still for transfers, measured hop by hop while one asks for it.

A transfer's window runs from its post to the moment its data may be used; the exposed part is the end of it, in which the device (a GPU's
stream, on a CPU the host) had nothing to do but wait. What is hidden is the rest: ``comm_hidden_pct`` is 100 * (1 - exposed / windows), 100
where nothing was sent. Between devices only event records are enqueued (a few microseconds a hop); they are read when asked for.

Moves between virtual shards of one process are no transfers and take no time.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from ringattn.ring.hang import watch_of
from ringattn.ring.ring import Ring
from ringattn.ring.transport import Note

Mark = Any  # seconds of time.perf_counter() on the host, or a torch.cuda.Event


class Span(NamedTuple):
    """One transfer of this process, in milliseconds since the measurement began: posted, waited for, usable."""

    note: Note
    posted_ms: float
    waited_ms: float
    usable_ms: float

    @property
    def exposed_ms(self) -> float:
        """How long computation stood still for it."""
        return self.usable_ms - self.waited_ms

    @property
    def window_ms(self) -> float:
        """From its post until its data could be used."""
        return self.usable_ms - self.posted_ms


class Timeline:
    """What :func:`measure` hands out. ``enter`` and ``leave`` are called around each post and wait of the ring."""

    def __init__(self, device: torch.device, events: list[torch.cuda.Event]) -> None:
        self.device = device
        self._events = events  # free ones, kept from step to step
        self._posted: dict[Note, Mark] = {}
        self._waiting: Mark = None
        self._marks: list[tuple[Note, Mark, Mark, Mark]] = []
        self._spans: list[Span] = []
        self._start = self._mark()

    def _mark(self) -> Mark:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = self._events.pop() if self._events else torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def enter(self, state: str, note: Note) -> None:
        """Before a post or a wait."""
        if state == "posting":
            self._posted[note] = self._mark()
        elif state == "waiting":
            self._waiting = self._mark()

    def leave(self, state: str, note: Note) -> None:
        """After it."""
        if state == "waiting" and note in self._posted:
            self._marks.append((note, self._posted.pop(note), self._waiting, self._mark()))

    def now_ms(self) -> float:
        """Milliseconds since the measurement began, up to the work enqueued so far. Waits for the GPU."""
        mark = self._mark()
        if self.device.type == "cuda":
            mark.synchronize()
        return self._since_start_ms(mark)

    def spans(self) -> list[Span]:
        """All transfers so far that are over, in the order of their waits. Waits for the GPU."""
        marks, self._marks = self._marks, []
        if marks and self.device.type == "cuda":
            marks[-1][3].synchronize()
        for note, *times in marks:
            self._spans.append(Span(note, *(self._since_start_ms(t) for t in times)))
            if self.device.type == "cuda":
                self._events.extend(times)
        return self._spans

    def _since_start_ms(self, mark: Mark) -> float:
        return self._start.elapsed_time(mark) if self.device.type == "cuda" else (mark - self._start) * 1e3

    def totals(self) -> tuple[float, float]:
        """Exposed milliseconds of this process, and those of its transfers' windows. Waits for the GPU."""
        spans = self.spans()
        return sum(s.exposed_ms for s in spans), sum(s.window_ms for s in spans)

    def summary(self) -> dict[str, float]:
        """``comm_exposed_ms`` of this process, and ``comm_hidden_pct`` of its transfers' windows. Waits for the GPU."""
        exposed, windows = self.totals()
        return {"comm_exposed_ms": exposed, "comm_hidden_pct": hidden_pct(exposed, windows)}


def hidden_pct(exposed_ms: float, windows_ms: float) -> float:
    """How much of the windows was hidden; 100 where nothing was sent."""
    return 100.0 * (1.0 - exposed_ms / windows_ms) if windows_ms else 100.0


@contextmanager
def measure(ring: Ring, device: torch.device | None = None) -> Iterator[Timeline]:
    """Measure the ring's transfers within the block (a step, say). Each process may do so or not, as it likes.

    ``device``: where attention runs; left out, CUDA if this process has used it. For the exchanges ``ring`` and ``allgather``; the
    head exchange of a Ulysses axis is not counted.
    """
    if device is None:
        device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_initialized() else torch.device("cpu")
    timeline = Timeline(device, watch_of(ring).events if ring.processes > 1 else [])
    before, ring.timeline = ring.timeline, timeline
    try:
        yield timeline
    finally:
        ring.timeline = before
