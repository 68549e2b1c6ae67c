"""When a peer dies or gets stuck: every process of the ring ends within the process group's timeout, with one message that says
where it stood, what each of the others was doing, and which rank to look at first.

While a process moves along, its :class:`Watch` costs one assignment a transfer. A thread of it looks now and then; only when nothing has
happened for a while does it write what the process is doing into the process group's store. Who gives up reads the others' notes there.

CPU (gloo): waits are bounded, failures become :class:`RingError`. GPU (NCCL): the host only enqueues, so the thread looks for transfers
that the GPU does not finish, prints the message in time, and leaves the end of the process to NCCL's own watchdog; should that be
switched off, the thread ends the process a little later.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import os
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ringattn.ring.reports import flight_recorder, names, summary, within
from ringattn.ring.ring import Ring

STORE_GONE = "the process that serves the store (rank 0 or the launcher) is dead or frozen"


class RingError(RuntimeError):
    """A transfer or a comparison of the ring failed; the message names the ranks, the pass, the hop, the direction and the cause."""


class Doing(NamedTuple):
    """What a process does in the ring, put into words only when somebody asks."""

    state: str  # posting | computing | waiting | comparing | idle
    note: Any  # the transport's Note of the latest transfer, None before the first
    to: Sequence[int]  # processes of the ring
    origin: Sequence[int]
    ranks: Sequence[int]  # their ranks in the default group
    since: float  # time.monotonic()

    @property
    def place(self) -> list[Any]:
        """Equal for processes that make the same call."""
        return [self.note.number, self.note.direction, self.state == "comparing"] if self.note else []

    def __str__(self) -> str:
        if self.note is None:
            return "not yet in a transfer"
        number, direction, hop, what = self.note
        ends = (("from", self.origin), ("to", self.to))
        peers = " and ".join(f"{word} {names(dict.fromkeys(self.ranks[p] for p in side))}" for word, side in ends if side)
        where = f"pass {number} ({direction}), hop {hop}"
        match self.state:
            case "comparing":
                return f"comparing {what} with the other ranks before pass {number + 1}"
            case "idle":
                return f"not in a transfer; its last one ({what} {peers}, {where}) is over"
            case "computing":
                return f"{where}: computing, while {what} travels {peers}"
            case "waiting":
                return f"{where}: waiting for {what} {peers}"
            case _:
                return f"{where}: {self.state} {what} {peers}"


class Watch:
    """This process's view of one ring of several processes: its timeout, what it is doing, and the notes of the others.

    Attributes:
        timeout_s: of the process group (the least of its backends'). ``patience``: how long one wait may last, so that giving up,
            ``grace_s`` of collecting notes included, ends within the timeout.
        doing: the latest :class:`Doing`. gone: how this process left the ring, once it has.
        inflight: what was enqueued on a GPU, and the event after it.
        met, agreed, contents, compared: what the comparisons of watch.py keep. events: free ones of timeline.py.
    """

    def __init__(self, ring: Ring) -> None:
        self.ranks = [ring.global_rank(p) for p in range(ring.processes)]
        self.rank = self.ranks[ring.rank]
        self.timeout_s = group_timeout_s(ring.group)
        self.interval_s = min(2.0, max(0.05, self.timeout_s / 20))
        self.grace_s = 4 * self.interval_s
        self.patience = timedelta(seconds=max(self.timeout_s / 2, self.timeout_s - 1.25 * self.grace_s))
        self.doing = Doing("idle", None, (), (), self.ranks, time.monotonic())
        self.inflight: deque[tuple[Doing, torch.cuda.Event]] = deque(maxlen=4096)
        self.met, self.compared = False, 0
        self.events: list[torch.cuda.Event] = []
        self.agreed: set[Any] = set()
        self.contents: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
        self.gone = ""
        self._count, self._told = 0, False
        store = dist.distributed_c10d._get_default_store()
        if hasattr(store, "clone"):
            store = store.clone()  # a connection of its own: the default one may be blocked in a wait
        self.store = store
        members = hashlib.sha256(repr(self.ranks).encode()).hexdigest()[:12]
        number = self.store.add(f"ringattn/{members}/rings/{self.rank}", 1)  # the same on every rank: rings are used by all or none
        self.prefix = f"ringattn/{members}/{number}"
        stop, ref = threading.Event(), weakref.ref(self)
        thread = threading.Thread(target=_look, args=(ref, stop, self.interval_s), name="ringattn-watch", daemon=True)
        last_words = partial(_last_words, ref, stop, thread)
        atexit.register(last_words)
        weakref.finalize(self, _close, stop, last_words)
        thread.start()

    def finish(self, works: Iterable[dist.Work], device: torch.device) -> None:
        """Wait for all: on a GPU in stream order, else on the host. Raises RuntimeError (see :class:`guard`) where one fails, or all
        together take too long."""
        if device.type == "cuda":
            for work in works:
                work.wait()
            self.enqueued(torch.cuda.current_stream(device).record_event())
            return
        deadline = time.monotonic() + self.patience.total_seconds()
        for work in works:
            work.wait(timedelta(seconds=max(0.001, deadline - time.monotonic())))

    def enqueued(self, passed: torch.cuda.Event) -> None:
        """A GPU will wait for the latest ``doing``; ``passed`` is recorded after that."""
        self.inflight.append((self.doing, passed))

    def give_up(self, doing: Doing, reason: BaseException | str) -> RingError:
        """The error to raise where ``doing`` did not come to its end. Takes up to ``grace_s``, to hear from the others."""
        first_sentence = str(reason).strip().split("\n")[0].split(". ")[0]
        self.gone = f"gave up after {time.monotonic() - doing.since:.1f} s"
        head = f"rank {self.rank}, {doing}: {self.gone} of at most {self.timeout_s:.1f} s ({first_sentence})"
        in_time, news = within(1.25 * self.grace_s, partial(self._collect, doing))
        own = {"state": "gave up", "text": f"{doing}; {self.gone}", "place": doing.place}
        lines, cause = ["  unknown: the process group's store does not answer"], STORE_GONE
        if in_time:
            lines, cause = summary({rank: own if rank == self.rank else news.get(rank) for rank in self.ranks})
        return RingError("\n".join([head, f"Ring of {names(self.ranks)}:", *lines, f"Likely cause: {cause}"]))

    def found(self, message: str) -> RingError:
        """The error to raise for something that this process has seen to be wrong; the others' reports will quote it."""
        self.gone = f"found: {message.splitlines()[0]}"
        within(1.0, partial(self._publish, "found", self.doing))
        return RingError(message)

    # What follows runs in the thread, or when something has gone wrong.

    def _publish(self, state: str, doing: Doing) -> None:
        self._count += 1
        text = f"{doing}; {self.gone}" if self.gone else f"{doing} (for {time.monotonic() - doing.since:.1f} s)"
        record = {"state": state, "text": text, "place": doing.place, "count": self._count}
        self.store.set(f"{self.prefix}/doing/{self.rank}", json.dumps(record))

    def _collect(self, doing: Doing) -> dict[int, dict[str, Any]]:
        """The others' notes. A rank that still lives renews its note; one that has left says so in its last."""
        self._publish("gave up", doing)
        seen: dict[int, int] = {}
        news: dict[int, dict[str, Any]] = {}
        deadline = time.monotonic() + self.grace_s
        while True:
            for rank in self.ranks:
                key = f"{self.prefix}/doing/{rank}"
                if rank != self.rank and rank not in news and self.store.check([key]):
                    record = json.loads(self.store.get(key))
                    if record["state"] in ("gave up", "found", "ended") or seen.setdefault(rank, record["count"]) != record["count"]:
                        news[rank] = record
            if len(news) == len(self.ranks) - 1 or time.monotonic() > deadline:
                return news
            time.sleep(self.interval_s / 4)

    def _current(self) -> Doing:
        """What a GPU is still waiting for, else what the host is doing."""
        while self.inflight and self.inflight[0][1].query():
            self.inflight.popleft()
        return self.inflight[0][0] if self.inflight else self.doing

    def _tick(self) -> None:
        now = time.monotonic()
        if now - self.doing.since < 2 * self.interval_s:
            return
        doing = self._current()  # asks the GPU only when the host has done nothing for a while
        with suppress(RuntimeError):  # the store may be gone
            self._publish("found" if self.gone.startswith("found") else "gave up" if self.gone else doing.state, doing)
        if not self.inflight:
            return
        waited_s = now - doing.since
        if waited_s > self.patience.total_seconds() and not self._told:
            self._told = True
            print(self.give_up(doing, "its GPU has not got past this"), flight_recorder(), sep="\n", file=sys.stderr, flush=True)
        if waited_s > self.timeout_s + 2 * self.grace_s:
            print(f"rank {self.rank}: ends now, its GPU waits for what cannot come", file=sys.stderr, flush=True)
            os.abort()  # the main thread sits in a CUDA call: no exception can reach it


class guard:
    """``with guard(ring, "waiting", note, to, origin): work.wait()``: the frame around everything that waits for a peer.

    Says what the process is doing, tells the ring's timeline if there is one, and turns a failure into a RingError that tells of all
    ranks. ``to``, ``origin``: processes of the ring; where there are none, it does nothing.
    """

    __slots__ = ("before", "doing", "note", "origin", "ring", "state", "to", "watch")

    def __init__(self, ring: Ring, state: str, note: Any, to: Sequence[int] = (), origin: Sequence[int] = ()) -> None:
        self.ring, self.state, self.note, self.to, self.origin = ring, state, note, to, origin
        self.watch = watch_of(ring) if to or origin else None

    def __enter__(self) -> None:
        watch = self.watch
        if watch is not None:
            self.doing = Doing(self.state, self.note, self.to, self.origin, watch.ranks, time.monotonic())
            self.before, watch.doing, watch.gone = watch.doing, self.doing, ""
            if self.ring.timeline is not None:
                self.ring.timeline.enter(self.state, self.note)

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        watch = self.watch
        if watch is None:
            return
        if error is None:
            if self.state == "comparing":
                watch.doing = self.before._replace(since=time.monotonic())
            else:
                after = "computing" if self.state == "posting" else "idle"
                watch.doing = Doing(after, self.note, self.to, self.origin, watch.ranks, time.monotonic())
            if self.ring.timeline is not None:
                self.ring.timeline.leave(self.state, self.note)
        elif isinstance(error, RuntimeError) and not isinstance(error, RingError):
            raise watch.give_up(self.doing, error) from error


def complete(ring: Ring, note: Any, start: Callable[[], Any], device: torch.device) -> None:
    """Carry out a collective of the whole ring: ``start`` begins it (``async_op=True``) and returns its work."""
    everyone = range(ring.processes)
    with guard(ring, "posting", note, everyone, everyone):
        work = start()
    with guard(ring, "waiting", note, everyone, everyone):
        watch_of(ring).finish([work], device)


def exchange_error(group: dist.ProcessGroup, what: str, error: BaseException) -> RingError:
    """The error to raise for a failed collective of a group that is not a ring's."""
    ranks = dist.get_process_group_ranks(group)
    return RingError(f"rank {dist.get_rank()}: {what} among {names(ranks)} failed or timed out ({str(error).splitlines()[0]})")


def watch_of(ring: Ring) -> Watch:
    """The ring's watch, made at its first use. Only for rings of several processes."""
    if ring.watch is None:
        ring.watch = Watch(ring)
    watch: Watch = ring.watch
    return watch


def group_timeout_s(group: Any) -> float:
    """The least timeout of a process group's backends, which alone know it."""
    options = [getattr(group._get_backend(device), "options", None) for device in group._device_types]
    return min((o._timeout.total_seconds() for o in options if o is not None), default=1800.0)


def _look(ref: weakref.ref[Watch], stop: threading.Event, interval_s: float) -> None:
    """The thread. It holds no reference while it sleeps, so a ring that nobody uses any more takes its watch with it."""
    while not stop.wait(interval_s):
        watch = ref()
        if watch is None or not dist.is_initialized():
            return
        watch._tick()
        del watch
    watch = ref()
    if watch is not None and watch.gone:
        with suppress(RuntimeError):
            watch._publish("ended", watch.doing)


def _last_words(ref: weakref.ref[Watch], stop: threading.Event, thread: threading.Thread) -> None:
    """At the interpreter's exit: end the thread, which must not be inside the store by then, and have it say so, unless the process
    group was closed in good order or the process has given up before."""
    watch = ref()
    if watch is not None:
        error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
        if dist.is_initialized() and not watch.gone:
            watch.gone = "its process ended" + (f" ({type(error).__name__}: {error})" if error else "")
        else:
            watch.gone = ""
    stop.set()
    thread.join(2.0)


def _close(stop: threading.Event, last_words: Callable[[], None]) -> None:
    stop.set()
    atexit.unregister(last_words)
