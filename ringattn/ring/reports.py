"""What a process says when a ring stands still: one line a rank, the rank to look at first, and NCCL's flight recorder."""

from __future__ import annotations

import pickle
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any

import torch

# The first of these states that some rank is in names the cause.
SUSPECTS = {
    "found": "it found what its line says", "ended": "its process ended", "idle": "it has not come to this transfer",
    "computing": "it has not finished computing", "posting": "it is stuck in posting a transfer",
}


def summary(everyone: Mapping[int, Mapping[str, Any] | None]) -> tuple[list[str], str]:
    """A line a rank, and whom to look at first. ``everyone``: each rank's note (``state``, ``text``, ``place``), None if silent."""
    lines = [f"  rank {rank}: {r['text'] if r else 'no sign of life'}" for rank, r in everyone.items()]
    known = {rank: r for rank, r in everyone.items() if r}
    if silent := [rank for rank, r in everyone.items() if r is None]:
        return lines, f"{names(silent)}: dead or frozen, or out of reach"
    for state, words in SUSPECTS.items():
        if ranks := [rank for rank, r in known.items() if r["state"] == state]:
            return lines, f"{names(ranks)}: {words}"
    places = {rank: tuple(r["place"]) for rank, r in known.items()}
    common, _ = Counter(places.values()).most_common(1)[0]
    if odd := [rank for rank, place in places.items() if place != common]:
        return lines, f"{names(odd)} in another pass than the others: a call that the others did not make, or inputs that differ"
    return lines, "all ranks wait at the same place: what they sent does not arrive (network, or process groups that differ)"


def flight_recorder() -> str:
    """NCCL's flight recorder: the transfers that this process has begun and not finished, one a line (if the recorder is on)."""
    dump = getattr(torch._C._distributed_c10d, "_dump_nccl_trace", None)
    if dump is None:
        return "NCCL flight recorder: not in this build of torch"
    try:
        entries = pickle.loads(dump(onlyActive=True)).get("entries", [])
    except (RuntimeError, TypeError, pickle.UnpicklingError) as error:
        return f"NCCL flight recorder: {error}"
    if not entries:
        return "NCCL flight recorder: empty (TORCH_NCCL_TRACE_BUFFER_SIZE=2000 turns it on)"
    keys = ("profiling_name", "state", "process_group", "collective_seq_id", "p2p_seq_id", "input_sizes", "output_sizes")
    return "\n".join(["NCCL flight recorder, not finished:", *(f"  { {k: e[k] for k in keys if k in e} }" for e in entries[:8])])


def within(limit_s: float, fn: Callable[[], Any]) -> tuple[bool, Any]:
    """(True, fn()), or (False, None) if it fails or takes longer: a store whose host is frozen never answers."""
    result: list[Any] = []

    def run() -> None:
        with suppress(RuntimeError, ValueError):
            result.append(fn())

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(limit_s)
    return (True, result[0]) if result else (False, None)


def names(ranks: Iterable[int]) -> str:
    """E.g. ``ranks 1, 2``."""
    ranks = list(ranks)
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
