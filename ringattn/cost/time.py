"""Time of a step by part, and what of the communication stays exposed. Plain arithmetic, no torch.

The device's time is a sum of matrix products, attention, and bytes moved by everything else; the host's is a sum of launches. The
longer of the two is the step. The byte counts below are those of the code as it stands, read plus write, operation by operation.
"""

from __future__ import annotations

from dataclasses import dataclass

from ringattn.cost.flops import block_parameters, parameters
from ringattn.cost.machine import GB, Machine
from ringattn.cost.memory import saved_bytes_per_token
from ringattn.cost.work import Work

# Bytes for each logit of a chunk in fp32: written by the product, read twice by one kernel, which leaves the gradient in 16 bit.
LOGIT_BYTES = 14
# Of a copy's rate, what the fused row kernels (norm and rotation backward, SwiGLU) reach together (scripts/memory_parts.py).
FUSED = 0.65
# Bytes for each parameter of an update: AdamW reads four and writes three fp32 tensors, the norm reads one, clipping reads and writes it.
# Moments in bf16 are updated by some 25 eager kernels: 0.18 s for 1.49G parameters on an H200. In 8 bit: assumed, not measured.
# SGD without momentum reads two and writes one, norm and clipping as above.
PLAIN_UPDATE_BYTES = 24
UPDATE_BYTES = {"fp32": 28 + 4 + 8, "bf16": 480, "8bit": 120}
# Bytes for each gathered parameter: fp32 read, 16 bit written, copied out; its gradient rounded up, reduced, laid out again.
GATHER_BYTES, REDUCE_BYTES = 10, 18


@dataclass(frozen=True)
class Hop:
    """One hop of the slowest rank: seconds of its kernel and of the messages beside it, forward or backward."""

    compute_s: float
    transfer_s: float

    @property
    def margin(self) -> float:
        """Computation over communication; from 1 on the transfer is hidden."""
        return self.compute_s / self.transfer_s if self.transfer_s else float("inf")


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step of the slowest rank. ``device``: by part, exposed communication included; ``host``: launches."""

    device: dict[str, float]
    host_s: float
    forward_hop: Hop
    backward_hop: Hop

    @property
    def device_s(self) -> float:
        """Time of the device's work."""
        return sum(self.device.values())

    @property
    def total_s(self) -> float:
        """The step: the device waits for the host or the host for the device."""
        return max(self.device_s, self.host_s)

    @property
    def host_bound(self) -> bool:
        """Whether launches take longer than the work that they launch."""
        return self.host_s > self.device_s


def link_rate(w: Work, m: Machine, ranks: int) -> float:
    """Bytes a second to the next of ``ranks`` neighbouring ranks, at the narrowest place."""
    return (m.link_gbs if ranks <= m.node_gpus else m.network_gbs) * GB


def products(w: Work, m: Machine) -> tuple[float, float, float]:
    """Seconds of one layer's matrix products in one micro-batch: forward, backward, what the policy runs again."""
    c, t = w.model, w.tokens
    q, kv = c.heads * c.head_dim, 2 * c.kv_heads * c.head_dim
    attention, gate_up, down = [(c.width, q + kv), (q, c.width)], (c.width, 2 * c.ffn_width), (c.ffn_width, c.width)

    def run(shapes: list[tuple[int, int]], outer: bool = False) -> float:
        return sum(2 * t * k * n / m.matmul_rate(k, n, outer=outer) for k, n in shapes)

    every = [*attention, gate_up, down]
    recomputed = w.policy in ("block", "attention_saved")
    again = run([gate_up]) if c.ffn_chunk or recomputed else 0.0
    if recomputed:
        again += run(attention)
    if w.policy == "block" and c.ffn_chunk:
        again += run([gate_up, down])
    return run(every), run(every) + run(every, outer=True), again


def moved_bytes(w: Work, strided: float, whole: float) -> tuple[float, float, float]:
    """Bytes that the elementwise work of one layer moves in one micro-batch: forward, backward, run again; as at the rate ``strided``."""
    c, t, b, wide = w.model, w.tokens, w.compute_bytes, w.wide_bytes
    q, k = c.heads * c.head_dim, c.kv_heads * c.head_dim
    rotate = (q + k) * (2 * (b + wide) + 3 * wide + 2 * wide + wide + b)  # four products, two sums, a concatenation, a rounding
    attention: float = 2 * c.width * b + rotate + 2 * k * b + 3 * c.width * b
    ffn: float = (2 * c.width + 2 * c.ffn_width + 3 * c.ffn_width + 3 * c.width) * b
    backward_ffn: float = (8 * c.width + 12 * c.ffn_width) * b
    if c.ffn_chunk:  # row kernels: rates below are those of strided work, so their bytes count less
        share = strided / (FUSED * whole)
        ffn = (5 * c.width + 3 * c.ffn_width) * b * share
        backward_ffn = (7 * c.width + 6 * c.ffn_width) * b * share
    if w.blockwise_qkv:
        attention = (5 * c.width + 2 * (q + 2 * k)) * b * share
        backward = (9 * c.width + 2 * (q + 2 * k)) * b * share + backward_ffn
    else:
        backward = 10 * c.width * b + 1.2 * rotate + backward_ffn
    again = 0.0
    if w.policy in ("block", "attention_saved"):
        again = attention + (0 if c.ffn_chunk else ffn) + (ffn if c.ffn_chunk and w.policy == "block" else 0)
    return t * (attention + ffn), t * backward, t * again


def attention_time(w: Work, m: Machine) -> tuple[float, float, Hop, Hop]:
    """Seconds of attention of all layers in one micro-batch on the slowest rank, forward and backward, and a hop of each."""
    c, hops = w.model, w.hops
    by_window = {window: w.pairs(window) for window in c.distinct_windows}
    ranks = w.ring * w.ulysses
    uneven = (2 * w.ring - 1) / w.ring if w.layout == "contiguous" and w.exchange == "ring" else 1.0
    forward = backward = 0.0
    for window in c.layer_windows:
        pairs = w.micro_rows * by_window[window] / ranks * uneven
        keys = by_window[window] / w.seq_len / (hops if w.exchange == "ring" and not w.documents else 1)
        rate_forward, rate_backward = m.attention_rates(c.head_dim, keys)
        flops = 4 * pairs * c.heads * c.head_dim
        forward += flops / rate_forward
        backward += 2.5 * flops / rate_backward
    heads_dim, kv = c.heads * c.head_dim // w.ulysses, w.kv_width
    rows = w.tokens * w.ulysses
    if hops > 1:  # the softmax's state and the sums of gradients go through memory at every hop
        state = c.layers * (hops - 1) * rows * w.wide_bytes / (m.memory_gbs * GB)
        forward += state * 2 * heads_dim
        backward += state * (2 * heads_dim + 3 * kv)
    if w.ring == 1:
        return forward, backward, Hop(forward / c.layers / hops, 0.0), Hop(backward / c.layers / hops, 0.0)
    rate, start = link_rate(w, m, w.node_ranks * w.ulysses), m.latency_us * 1e-6
    message = rows * kv
    there = Hop(forward / c.layers / w.ring, message * w.compute_bytes / rate + start)
    back = Hop(backward / c.layers / w.ring, message * (w.compute_bytes + w.grad_wire_bytes) / rate + start)
    return forward, backward, there, back


def ring_exposed(w: Work, m: Machine, there: Hop, back: Hop) -> tuple[float, float]:
    """Seconds of the ring's messages of one layer that no computation hides, forward and backward. A message between the nodes of a ring
    of two levels has a whole turn to hide behind; on one of one level that spans nodes every hop waits for the network."""
    if w.exchange == "allgather":
        return (w.ring - 1) * there.transfer_s, (w.ring - 1) * back.transfer_s
    message, rate, start = w.tokens * w.ulysses * w.kv_width, m.network_gbs * GB, m.latency_us * 1e-6

    def waits(hop: Hop, numbers_bytes: float) -> float:
        within = (w.node_ranks - 1) * max(0.0, hop.transfer_s - hop.compute_s)
        between = max(0.0, message * numbers_bytes / rate + start - w.node_ranks * hop.compute_s - within)
        return w.nodes * within + (w.nodes - 1) * between

    home = back.transfer_s * w.grad_wire_bytes / (w.grad_wire_bytes + w.compute_bytes) if w.node_ranks > 1 else 0.0
    home += message * w.grad_wire_bytes / rate + start if w.nodes > 1 else 0.0
    return waits(there, w.compute_bytes), waits(back, w.compute_bytes + w.grad_wire_bytes) + home


def exposed(w: Work, m: Machine, there: Hop, back: Hop, block_s: float) -> float:
    """Seconds of communication of one micro-batch that no computation hides (the last gradient of KV comes home unhidden)."""
    c = w.model
    seconds = 0.0
    if w.ring > 1:
        forward, backward = ring_exposed(w, m, there, back)
        seconds += c.layers * ((2 if w.policy == "block" else 1) * forward + backward)
    if w.ulysses > 1:
        heads = 2 * (c.heads + c.kv_heads) * c.head_dim
        seconds += c.layers * 2 * w.tokens * heads * w.compute_bytes * (1 - 1 / w.ulysses) / link_rate(w, m, w.ulysses)
    if w.policy == "offload":  # out beside the forward pass, back beside the backward pass, which takes about twice as long
        copied = w.tokens * saved_bytes_per_token(c, "none", w.compute_bytes) / (m.host_gbs * GB)
        seconds += (c.layers - 1) * (max(0.0, copied - block_s) + max(0.0, copied - 2 * block_s))
    if w.shard_ranks > 1:
        block = sum(block_parameters(c).values())
        width = m.link_gbs if w.shard_ranks <= m.node_gpus else min(m.link_gbs, m.network_gbs * m.node_gpus)
        gather = block * w.compute_bytes / (width * GB) + m.latency_us * 1e-6
        reduce = block * w.wide_bytes / (width * GB) + m.latency_us * 1e-6
        # beside forward, backward (gathered again) and the backward of the next block; attention's own messages have the link first
        seconds += c.layers * (max(0.0, gather - block_s) + max(0.0, gather + reduce - 2 * block_s)) + gather + reduce
    return seconds


def step_time(w: Work, m: Machine) -> StepTime:
    """Seconds of one step on the slowest rank of ``w`` on GPUs like ``m``."""
    c, t = w.model, w.tokens
    moved, strided = m.memory_gbs * GB, m.strided_gbs * GB
    forward, backward, again = products(w, m)
    moved_forward, moved_backward, moved_again = (x / strided for x in moved_bytes(w, strided, moved))
    attended, attended_back, there, back = attention_time(w, m)
    table = c.vocab_size * c.width
    head = 2 * t * table * (2 / m.matmul_rate(c.width, c.vocab_size) + 1 / m.matmul_rate(c.width, c.vocab_size, outer=True))
    head += t * (c.vocab_size * LOGIT_BYTES + 12 * c.width * w.compute_bytes) / moved + 2 * table * 10 / moved
    repeats = w.micro_batches
    parameters_here = sum(parameters(c).values()) / w.shard_ranks
    whole = sum(parameters(c).values())
    gathers = 2 if w.reshard else 1
    block_s = forward + moved_forward + attended / c.layers
    update = parameters_here * (UPDATE_BYTES[w.states] if w.state_bytes else PLAIN_UPDATE_BYTES) / moved
    if w.states_on_host:  # in and out at once, beside the update
        update = max(update, parameters_here * w.state_bytes / (m.host_gbs * GB))
    device = {
        "matrix products": repeats * c.layers * (forward + backward),
        "attention": repeats * (attended + attended_back),
        "run again": repeats * (c.layers * (again + moved_again) + (attended if w.policy == "block" else 0.0)),
        "elementwise": repeats * c.layers * (moved_forward + moved_backward),
        "head and loss": repeats * head,
        "gather and reduce": repeats * whole * (gathers * GATHER_BYTES + REDUCE_BYTES) / moved,
        "update": update,
        "exposed communication": repeats * exposed(w, m, there, back, block_s)
        + (2 * parameters_here * w.wide_bytes / (m.network_gbs * GB) if w.replicate > 1 else 0.0),
    }
    hops = w.hops * w.virtual - 1 if w.exchange == "ring" else w.virtual - 1
    again_share = 1.0 if w.policy in ("none", "offload") else 1.75  # a block's Python runs twice, under hooks
    launches = c.layers * (m.host_layer_ms * again_share * 1e-3 + hops * m.host_hop_us * 1e-6)
    return StepTime(device, m.host_step_ms * 1e-3 + repeats * launches, there, back)
