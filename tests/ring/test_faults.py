"""Faults: a killed, frozen, stuck or delayed rank, inputs that differ between ranks, process groups in another order.

Never a wrong number, never a silent hang: every rank ends within the process group's timeout, and its message names the cause.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import pickle
import random
import re
import signal
import socket
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from oracle import make_qkv

from ringattn import Layout, Ring, ring_attention
from ringattn.ring.hang import RingError
from ringattn.ring.transport import PointToPoint

pytestmark = pytest.mark.ring
TIMEOUT_S, PATIENCE_S = 5.0, 20.0  # the second: for a machine that is busy with other things
WORLD, VICTIM = 3, 1
OTHERS, ALL = (0, 2), (0, 1, 2)


class Bomb(PointToPoint):
    """Does ``action`` on the victim's rank when it posts (or waits for) the message of a given direction, hop and content."""

    def __init__(self, ring: Ring, action: Any, direction: str, hop: int, what: str, moment: str = "post") -> None:
        super().__init__(ring)
        self.action, self.where, self.moment = action, (direction, hop, what), moment

    def post(self, sends, receives, note):
        if self.moment == "post":
            self.strike(note)
        return super().post(sends, receives, note), note

    def wait(self, ticket):
        works, note = ticket
        if self.moment == "wait":
            self.strike(note)
        super().wait(works)

    def strike(self, note):
        if dist.get_rank() == VICTIM and (note.direction, note.hop, note.what) == self.where:
            self.action()


def attention(ring: Ring, tensors: list[torch.Tensor], **mask: Any) -> list[torch.Tensor]:
    """out, dq, dk, dv of this process's rows, twice."""
    layout = Layout("zigzag", tensors[0].shape[1], ring.size)
    for _ in range(2):
        q, k, v, dout = (layout.shard(x, ring) for x in tensors)
        for x in (q, k, v):
            x.requires_grad_()
        out = ring_attention(q, k, v, ring=ring, layout=layout, **mask)
        results = [out.detach(), *torch.autograd.grad(out, (q, k, v), dout)]
    return results


def freeze() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def vanish() -> None:
    os._exit(3)


def oversleep() -> None:
    time.sleep(60)


def bomb(tensors, *plan):
    ring = Ring()
    ring.transport = Bomb(ring, *plan)
    return attention(ring, tensors)


def bomb_between_nodes(tensors, *plan):
    """Every rank is a node of its own, so all messages go between nodes."""
    far = dist.new_group(list(range(WORLD)), timeout=timedelta(seconds=TIMEOUT_S))
    ring = Ring(inner=1, outer_group=far)
    ring.outer_transport = Bomb(ring, *plan)
    ring.outer_transport.group = far
    return attention(ring, tensors)


def late(tensors):
    """Never comes to the second call."""
    ring, rank = Ring(), dist.get_rank()
    attention(ring, tensors)
    if rank == VICTIM:
        oversleep()
    return attention(ring, tensors)


def jitter(tensors, seed):
    """Random delays before every message, on every rank."""
    ring, draw = Ring(), random.Random(seed + dist.get_rank())
    post = PointToPoint.post
    transport = PointToPoint(ring)
    transport.post = lambda *args: time.sleep(draw.random() * 0.02) or post(transport, *args)  # type: ignore[method-assign]
    ring.transport = transport
    return attention(ring, tensors)


def other_length(tensors, first_calls):
    """One rank gets a shorter sequence, in the first call or in a later one."""
    ring = Ring()
    for _ in range(first_calls):
        attention(ring, tensors)
    return attention(ring, [x[:, : 16 * WORLD] if dist.get_rank() == VICTIM else x for x in tensors])


def other_documents(tensors):
    """One rank gets other documents, which need the same transfers."""
    documents = torch.zeros(tensors[0].shape[1], dtype=torch.int64)
    documents[30 + dist.get_rank() // 2 :] = 1
    return attention(Ring(), tensors, documents=documents)


def other_scale(tensors):
    return attention(Ring(), tensors, scale=0.5 if dist.get_rank() == VICTIM else 0.25)


def other_order(tensors):
    """Two groups of the same ranks, built in another order on one of them: each is connected to the other's twin."""
    members = list(range(WORLD))
    first, second = dist.new_group(members), dist.new_group(members)
    return attention(Ring(second if dist.get_rank() == VICTIM else first), tensors)


def extra_pass(tensors):
    """One rank attends once more than the others."""
    ring = Ring()
    attention(ring, tensors)
    if dist.get_rank() == VICTIM:
        with torch.no_grad():
            layout = Layout("zigzag", tensors[0].shape[1], ring.size)
            ring_attention(*(layout.shard(x, ring) for x in tensors[:3]), ring=ring, layout=layout)
        return None
    return attention(ring, tensors, window=5)


def unrelated_error(tensors):
    """The victim meets an error of its own between two passes, and its process ends by it."""
    ring = Ring()
    attention(ring, tensors)
    if dist.get_rank() == VICTIM:
        sys.last_value = ValueError("no such file")  # what the interpreter does before it calls the exit handlers
        atexit._run_exitfuncs()
        os._exit(1)
    return attention(ring, tensors)


def gathered_death(tensors):
    """The all-gather exchange: the victim dies before its second backward pass."""
    ring = Ring()
    layout = Layout("zigzag", tensors[0].shape[1], ring.size)
    local = [layout.shard(x, ring).requires_grad_() for x in tensors[:3]]
    out = ring_attention(*local, ring=ring, layout=layout, exchange="allgather")
    if dist.get_rank() == VICTIM:
        vanish()
    return torch.autograd.grad(out.sum(), local)


def run_case(rank: int, folder: str, tcp_port: int | None, function: Any, args: tuple) -> None:
    torch.set_num_threads(1)
    if tcp_port is None:
        store: Any = dist.FileStore(f"{folder}/store", WORLD)
    else:  # served by the victim
        store = dist.TCPStore("127.0.0.1", tcp_port, WORLD, rank == VICTIM, timedelta(seconds=20))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD, timeout=timedelta(seconds=TIMEOUT_S))
    started = time.monotonic()
    try:
        outcome = ("result", function(*args))
    except RingError as error:
        outcome = ("RingError", str(error))
    except Exception as error:
        outcome = (type(error).__name__, str(error))
    Path(f"{folder}/{rank}.part").write_bytes(pickle.dumps((*outcome, time.monotonic() - started)))
    os.rename(f"{folder}/{rank}.part", f"{folder}/{rank}")
    os._exit(0)  # a closed connection is all that the others see of it


@pytest.fixture(scope="module")
def context():
    """Processes are forked from one that has imported everything and started nothing: a case costs no import."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "ringattn.ring.attention", "test_faults"])
    return context


def run(context, function, *args, survivors=OTHERS, limit_s=TIMEOUT_S + PATIENCE_S, tcp_port=None) -> list[tuple[str, Any, float] | None]:
    """(kind, value, seconds) of each rank, None for one that said nothing; waits for the survivors only."""
    with tempfile.TemporaryDirectory() as folder:
        processes = [context.Process(target=run_case, args=(rank, folder, tcp_port, function, args)) for rank in range(WORLD)]
        for process in processes:
            process.start()
        deadline = time.monotonic() + limit_s
        try:
            while time.monotonic() < deadline:
                if not any(processes[rank].is_alive() and not Path(f"{folder}/{rank}").exists() for rank in survivors):
                    break
                time.sleep(0.02)
        finally:
            for process in processes:
                process.kill()
                process.join()
        paths = [Path(f"{folder}/{rank}") for rank in range(WORLD)]
        return [pickle.loads(path.read_bytes()) if path.exists() else None for path in paths]


@pytest.fixture
def tensors():
    return [x.detach() for x in make_qkv(1, 32 * WORLD, 2, 1, 16, torch.float32)]


def assert_reported(outcomes, *patterns, survivors=OTHERS, at_once=False) -> None:
    """Each survivor raised a RingError with all patterns in it, having waited no longer than the timeout (run() waited for them)."""
    for rank in survivors:
        assert outcomes[rank] is not None, f"rank {rank} hangs"
        kind, message, seconds = outcomes[rank]
        assert kind == "RingError", f"rank {rank}: {kind} {message}"
        waited = re.search(r"gave up after ([0-9.]+) s of at most ([0-9.]+) s", message)
        assert seconds < TIMEOUT_S + PATIENCE_S, f"rank {rank} took {seconds:.1f} s"
        assert not waited or (not at_once and float(waited[1]) < TIMEOUT_S), f"rank {rank} waited:\n{message}"
        for pattern in patterns:
            assert re.search(pattern, message), f"rank {rank}'s message has no {pattern!r}:\n{message}"


DEATHS = [
    (kill, "forward", 1, "kv"), (vanish, "forward", 2, "kv"), (kill, "backward", 1, "kv"), (vanish, "backward", 2, "kv"),
    (kill, "backward", 1, "dkv"), (vanish, "backward", 2, "dkv"), (kill, "forward", 2, "kv", "wait"),
    (vanish, "backward", 2, "dkv", "wait"),
]


@pytest.mark.parametrize("death", DEATHS, ids=lambda d: " ".join(map(str, (d[0].__name__, *d[1:]))))
def test_a_dead_rank_is_named_by_all_others(context, tensors, death):
    outcomes = run(context, bomb, tensors, *death)
    assert outcomes[VICTIM] is None
    place = r"rank [02], pass \d \((forward|backward)\), hop [12]: (waiting for|posting) d?kv from rank \d and to rank \d"
    assert_reported(outcomes, place, "Likely cause: rank 1: dead or frozen", "rank 1: no sign of life")


@pytest.mark.parametrize("death", [(kill, "forward", 1, "outer kv"), (vanish, "backward", 1, "outer dkv", "wait")], ids=["kv", "dkv"])
def test_a_rank_that_dies_between_nodes_is_named(context, tensors, death):
    outcomes = run(context, bomb_between_nodes, tensors, *death)
    place = r"rank [02], pass \d \((forward|backward)\), hop [12]: (waiting for|posting) outer d?kv from rank \d and to rank \d"
    assert_reported(outcomes, place, "Likely cause: rank 1: dead or frozen", "rank 1: no sign of life")


def test_a_rank_that_is_stuck_between_nodes_says_where(context, tensors):
    outcomes = run(context, bomb_between_nodes, tensors, oversleep, "backward", 1, "outer dkv")
    assert_reported(outcomes, r"rank 1: pass 2 \(backward\), hop 1: posting outer dkv from rank 0 and to rank 2", "Likely cause: rank 1")


def test_a_frozen_rank_is_named_within_the_timeout(context, tensors):
    outcomes = run(context, bomb, tensors, freeze, "forward", 2, "kv")
    assert_reported(outcomes, "Likely cause: rank 1: dead or frozen", "hop 2: waiting for kv")


def test_a_stuck_rank_says_where_it_is(context, tensors):
    outcomes = run(context, bomb, tensors, oversleep, "backward", 1, "dkv")
    assert_reported(outcomes, r"rank 1: pass 2 \(backward\), hop 1: posting dkv from rank 0 and to rank 2", "Likely cause: rank 1")


def test_a_rank_that_does_not_come_is_named(context, tensors):
    words = r"rank 1: not in a transfer; its last one \(dkv .*, pass 4 \(backward\), hop 2\) is over"
    assert_reported(run(context, late, tensors), words, "Likely cause: rank 1: it has not come")


def test_a_process_that_ends_by_its_own_error_says_so(context, tensors):
    outcomes = run(context, unrelated_error, tensors)
    assert_reported(outcomes, r"rank 1: .*its process ended \(ValueError: no such file\)", "Likely cause: rank 1: its process ended")


def test_death_in_the_all_gather_exchange(context, tensors):
    assert_reported(run(context, gathered_death, tensors), "gathered kv", "Likely cause: rank 1: dead or frozen")


@pytest.mark.parametrize("action", [kill, freeze])
def test_death_of_the_rank_that_serves_the_store(context, tensors, action):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    outcomes = run(context, bomb, tensors, action, "backward", 1, "kv", tcp_port=port)
    assert_reported(outcomes, r"hop 1: (waiting for|posting) kv", "Likely cause: the process that serves the store")


def test_random_delays_change_nothing(context, tensors, rng):
    outcomes = run(context, jitter, tensors, int(rng.integers(1 << 30)), survivors=ALL)
    ring, layout = Ring(virtual=WORLD), Layout("zigzag", tensors[0].shape[1], WORLD)
    local = [layout.shard(x, ring).requires_grad_() for x in tensors[:3]]
    out = ring_attention(*local, ring=ring, layout=layout)
    gold = [out.detach(), *torch.autograd.grad(out, local, layout.shard(tensors[3], ring))]
    for rank, outcome in enumerate(outcomes):
        assert outcome is not None and outcome[0] == "result", outcome
        for got, whole in zip(outcome[1], gold, strict=True):
            assert torch.equal(got, whole.chunk(WORLD, 1)[rank])


def test_other_shapes_are_found_before_the_first_transfer(context, tensors):
    outcomes = run(context, other_length, tensors, 0, survivors=ALL)
    words = [rf"{what}.* on rank 1, but .* on ranks 0, 2" for what in (r"q: \[1, 16", r"layout: \('zigzag', 48")]
    assert_reported(outcomes, "different inputs for pass 1", *words, survivors=ALL, at_once=True)


def test_other_shapes_in_a_later_call_end_within_the_timeout(context, tensors):
    """The others have compared their inputs before, and wait for a transfer that rank 1 does not make."""
    words = r"rank 1: comparing its inputs \(q \[1, 16, 2, 16\].* before pass 5"
    assert_reported(run(context, other_length, tensors, 1, survivors=ALL), words, "Likely cause: rank 1 in another pass", survivors=ALL)


@pytest.mark.parametrize(
    "case, words", [(other_documents, "masks and exchange: .* on rank 2, but .* on ranks 0, 1"), (other_scale, "scale: 0.5 on rank 1")]
)
def test_other_inputs_with_equal_transfers_are_found(context, tensors, case, words):
    assert_reported(run(context, case, tensors, survivors=ALL), words, survivors=ALL, at_once=True)


def test_groups_built_in_another_order_are_found(context, tensors):
    words = "process group: .* on rank 1, but .* on ranks 0, 2", "built in the same order"
    assert_reported(run(context, other_order, tensors, survivors=ALL), *words, survivors=ALL, at_once=True)


def test_an_extra_pass_of_one_rank_ends_within_the_timeout(context, tensors):
    assert_reported(run(context, extra_pass, tensors, survivors=ALL), "Likely cause: rank 1 in another pass", survivors=ALL)
