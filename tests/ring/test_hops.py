"""The hop loops: memory that does not depend on W, what is kept for the way home, and gradients that travel in 16 bit."""

from __future__ import annotations

import math
import time

import pytest
import torch
import torch.distributed as dist
from oracle import F32_BAND, assert_close, make_mask, make_qkv, oracle, rel
from processes import run_ranks
from torch.profiler import ProfilerActivity, profile

import ringattn.ring.attention as ring_module
from ringattn import Layout, Ring, make_schedule, ring_attention
from ringattn.kernels.torch_tiled import TorchKernel
from ringattn.ring import hops
from ringattn.ring.alone import IdleKernel, lone_rank
from ringattn.ring.transport import Carousel, PointToPoint

NAMES = ("out", "dq", "dk", "dv")


def attention(ring, kind, mask, tensors, **kwargs):
    """out, dq, dk, dv in global order."""
    layout = Layout(kind, tensors[0].shape[1], ring.size)
    q, k, v, dout = (layout.shard(x.detach(), ring) for x in tensors)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = ring_attention(*leaves, ring=ring, layout=layout, **mask, **kwargs)
    return [layout.unshard(x, ring) for x in (out.detach(), *torch.autograd.grad(out, leaves, dout))]


# --- one rank of a ring of many -----------------------------------------------------------------------------------------


def peak_bytes(run, *args) -> int:
    """Most bytes that ``run(*args)`` held at one time beyond what there was."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        kept = run(*args)
    events = [e for e in recorded.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    del kept
    return peak


@pytest.fixture
def idle(monkeypatch):
    """A kernel that does nothing."""
    monkeypatch.setattr(ring_module, "select_kernel", lambda *args, **kwargs: IdleKernel())


@pytest.mark.parametrize("wire", ["exact", "bf16"])
def test_memory_of_a_rank_does_not_depend_on_the_ring(wire, idle):
    rows, heads, kv_heads, dim = 512, 4, 2, 16
    kv_numbers, q_numbers = 2 * rows * kv_heads * dim, rows * heads * dim
    state = 4 * (q_numbers + 2 * rows * heads)
    peaks = {}
    for w in (2, 4, 8, 64):
        schedule = make_schedule(Layout("zigzag", rows * w, w), lone_rank(w), wire=wire)
        q, dout = (torch.zeros(1, rows, heads, dim, dtype=torch.bfloat16) for _ in range(2))
        k, v = (torch.zeros(1, rows, kv_heads, dim, dtype=torch.bfloat16) for _ in range(2))
        options = (None, schedule.handle, 0.25, 0.0, "auto", False)
        out, lse = torch.ops.ringattn.ring_forward(q, k, v, *options)  # (what depends on the schedule is worked out here)
        torch.ops.ringattn.ring_backward(dout, None, q, k, v, out, lse, *options)
        peaks[w] = (
            peak_bytes(torch.ops.ringattn.ring_forward, q, k, v, *options),
            peak_bytes(torch.ops.ringattn.ring_backward, dout, None, q, k, v, out, lse, *options),
        )
    assert peaks[4] == peaks[8] == peaks[64]
    # two KV buffers and the softmax's state; out and lse are the result
    assert peaks[2][0] == peaks[4][0] == 2 * kv_numbers * 2 + state + 2 * q_numbers + 4 * rows * heads
    # two KV buffers, the fp32 sums, and dK / dV on their way: leaving, arriving, being written (at W = 2 nothing leaves meanwhile)
    sums = 4 * (q_numbers + kv_numbers)
    # (adding bf16 to fp32 makes a copy on a CPU, not on a GPU)
    travelling = {"exact": 3 * 4, "bf16": 4 + 2 * 2 + 4}[wire] * kv_numbers
    assert peaks[4][1] == 2 * kv_numbers * 2 + sums + travelling
    assert peaks[2][1] <= peaks[4][1] - (4 * kv_numbers if wire == "exact" else 0)


def test_the_loop_allocates_nothing(idle, monkeypatch):
    """Between the first post of a pass and its last wait no tensor is made."""
    schedule = make_schedule(Layout("zigzag", 64 * 8, 8), lone_rank(8))
    q, dout, k, v = (torch.zeros(1, 64, 2, 16) for _ in range(4))
    options = (None, schedule.handle, 0.25, 0.0, "auto", False)
    out, lse = torch.ops.ringattn.ring_forward(q, k, v, *options)
    marks = []
    for name in ("post", "wait"):
        old = getattr(Carousel, name)
        monkeypatch.setattr(Carousel, name, lambda self, *args, old=old: marks.append(time.time_ns()) or old(self, *args))
    for run in (
        lambda: torch.ops.ringattn.ring_forward(q, k, v, *options),
        lambda: torch.ops.ringattn.ring_backward(dout, None, q, k, v, out, lse, *options),
    ):
        marks.clear()
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
            run()
        memory = [e.start_ns() for e in recorded.profiler.kineto_results.events() if e.name() == "[memory]" and e.nbytes() > 0]
        assert memory and len(marks) >= 14 and not [t for t in memory if marks[0] <= t <= marks[-1]]


# --- what is kept for the way home --------------------------------------------------------------------------------------


@pytest.fixture
def fused(monkeypatch):
    monkeypatch.setattr(TorchKernel, "fused_backward", True, raising=False)
    monkeypatch.setattr(hops, "HOLD_BACK_ROWS", 1)


@pytest.mark.parametrize(("kind", "mask", "kv_heads"), [("zigzag", "causal", 2), ("contiguous", "window", 8), ("striped", "documents", 4)])
def test_heads_held_back_change_no_result(kind, mask, kv_heads, fused, rng):
    for w in (2, 5):
        tensors = make_qkv(2, 40 * w, 8, kv_heads, 16, torch.float32)
        kwargs, sinks = make_mask(mask, 40 * w, 2, rng), torch.randn(8, requires_grad=True)
        got = attention(Ring(virtual=w), kind, kwargs, tensors, sinks=sinks)
        gold = oracle(*tensors, kwargs, sinks=sinks)
        assert_close(dict(zip(NAMES, got, strict=True)), dict(zip(NAMES, (gold.out, *gold.grads[:3]), strict=True)), F32_BAND)


def test_they_are_worked_on_while_the_last_message_travels(fused, monkeypatch):
    events = []
    backward, wait, post = TorchKernel.backward, Carousel.wait, Carousel.post
    monkeypatch.setattr(TorchKernel, "backward", lambda self, q, *a, **k: events.append(q.shape[2]) or backward(self, q, *a, **k))
    monkeypatch.setattr(Carousel, "post", lambda self, route, note: events.append(note.what) or post(self, route, note))
    monkeypatch.setattr(Carousel, "wait", lambda self: events.append("wait") or wait(self))
    attention(Ring(virtual=1), "zigzag", {}, make_qkv(1, 64, 8, 4, 16, torch.float32))
    assert events == [8]  # a ring of one has nothing to hide
    events.clear()
    attention(Ring(virtual=2), "zigzag", {}, make_qkv(1, 64, 8, 4, 16, torch.float32))
    forward = ["kv", "wait"]
    assert events == [*forward, "kv", 6, 6, "wait", 8, 8, "dkv", 8, 8, 2, 2, "wait"]


def fused_body(problems):
    hops.HOLD_BACK_ROWS, TorchKernel.fused_backward = 1, True
    group = dist.new_group([0, 1])
    rings = {"3": Ring(), **({"2 x 2": Ring(group, 2)} if dist.get_rank() < 2 else {})}
    return {name: attention(ring, *problems[ring.size]) for name, ring in rings.items()}


@pytest.mark.ring
def test_held_back_real_equals_virtual_bit_for_bit(fused, rng):
    problems = {
        w: ("zigzag", make_mask("documents and window", 42 * w, 2, rng), [x.detach() for x in make_qkv(2, 42 * w, 4, 2, 16, torch.float32)])
        for w in (3, 4)
    }
    ranks = run_ranks(3, fused_body, problems)
    for name, w in (("3", 3), ("2 x 2", 4)):
        gold = attention(Ring(virtual=w), *problems[w])
        for result in ranks:
            if name in result:
                assert all(torch.equal(a, b) for a, b in zip(result[name], gold, strict=True)), name


# --- the wire -----------------------------------------------------------------------------------------------------------


def wire_body(problem):
    return [attention(Ring(), *problem, exchange=exchange, wire="bf16") for exchange in ("ring", "allgather")]


@pytest.mark.ring
def test_a_narrow_wire_has_the_stated_error_and_equal_bits(rng, monkeypatch):
    """The bound of make_schedule's docstring, in the norm; forward and dq are untouched; real = virtual."""
    allocate = PointToPoint.allocate
    monkeypatch.setattr(PointToPoint, "allocate", lambda *a: allocate(*a).fill_(math.nan))
    for w in (2, 4, 16):
        problem = ("contiguous", {"causal": False}, make_qkv(1, 8 * w, 4, 2, 16, torch.float32))
        exact = attention(Ring(virtual=w), *problem)
        narrow = attention(Ring(virtual=w), *problem, wire="bf16")
        assert torch.equal(exact[0], narrow[0]) and torch.equal(exact[1], narrow[1])
        for name, x, y in zip(NAMES[2:], narrow[2:], exact[2:], strict=True):
            assert 1e-5 < rel(x, y) <= 2.1e-3 * math.sqrt((w - 1) / 2), (w, name)
    problem = ("zigzag", make_mask("documents", 40 * 4, 2, rng), [x.detach() for x in make_qkv(2, 40 * 4, 4, 2, 16, torch.float32)])
    gold = attention(Ring(virtual=4), *problem, wire="bf16")
    exact = attention(Ring(virtual=4), *problem)
    for ring, gathered in run_ranks(4, wire_body, problem):
        assert all(torch.equal(a, b) for a, b in zip(ring, gold, strict=True))
        for name, x, y in zip(NAMES, gathered, exact, strict=True):
            assert rel(x, y) <= F32_BAND if name in ("out", "dq") else 1e-5 < rel(x, y) <= 2.1e-3, name


def test_a_narrow_wire_halves_what_the_gradients_take():
    layout, ring = Layout("zigzag", 512 * 4, 4), Ring(virtual=4)
    exact, narrow = (make_schedule(layout, ring, wire=wire) for wire in ("exact", "bf16"))
    shape = {"batch": 1, "kv_heads": 2, "head_dim": 64, "dtype": torch.bfloat16}
    forward, backward = exact.message_bytes(**shape)
    assert narrow.message_bytes(**shape) == (forward, forward + (backward - forward) // 2)
    with pytest.raises(ValueError, match="wire='fp8' is unknown, choose from exact, bf16"):
        make_schedule(layout, ring, wire="fp8")
