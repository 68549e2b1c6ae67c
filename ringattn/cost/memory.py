"""Peak memory of one rank by part. Plain arithmetic, no torch.

A step has a few moments at which memory can be at its highest; :func:`phases` adds up what is alive at each of them, the largest is
the peak, and its parts are what :func:`memory` returns. The moments:

    forward         the last block runs: the activations of all before it, and what one block needs
    loss            the end of the forward pass: every layer's activations, a chunk of logits, the head's gradient sum
    head backward   the head's gradient is scaled and rounded in the memory of its sum, which it keeps until the blocks are done
    last block      its backward begins: all activations, and what one block needs to run again and to go back
    first block     its backward ends: one block's activations, the gradients of all others
    reduction       gradients of embedding and head are reduced in fp32: nothing of the sequence is left
    update          optim.offload only: buckets of the states that wait on the host pass by

Symbols: T tokens on this rank in a micro-batch, E width, H heads, Hkv KV heads, D head dim, F FFN width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, NamedTuple

from ringattn.cost.flops import Policy, block_parameters, parameters
from ringattn.cost.work import Work

if TYPE_CHECKING:
    from ringattn.model.config import ModelConfig

# Parts, in the order in which they are shown.
PARTS = ("weights", "gradients", "optimizer", "gathered", "activations", "transient", "kv_buffers", "logits", "batch", "workspace")

# What libraries take through the allocator once and keep (cuBLAS, on Hopper: 32 MiB a handle and stream, two of them in training).
WORKSPACE = 64 * 2**20
IN_FLIGHT = 2  # activation=offload: blocks whose saved tensors are on the device at once, on their way out or back
# An update of bf16 or offloaded states takes so many numbers of a moment at once; optim.offload holds so many of these buckets (in,
# updated, out).
STATE_BUCKET, STATE_SLOTS = 2**25, 3


class Memory(NamedTuple):
    """``parts``: bytes at the highest moment by part (names in PARTS); ``phase``: that moment; ``phases``: bytes of each."""

    parts: dict[str, int]
    phase: str
    phases: dict[str, int]

    @property
    def peak(self) -> int:
        """Most bytes that tensors take at once (torch.cuda.max_memory_allocated)."""
        return sum(self.parts.values())

    @property
    def largest(self) -> list[str]:
        """Part names, the largest first."""
        return sorted(self.parts, key=lambda part: -self.parts[part])


def saved_bytes_per_token(model: ModelConfig, policy: Policy, compute_bytes: int) -> int:
    """Activations that one layer keeps from forward to backward, bytes a token.

    ``none``: residual input, rotated q and k, v (q and k before QK-norm too), attention's output and lse, the residual before the
    feed-forward and, unless both are blockwise, the normed inputs, gate and up, silu(gate) and their product. ``offload``: the same,
    on the host. ``block``: the block's input only. ``attention_saved``: that, attention's output and lse.
    """
    m = model
    state = 8 if compute_bytes == 8 else 4
    attended = m.heads * m.head_dim * compute_bytes + m.heads * state
    if policy == "block":
        return m.width * compute_bytes
    if policy == "attention_saved":
        return m.width * compute_bytes + attended
    qk = (m.heads + m.kv_heads) * m.head_dim * (2 if m.qk_norm else 1)
    ffn = m.width if m.ffn_chunk else 2 * m.width + 4 * m.ffn_width
    normed = 1 if m.ffn_chunk and not m.qk_norm else 2
    return (normed * m.width + qk + m.kv_heads * m.head_dim + ffn) * compute_bytes + attended


def forward_bytes(w: Work) -> int:
    """What one block holds beyond its saved tensors when its forward pass needs most.

    The rotation works in fp32 on halves (twice its input in all) while q, k, v before it are alive; a ring carries the softmax's state
    and a packed copy of KV; a feed-forward that is not blockwise holds gate and up, silu(gate) and their product.
    """
    m, b, t, wide = w.model, w.compute_bytes, w.tokens, w.wide_bytes
    q, k = m.heads * m.head_dim, m.kv_heads * m.head_dim
    rotation = max(2 * wide * q, q * b + 2 * wide * k)
    state = (q + 2 * m.heads) * wide + (2 if w.nodes == 1 else 6) * k * b if w.hops > 1 else 0
    if w.blockwise_qkv:  # q, k, v and attention's output; then the output's product and the sum with the residual
        attention = (2 * q + 2 * k) * b + max(state, 2 * m.width * b)
    else:
        attention = (q + 3 * k) * b + max(rotation, (2 * q + k) * b + state)
    rows = min(t, m.ffn_chunk) if m.ffn_chunk else t
    ffn = rows * 4 * m.ffn_width * b + t * m.width * b * (2 if m.ffn_chunk else 1)
    return max(t * attention, ffn)


def ffn_bytes(w: Work) -> int:
    """What the backward pass of a feed-forward holds beyond its saved tensors and the gradient that comes in."""
    m, b, t = w.model, w.compute_bytes, w.tokens
    if not m.ffn_chunk:
        return t * 2 * m.ffn_width * b  # gradients of the product and of its two factors, the product itself being gone
    rows, weights = min(t, m.ffn_chunk), 3 * m.width * m.ffn_width
    chunk = rows * (3 * m.ffn_width + 4 * m.width) * b  # gate and up, their gradients in their place; norm and its gradient
    return t * m.width * b + weights * w.wide_bytes + max(chunk, weights * b)


def attention_bytes(w: Work) -> int:
    """What the backward pass of attention holds beyond its saved tensors: two gradients of the block, dQ's fp32 sum, dq, dk, dv."""
    m, b, t, wide = w.model, w.compute_bytes, w.tokens, w.wide_bytes
    q, kv = m.heads * m.head_dim // w.ulysses, w.kv_width
    grads = (q + kv) * (wide if w.hops > 1 and w.exchange == "ring" else b)
    return t * (m.width * b + q * b + q * wide + grads + 2 * m.heads // w.ulysses * wide)


def ring_bytes(w: Work) -> int:
    """Buffers that travel in the backward pass: KV in the compute dtype, partial dKV on its way (leaving, and from another process
    arriving) and being made, which on an exact wire is what leaves next."""
    t, kv = w.tokens * w.ulysses, w.kv_width
    if w.hops == 1:
        return 0
    if w.exchange == "allgather":
        return t * w.ring * kv * (w.compute_bytes + 2 * w.wide_bytes)
    arriving = int(w.ring > 1)
    made = 1 if w.wire == "exact" and w.hops == 2 else 2
    sums = (made + arriving) * w.wide_bytes if w.wire == "exact" else w.wide_bytes + (1 + arriving) * w.grad_wire_bytes
    outer = 2 * (w.compute_bytes + w.grad_wire_bytes) if w.nodes > 1 else 0  # what a turn began with, and what comes from the next node
    return t * kv * (w.compute_bytes * (1 + arriving) + sums + outer)


def phases(w: Work) -> dict[str, dict[str, int]]:
    """Bytes by part at each of the moments described above."""
    m, b, t, wide = w.model, w.compute_bytes, w.tokens, w.wide_bytes
    master = 8 if b == 8 else 4
    total, block = sum(parameters(m).values()), sum(block_parameters(m).values())
    root, table = total - m.layers * block, m.vocab_size * m.width
    ranks = w.shard_ranks
    sharded, blocks = -(-total // ranks), -(-m.layers * block // ranks)
    cast = ranks > 1 or b != master

    saved = saved_bytes_per_token(m, w.policy, b)
    row = t * m.width * b
    again = 0 if w.policy in ("none", "offload") else t * (saved_bytes_per_token(m, "none", b) - saved)
    bounds = 16 * t * w.hops * len(m.distinct_windows)
    here = min(m.layers, IN_FLIGHT) if w.policy == "offload" else m.layers  # layers whose saved tensors are on the device
    stays = {
        "weights": sharded * master, "optimizer": 0 if w.states_on_host else sharded * w.state_bytes, "workspace": WORKSPACE,
        "batch": t * (3 * 8 + m.head_dim * wide) + bounds,
    }
    root_whole = root * b if cast else 0
    block_whole = block * b * (2 if ranks > 1 else 1) if cast else 0  # the next one is gathered ahead
    # unreduced sums of earlier micro-batches: whole on every rank, or sharded if each is reduced
    several, last = w.micro_batches > 1, w.grad_sync == "last"
    earlier = (total if last else sharded) * wide if several else 0
    earlier_root = (root if last else -(-root // ranks)) * wide if several else 0

    # what the reduction of the root unit lays out and puts out
    reduced = (root * wide + (0 if several else -(-root // ranks) * wide)) if cast else 0
    # in the backward pass, the one of the two that needs more: attention when the feed-forward's own tensors are gone, or that
    ffn_saved = t * (m.width + (0 if m.ffn_chunk else m.width + 4 * m.ffn_width)) * b
    ring = ring_bytes(w)
    attention, ffn = attention_bytes(w) - ffn_saved + ring, ffn_bytes(w)
    transient = again + max(attention, ffn + row)
    ring = ring if attention >= ffn + row else 0
    buckets = min(sharded, STATE_SLOTS * STATE_BUCKET) * w.state_bytes
    update = {"update": stays | {"gathered": root_whole, "gradients": sharded * master, "optimizer": buckets}}
    return (update if w.states_on_host else {}) | {
        "forward": stays | {
            "gathered": root_whole + block_whole, "gradients": earlier, "activations": t * (here - 1) * saved + row,
            "transient": forward_bytes(w),
        },
        "loss": stays | {
            "gathered": root_whole, "gradients": earlier, "activations": t * here * saved + 3 * row,
            "logits": table * wide + w.loss_rows * m.vocab_size * wide,  # the sum of the weight's gradient, and fp32 logits
        },
        "head backward": stays | {
            "gathered": root_whole, "gradients": earlier, "activations": t * here * saved + 3 * row, "logits": table * wide,
        },
        "last block": stays | {
            "gathered": root_whole + block_whole, "gradients": earlier + table * wide, "activations": t * here * saved,
            "transient": transient - ring, "kv_buffers": ring,
        },
        "first block": stays | {
            "gathered": root_whole + block_whole,
            "gradients": earlier_root + table * wide + blocks * master * (m.layers - 1) // m.layers + block * b,
            "activations": t * saved * (here if w.policy == "offload" else 1),
            "transient": transient - ring, "kv_buffers": ring,
        },
        "reduction": stays | {
            "gathered": root_whole,
            "gradients": blocks * master + root * b + earlier_root + reduced,
        },
    }


def host_state_bytes(w: Work) -> int:
    """Pinned host memory that a rank's optimizer states take with optim.offload."""
    return -(-sum(parameters(w.model).values()) // w.shard_ranks) * w.state_bytes if w.states_on_host else 0


def host_bytes(w: Work) -> int:
    """Pinned host memory that a rank's offloaded tensors take: states, and with activation=offload all layers' saved tensors but the last
    one's."""
    states = host_state_bytes(w)
    if w.policy != "offload":
        return states
    return states + w.tokens * (w.model.layers - 1) * saved_bytes_per_token(w.model, "none", w.compute_bytes)


def memory(w: Work, among: Collection[str] = ()) -> Memory:
    """Peak bytes of one rank by part, at the moment when they are most; ``among``: only these moments (empty: all)."""
    found = {name: parts for name, parts in phases(w).items() if not among or name in among}
    moments = {name: {part: parts.get(part, 0) for part in PARTS} for name, parts in found.items()}
    totals = {name: sum(parts.values()) for name, parts in moments.items()}
    phase = max(totals, key=lambda name: totals[name])
    return Memory(moments[phase], phase, totals)
