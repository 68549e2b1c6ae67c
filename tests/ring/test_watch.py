"""Checked messages, comparisons before the first transfer, what the reports say, and the measurement of exposed communication."""

from __future__ import annotations

import re
import time

import pytest
import torch
import torch.distributed as dist
from oracle import make_qkv
from processes import run_ranks

from ringattn import Layout, Ring, make_schedule, ring_attention
from ringattn.ring import watch as watching
from ringattn.ring.hang import RingError
from ringattn.ring.reports import flight_recorder
from ringattn.ring.timeline import measure
from ringattn.ring.transport import Note, PointToPoint, transport_of
from ringattn.ring.watch import enable_checks

pytestmark = pytest.mark.ring
P = 2


def attention(ring, tensors, **kwargs):
    """out, dq, dk, dv of this process's rows."""
    layout = Layout("zigzag", tensors[0].shape[1], ring.size)
    q, k, v, dout = (layout.shard(x, ring) for x in tensors)
    for x in (q, k, v):
        x.requires_grad_()
    out = ring_attention(q, k, v, ring=ring, layout=layout, **kwargs)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), dout)]


def error_of(function, *args):
    """The RingError's message, or what came instead."""
    try:
        return function(*args)
    except RingError as error:
        return str(error)


class Liar(PointToPoint):
    """Changes the first message of the second pass on its way out, in one respect. (On both ranks, so that neither waits in vain.)"""

    def __init__(self, ring, lie):
        super().__init__(ring)
        self.lie = lie

    def allocate(self, shape, dtype, device):
        return super().allocate(shape, dtype, device).zero_()

    def post(self, sends, receives, note):
        if note.number == 2 and note.hop == 1 and note.what == "kv":
            header = sends[0].buffer.dtype == torch.int64
            if header and self.lie is not None:
                sends[0].buffer[0, self.lie] += 1
            if not header and self.lie is None:
                sends[0].payload.view(-1)[3] += 1.0  # written after it was announced
        return super().post(sends, receives, note)


def lie_body(tensors, lie):
    ring = Ring()
    ring.transport = Liar(ring, lie)
    enable_checks(ring)
    layout = Layout("zigzag", tensors[0].shape[1], ring.size)
    local = [layout.shard(x, ring).requires_grad_() for x in tensors[:3]]
    out = ring_attention(*local, ring=ring, layout=layout)
    try:
        torch.autograd.grad(out.sum(), local)
    except RingError as error:
        return str(error)
    return "nothing noticed"


def body(tensors):
    """Everything that needs two processes, one after the other, each on a ring of its own."""
    rank, results = dist.get_rank(), {}
    plain = attention(Ring(), tensors)
    results["checked"] = [
        all(torch.equal(a, b) for a, b in zip(plain, attention(enable_checks(Ring(virtual=v)), tensors), strict=True)) if v == 1
        else bool(attention(enable_checks(Ring(virtual=v)), tensors))
        for v in (1, 3)
    ]
    for lie in (0, 2, 3, 4, 6, 8, None):
        results["lie", lie] = lie_body(tensors, lie)

    ring, calls = Ring(), []
    exchange = dist.all_gather
    dist.all_gather = lambda *args, **kwargs: calls.append(1) or exchange(*args, **kwargs)
    layout = Layout("zigzag", tensors[0].shape[1], ring.size)
    for _ in range(3):  # the same inputs, a schedule made anew from cached content, another mask, another dtype
        attention(ring, tensors)
        attention(ring, tensors, window=7)
        attention(ring, [x.double() for x in tensors])
        ring.schedules.clear()
        make_schedule(layout, ring)
    dist.all_gather = exchange
    results["comparisons"] = len(calls)

    ring = Ring()
    results["dtype"] = error_of(lambda: attention(ring, [x.double() if rank else x for x in tensors]))
    results["kernel"] = error_of(lambda: attention(Ring(), tensors, kernel="reference" if rank else "torch"))
    results["after"] = torch.equal(attention(Ring(), tensors)[0], plain[0])  # the group is still in good order
    results["checks differ"] = error_of(lambda: attention(enable_checks(Ring()) if rank else Ring(), tensors))
    results["virtual"] = error_of(lambda: attention(Ring(virtual=1 + rank), tensors))

    class Slow(PointToPoint):
        def wait(self, ticket):
            time.sleep(0.03)
            super().wait(ticket)

    alone = Ring(dist.new_group([rank], use_local_synchronization=True), 2)
    for name, ring, kwargs in (("slow", Ring(), {}), ("gathered", Ring(), {"exchange": "allgather"}), ("alone", alone, {})):
        if name == "slow":
            ring.transport = Slow(ring)
        attention(ring, tensors, **kwargs)
        with measure(ring) as measured:
            attention(ring, tensors, **kwargs)
        attention(ring, tensors, **kwargs)  # not measured
        results[name] = ([tuple(s) for s in measured.spans()], measured.summary())
    return results


@pytest.fixture(scope="module")
def results():
    return run_ranks(P, body, [x.detach() for x in make_qkv(1, 48 * P, 2, 1, 16, torch.float32)], limit_s=60)


def test_checks_change_no_bit(results):
    assert all(r["checked"] == [True, True] for r in results)


@pytest.mark.parametrize(
    "lie, words",
    [
        (0, "pass 3 came, 2 was expected"), (2, "hop 2 came, 1 was expected"), (3, "what .* came, kv was expected"),
        (4, "sender [12] came, [01] was expected"), (6, "rows 49 came, 48 was expected"), (8, "dtype .* came, float32 was expected"),
        (None, "its bytes changed on the way"),
    ],
)
def test_a_wrong_message_is_refused_by_what_is_wrong_with_it(results, lie, words):
    for rank, message in enumerate(r["lie", lie] for r in results):
        assert message.startswith(f"rank {rank}, pass 2 (backward), hop 1: wrong kv message from rank {1 - rank}: "), message
        assert re.search(words, message), message


def test_equal_inputs_are_compared_once(results):
    assert [r["comparisons"] for r in results] == [3, 3]


def test_each_difference_is_named_on_every_rank(results):
    words = {
        "dtype": "dtype: float64 on rank 1, but float32 on rank 0", "kernel": "kernel: reference on rank 1, but torch on rank 0",
        "checks differ": "transport: checked PointToPoint on rank 1, but PointToPoint on rank 0",
        "virtual": "virtual: 2 on rank 1, but 1 on rank 0",
    }
    for r in results:
        assert r["after"]
        for name, text in words.items():
            assert text in r[name], r[name]


def test_waits_are_measured_hop_by_hop(results):
    for r in results:
        spans, summary = r["slow"]
        notes = [(note.number, note.direction, note.hop, note.what) for note, *_ in spans]
        assert notes == [(3, "forward", 1, "kv"), (4, "backward", 1, "kv"), (4, "backward", 1, "dkv")]
        for _, posted, waited, usable in spans:
            assert 0 <= posted <= waited and usable - waited >= 29
        assert 87 <= summary["comm_exposed_ms"] < 2000 and 0 <= summary["comm_hidden_pct"] < 100
        assert [note.what for note, *_ in r["gathered"][0]] == ["gathered kv", "gathered kv", "gathered dkv"]
        assert r["alone"] == ([], {"comm_exposed_ms": 0.0, "comm_hidden_pct": 100.0})


def test_a_ring_of_one_process_needs_none_of_it():
    ring, layout = Ring(virtual=2), Layout("zigzag", 8, 2)
    enable_checks(ring)
    x = torch.randn(1, 8, 1, 16)
    out = ring_attention(x, x, x, ring=ring, layout=layout)
    assert ring.watch is None and torch.isfinite(out).all()
    assert transport_of(ring).wait(transport_of(ring).post([], [], Note(1, "forward", 1, "kv"))) is None


def test_odd_ones_name_the_minority_first():
    assert watching._odd_ones({0: "a", 1: "a", 2: "a"}) == ""
    assert watching._odd_ones({0: "a", 1: "b", 2: "a"}) == "b on rank 1, but a on ranks 0, 2"


def test_flight_recorder_says_why_it_has_nothing():
    assert flight_recorder().startswith("NCCL flight recorder")
