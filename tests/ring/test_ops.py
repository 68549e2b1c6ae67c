"""The two registered ops: what torch.compile, checkpointing and opcheck see of them, and how often the ring turns (CASES FS-02, FS-03)."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.distributed as dist
from oracle import make_qkv
from processes import run_ranks
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from ringattn import Layout, Ring, make_schedule
from ringattn.ring.attention import attend
from ringattn.ring.transport import Carousel, PointToPoint

HEADS, DIM = 2, 16


def own_ops(graph: torch.fx.GraphModule) -> list[str]:
    """Names of this package's ops in a graph."""
    return [str(n.target) for n in graph.graph.nodes if n.op == "call_function" and str(n.target).startswith("ringattn.")]


def layer(x: torch.Tensor, weight: torch.Tensor, handle: int) -> torch.Tensor:
    """A layer with attention inside: [1, S, E] -> [1, S, E]."""
    q, k, v = (x @ weight).unflatten(-1, (3, HEADS, DIM)).unbind(2)
    return x + torch.tanh(attend(q, k, v, handle).flatten(-2))


def make_layers(count: int, rows: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Input and weights, the same on every rank that draws them from one seed."""
    width = HEADS * DIM
    draw = torch.Generator().manual_seed(int(torch.initial_seed()) % (1 << 31))
    x = torch.randn(1, rows, width, generator=draw).to(dtype)
    return x, [(torch.randn(width, 3 * width, generator=draw) / 6).to(dtype).requires_grad_() for _ in range(count)]


def gradients(x, weights, handle, wrap: Callable = lambda f: f) -> list[torch.Tensor]:
    """Gradients of several layers, each wrapped by ``wrap``."""
    for weight in weights:
        x = wrap(layer)(x, weight, handle)
    return list(torch.autograd.grad((x * x.detach().cos()).sum(), weights))


def test_compile_sees_one_node_in_each_direction():
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd  # slow to import, and the processes below have no use for it

    torch._dynamo.reset()
    ring = Ring(virtual=2)
    handle = make_schedule(Layout("zigzag", 32, 2), ring).handle
    x, weights = make_layers(1, 32)
    graphs: dict[str, list[str]] = {}

    def keep(name, graph, _inputs):
        graphs[name] = own_ops(graph)
        return make_boxed_func(graph.forward)

    backend = aot_autograd(fw_compiler=partial(keep, "forward"), bw_compiler=partial(keep, "backward"))
    compiled = torch.compile(layer, fullgraph=True, backend=backend)
    got = gradients(x, weights, handle, lambda _: compiled)
    assert graphs == {"forward": ["ringattn.ring_forward.default"], "backward": ["ringattn.ring_backward.default"]}
    assert all(torch.equal(a, b) for a, b in zip(got, gradients(x, weights, handle), strict=True))


def test_other_schedules_do_not_recompile():
    """After the second value the handle is a symbol; every later batch reuses the graph, and two lengths need two graphs at most."""
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, fullgraph=True, backend=counter)
    ring = Ring(virtual=2)
    layout = Layout("zigzag", 32, 2)
    x, weights = make_layers(1, 32)
    counts = []
    for window in range(1, 9):
        handle = make_schedule(layout, ring, window=window).handle
        got = gradients(x, weights, handle, lambda _: compiled)
        assert all(torch.equal(a, b) for a, b in zip(got, gradients(x, weights, handle), strict=True)), window
        counts.append(counter.frame_count)
    assert counts[1:] == [counts[1]] * 7 and counts[1] <= 2, counts


def test_compiled_equals_eager_over_two_lengths():
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for rows in (32, 48, 32):
        ring = Ring(virtual=2)
        handle = make_schedule(Layout("zigzag", rows, 2), ring).handle
        x, weights = make_layers(2, rows)
        for got, gold in zip(gradients(x, weights, handle, lambda _: compiled), gradients(x, weights, handle), strict=True):
            assert (got - gold).norm() <= 1e-5 * gold.norm()


@pytest.mark.parametrize("sinks", [False, True])
def test_opcheck(sinks):
    ring = Ring(virtual=2)
    handle = make_schedule(Layout("zigzag", 16, 2), ring).handle
    q, k, v, _ = make_qkv(1, 16, 2, 1, 16, torch.float64)
    logits = torch.randn(2, dtype=torch.float64, requires_grad=True) if sinks else None
    arguments = (q, k, v, logits, handle, 0.25, 0.0, "torch", False)
    torch.library.opcheck(torch.ops.ringattn.ring_forward.default, arguments)
    out, lse = torch.ops.ringattn.ring_forward(*arguments)
    backward = (torch.randn_like(out), None, q, k, v, out, lse, logits, handle, 0.25, 0.0, "torch", False)
    detached = tuple(a.detach() if isinstance(a, torch.Tensor) else a for a in backward)
    torch.library.opcheck(torch.ops.ringattn.ring_backward.default, detached, test_utils=("test_schema", "test_faketensor"))


SAVED = {torch.ops.ringattn.ring_forward.default}


def save_attention(_context, op, *_args, **_kwargs):
    return CheckpointPolicy.MUST_SAVE if op in SAVED else CheckpointPolicy.PREFER_RECOMPUTE


def plainly(function):
    return partial(checkpoint, function, use_reentrant=False)


def selectively(function):
    return partial(checkpoint, function, use_reentrant=False, context_fn=partial(create_selective_checkpoint_contexts, save_attention))


@pytest.mark.parametrize("compiled", [False, True])
def test_a_saved_output_never_turns_the_ring_again(compiled, monkeypatch):
    torch._dynamo.reset()
    posts = []
    post = Carousel.post
    monkeypatch.setattr(Carousel, "post", lambda self, route, note: posts.append(note[1:]) or post(self, route, note))
    ring = Ring(virtual=4)
    handle = make_schedule(Layout("zigzag", 32, 4), ring).handle
    x, weights = make_layers(3, 32)
    logs, results = {}, {}
    for name, wrap in (("none", lambda f: f), ("selective", selectively), ("plain", plainly)):
        whole = (lambda f, wrap=wrap: torch.compile(wrap(f), backend="aot_eager")) if compiled else wrap
        posts.clear()
        results[name] = gradients(x, weights, handle, whole)
        logs[name] = list(posts)
    assert logs["selective"] == logs["none"] and len(logs["none"]) == 3 * (3 + 3 + 3)
    assert len(logs["plain"]) == len(logs["none"]) + 3 * 3  # the forward passes once more, and nothing else
    for name in ("selective", "plain"):
        assert all(torch.equal(a, b) for a, b in zip(results[name], results["none"], strict=True)), name


class Recorder(PointToPoint):
    """Writes down what it sends."""

    def __init__(self, ring):
        super().__init__(ring)
        self.log = []

    def post(self, sends, receives, note):
        self.log.append((*note, [m.payload.shape[0] for m in sends]))
        return super().post(sends, receives, note)


def checkpoint_body(seed):
    """Gradients and logs of three layers over three steps, with and without checkpointing, over 3 processes and over 2 of them."""
    groups, results = {3: None, 2: dist.new_group([0, 1])}, {}
    wraps = (("none", lambda f: f), ("plain", plainly), ("selective", selectively))
    for processes, (name, wrap) in itertools.product((2, 3), wraps):
        if dist.get_rank() >= processes:
            continue
        torch.manual_seed(seed)
        ring = Ring(groups[processes])
        ring.transport = Recorder(ring)
        layout = Layout("zigzag", 32 * ring.size, ring.size)
        x, weights = make_layers(3, 32 * ring.size)
        local = layout.shard(x, ring)
        steps = [gradients(local, weights, make_schedule(layout, ring, window=w).handle, wrap) for w in (64, 9, 64)]
        results[processes, name] = (steps, ring.transport.log)
    return results


@pytest.mark.ring
def test_checkpointing_over_processes(rng):
    ranks = run_ranks(3, checkpoint_body, int(rng.integers(1 << 30)))
    for processes in (2, 3):
        own = [r[processes, "none"] for r in ranks[:processes]]
        for name in ("plain", "selective"):
            for result, (steps, log) in zip(ranks, own, strict=False):
                again, again_log = result[processes, name]
                assert all(torch.equal(a, b) for x, y in zip(again, steps, strict=True) for a, b in zip(x, y, strict=True)), name
                assert (again_log == log) == (name == "selective")
        for name in ("none", "plain", "selective"):
            logs = [r[processes, name][1] for r in ranks[:processes]]
            assert all(log == logs[0] for log in logs), f"{name}: ranks made different transfers"
