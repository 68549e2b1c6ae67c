"""Trust: before the first transfer all processes of a ring compare what they were given, and in debug mode every message is checked.

:func:`agree` costs one small all-gather for each new signature (shapes, dtypes, layout, masks, kernel) and a set look-up afterwards.
:func:`enable_checks` puts a :class:`CheckedTransport` round the ring's transport: each message is announced by a header that the
receiver compares with what it expects *before* it posts the receive (a message of another size would crash the process inside gloo),
and its bytes are summed on both sides, which shows a buffer that was written while it travelled. It is slow: use it to find a fault.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ringattn.ring.hang import Watch, guard, watch_of
from ringattn.ring.ring import Ring
from ringattn.ring.schedule import Schedule
from ringattn.ring.transport import Message, Note, Transport, outer_transport_of, transport_of

MAX_AGREED = 4096


def agree_on(
    schedule: Schedule, q: Tensor, k: Tensor, sinks: Tensor | None, scale: float, softcap: float, kernel: str, deterministic: bool,
) -> None:
    """All processes of the schedule's ring check that they run the same attention; :func:`agree` for the ops.

    q [B, S / P, H, D], k [B, S / P, Hkv, D], sinks [H]. Raises RingError on every rank, naming which rank differs in what.
    """
    ring = schedule.ring
    if ring.processes == 1:
        return
    agreed, content = watch_of(ring).agreed, _content(schedule)
    key = (content, q.shape, k.shape, q.dtype, sinks is None, scale, softcap, kernel, deterministic, _name(ring))
    if key in agreed:
        return
    agree(ring, {
        "q": f"{[*q.shape]}", "k and v": f"{[*k.shape]}", "dtype": str(q.dtype).removeprefix("torch."), "layout": f"{schedule.layout.key}",
        "masks and exchange": content, "scale": f"{scale}", "softcap": f"{softcap}", "sinks": "no" if sinks is None else "yes",
        "kernel": kernel, "deterministic": f"{deterministic}", "transport": _name(ring), "passes before": f"{ring.passes}",
    })
    if len(agreed) >= MAX_AGREED:
        agreed.clear()  # on all ranks at the same call
    agreed.add(key)


def agree(ring: Ring, signature: Mapping[str, str]) -> None:
    """Compare ``signature`` with those of the ring's other processes. A collective call.

    Raises RingError on every rank, naming which rank differs in what; or, if a rank does not take part, after the timeout.
    """
    watch = watch_of(ring)
    note = Note(ring.passes, "forward", 0, "its inputs (" + ", ".join(f"{k} {v}" for k, v in list(signature.items())[:5]) + ")")
    everyone = range(ring.processes)
    if not watch.met:
        with guard(ring, "comparing", note, everyone, everyone):
            _meet(watch, ring)
    digest = hashlib.sha256(json.dumps(dict(signature)).encode()).digest()
    assert ring.group is not None
    on_cpu = torch.device("cpu") in ring.group._device_types  # otherwise NCCL alone
    own = torch.tensor([int.from_bytes(digest[:7])], device="cpu" if on_cpu else "cuda")
    table = [torch.empty_like(own) for _ in everyone]
    with guard(ring, "comparing", note, everyone, everyone):
        work = dist.all_gather(table, own, group=ring.group, async_op=True)
        assert work is not None
        watch.finish([work], torch.device("cpu"))  # the host waits, on a GPU too
        if len({int(x) for x in table}) == 1:
            return
        watch.compared += 1
        found = _exchange(watch, f"differs/{watch.compared}", dict(signature))
    differing = {k: _odd_ones({rank: s.get(k, "none") for rank, s in found.items()}) for k in signature}
    lines = [f"  {k}: {text}" for k, text in differing.items() if text]
    raise watch.found("\n".join([f"the ranks of this ring were given different inputs for pass {ring.passes + 1}:", *lines]))


def _meet(watch: Watch, ring: Ring) -> None:
    """The first comparison goes through the store: it works even where process groups are connected the wrong way round."""
    assert ring.group is not None
    own = {"process group": ring.group.group_name, "virtual": str(ring.virtual), "inner": str(ring.inner), "torch": torch.__version__}
    found = _exchange(watch, "met", own)
    differing = {k: _odd_ones({rank: s[k] for rank, s in found.items()}) for k in found[watch.rank]}
    lines = [f"  {k}: {text}" for k, text in differing.items() if text]
    if lines:
        hint = "\nprocess groups must be built in the same order on every rank" if differing["process group"] else ""
        raise watch.found("\n".join(["the ranks of this ring have set it up differently:", *lines]) + hint)
    watch.met = True


def _exchange(watch: Watch, name: str, own: dict[str, str]) -> dict[int, dict[str, str]]:
    """What each rank says, through the store. Raises RuntimeError naming the ranks that say nothing in time."""
    keys = {rank: f"{watch.prefix}/{name}/{rank}" for rank in watch.ranks}
    watch.store.set(keys[watch.rank], json.dumps(own))
    try:
        watch.store.wait([*keys.values()], watch.patience)
    except RuntimeError as error:
        missing = [rank for rank, key in keys.items() if not watch.store.check([key])]
        raise RuntimeError(f"ranks {missing} did not come to compare inputs") from error
    return {rank: json.loads(watch.store.get(key)) for rank, key in keys.items()}


def _odd_ones(values: Mapping[int, str]) -> str:
    """E.g. ``4 on rank 1, but 8 on ranks 0, 2``; empty if all are equal. The commonest value comes last."""
    counts = Counter(values.values()).most_common()
    if len(counts) == 1:
        return ""
    parts = []
    for value, _ in reversed(counts):
        ranks = [str(rank) for rank, v in values.items() if v == value]
        parts.append(f"{value} on rank{'s' * (len(ranks) > 1)} {', '.join(ranks)}")
    return ", ".join(parts[:-1]) + ", but " + parts[-1]


def _content(schedule: Schedule) -> str:
    """A short digest of layout, masks and exchange: the same on all ranks that were given the same."""
    contents = watch_of(schedule.ring).contents
    if schedule not in contents:
        key = next((k for k, s in schedule.ring.schedules.items() if s is schedule), None)
        plan = (schedule.offsets, schedule.kv, schedule.dkv, schedule.carry, schedule.pairs, schedule.exchange)
        what = plan if key is None else [x for x in key if not isinstance(x, torch.device)]
        contents[schedule] = hashlib.sha256(repr((schedule.layout.key, what)).encode()).hexdigest()[:12]
    return contents[schedule]


def _name(ring: Ring) -> str:
    transport = transport_of(ring)
    return getattr(transport, "name", type(transport).__name__)


def enable_checks(ring: Ring) -> Ring:
    """Debug mode: check every message of this ring from now on. Every process of the ring calls it, between two passes."""
    if not isinstance(transport_of(ring), CheckedTransport):
        ring.transport = CheckedTransport(ring, transport_of(ring))
        if ring.inner is not None:
            ring.outer_transport = CheckedTransport(ring, outer_transport_of(ring))
    return ring


FIELDS = ("pass", "direction", "hop", "what", "sender", "first row", "rows", "row shape", "dtype")


class CheckedTransport:
    """Wraps a transport: a header [1, len(FIELDS) + 1] int64 goes before every message and is checked on arrival."""

    def __init__(self, ring: Ring, inner: Transport) -> None:
        self.ring, self.inner, self.name = ring, inner, f"checked {type(inner).__name__}"
        self._boxes: list[tuple[Tensor, Tensor]] = []  # (leaving, arriving) header of the i-th message

    def allocate(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        return self.inner.allocate(shape, dtype, device)

    def release(self, buffer: Tensor) -> None:
        self.inner.release(buffer)

    def post(self, sends: list[Message], receives: list[Message], note: Note) -> Any:
        device = receives[0].buffer.device if receives else None
        while len(self._boxes) < len(receives):  # as many sends as receives: a step is a permutation
            assert device is not None
            leaving, arriving = (self.inner.allocate((1, len(FIELDS) + 1), torch.int64, device) for _ in range(2))
            self._boxes.append((leaving, arriving))
        first = slice(0, 1)
        announced, expected = [], []
        for i, m in enumerate(sends):
            self._boxes[i][0].copy_(torch.tensor([[*_header(m, note, self.ring.rank), _byte_sum(m.payload)]]))
            twin = next(j for j, r in enumerate(receives) if r.buffer is m.twin)
            announced.append(Message(self._boxes[i][0], first, m.process, self._boxes[twin][1]))
        for i, m in enumerate(receives):
            expected.append(Message(self._boxes[i][1], first, m.process, self._boxes[i][1]))
        self.inner.wait(self.inner.post(announced, expected, note))
        sums = []
        for (_, box), m in zip(self._boxes, receives, strict=False):
            *came, byte_sum = box[0].tolist()
            self._compare(_header(m, note, m.process), came, note, m.process)
            sums.append(byte_sum)
        return self.inner.post(sends, receives, note), receives, sums, note

    def wait(self, ticket: Any) -> None:
        inner, receives, sums, note = ticket
        self.inner.wait(inner)
        for m, byte_sum in zip(receives, sums, strict=True):
            if _byte_sum(m.payload) != byte_sum:
                raise self._found(note, m.process, "its bytes changed on the way: a buffer was written before its transfer was over")

    def _compare(self, expected: list[int], came: list[int], note: Note, process: int) -> None:
        wrong = [
            f"{name} {_word(name, b)} came, {_word(name, a)} was expected"
            for name, a, b in zip(FIELDS, expected, came, strict=True) if a != b
        ]
        if wrong:
            raise self._found(note, process, "; ".join(wrong))

    def _found(self, note: Note, process: int, what: str) -> RuntimeError:
        watch = watch_of(self.ring)
        place = f"pass {note.number} ({note.direction}), hop {note.hop}"
        return watch.found(f"rank {watch.rank}, {place}: wrong {note.what} message from rank {watch.ranks[process]}: {what}")


def _header(m: Message, note: Note, sender: int) -> list[int]:
    """Numbers for FIELDS."""
    rows = m.rows.stop - m.rows.start
    words = (note.direction, note.what, repr(tuple(m.buffer.shape[1:])), str(m.buffer.dtype))
    direction, what, shape, dtype = (zlib.crc32(w.encode()) for w in words)
    return [note.number, direction, note.hop, what, sender, m.rows.start, rows, shape, dtype]


_PLAIN = ("forward", "backward", "kv", "dkv", "outer kv", "outer dkv")
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_WORDS = {zlib.crc32(w.encode()): w.removeprefix("torch.") for w in (*_PLAIN, *map(str, _DTYPES))}


def _word(field: str, value: int) -> str:
    """A header's number for people to read."""
    if field in ("direction", "what", "dtype"):
        return _WORDS.get(value, str(value))
    return f"no. {value:08x}" if field == "row shape" else str(value)


def _byte_sum(x: Tensor) -> int:
    """Sum of all bytes of a contiguous tensor."""
    return int(x.reshape(-1).view(torch.uint8).sum(dtype=torch.int64)) if x.numel() else 0
