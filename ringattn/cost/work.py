"""What a rank does in a step, as numbers: the config without everything that costs nothing. Plain arithmetic, no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ringattn.cost.flops import Policy, visible_pairs

if TYPE_CHECKING:
    from ringattn.model.config import ModelConfig


# What [rows, V] logits may take where the number of rows is chosen here (loss_chunk=0), and the most rows that are of any use.
LOGITS_BYTES = 251 << 20
MOST_ROWS = 8192


def logit_rows(vocab_size: int, wide_bytes: int) -> int:
    """Rows whose logits fit into :data:`LOGITS_BYTES`: a multiple of 64 where that leaves any, at least 1."""
    rows = min(MOST_ROWS, LOGITS_BYTES // (vocab_size * wide_bytes))
    return rows // 64 * 64 if rows >= 64 else max(1, rows)


@dataclass(frozen=True)
class Work:
    """One training step. ``ring`` real ranks x ``ulysses`` x ``shard`` x ``replicate`` GPUs, ``virtual`` shards a rank, ``inner`` shards
    a node (None: a ring of one level).

    ``documents``: mean visible length in tokens where attention stays within documents, 0 = whole rows. ``state_bytes``: optimizer
    states, bytes a parameter; ``states``: their kind (fp32, bf16, 8bit); ``states_on_host``: they wait there. ``model`` has its
    vocabulary filled in.
    """

    model: ModelConfig
    seq_len: int
    rows: int = 1
    micro_rows: int = 1
    ring: int = 1
    virtual: int = 1
    inner: int | None = None
    ulysses: int = 1
    shard: int = 1
    replicate: int = 1
    layout: str = "zigzag"
    exchange: str = "ring"
    wire: str = "exact"
    policy: Policy = "none"
    documents: int = 0
    compute_bytes: int = 2
    state_bytes: int = 8
    states: str = "fp32"
    states_on_host: bool = False
    grad_sync: str = "last"
    reshard: bool = True

    @property
    def wide_bytes(self) -> int:
        """Bytes of sums: fp32, fp64 in fp64."""
        return 8 if self.compute_bytes == 8 else 4

    @property
    def grad_wire_bytes(self) -> int:
        """Bytes of a travelling dK or dV."""
        return 2 if self.wire == "bf16" else self.wide_bytes

    @property
    def gpus(self) -> int:
        """Ranks of the whole run."""
        return self.ring * self.ulysses * self.shard * self.replicate

    @property
    def tokens(self) -> int:
        """Tokens on a rank in one micro-batch."""
        return self.micro_rows * self.seq_len // (self.ring * self.ulysses)

    @property
    def micro_batches(self) -> int:
        """Forward passes of a rank in a step."""
        return max(1, self.rows // (self.micro_rows * self.shard * self.replicate))

    @property
    def shard_ranks(self) -> int:
        """Ranks that parameters, gradients and states are sharded over."""
        return self.ring * self.ulysses * self.shard

    @property
    def blockwise_qkv(self) -> bool:
        """Whether norm, matrix and rotation of queries, keys and values are taken chunk by chunk too."""
        return bool(self.model.ffn_chunk) and not self.model.qk_norm

    @property
    def loss_rows(self) -> int:
        """Tokens whose logits exist at once."""
        return min(self.tokens, self.model.loss_chunk or logit_rows(self.model.vocab_size, self.wide_bytes))

    @property
    def hops(self) -> int:
        """Hops of the ring, at most: one a shard (the gathered exchange takes all shards in one)."""
        return self.ring * self.virtual

    @property
    def nodes(self) -> int:
        """Nodes of a ring of two levels; 1 in one of one level."""
        return self.ring * self.virtual // self.inner if self.inner else 1

    @property
    def node_ranks(self) -> int:
        """Ranks of the ring in a node of it."""
        return max(1, self.ring // self.nodes)

    @property
    def kv_width(self) -> int:
        """Numbers of K and V of one token on a rank in attention, where ulysses ranks share the heads."""
        return 2 * self.model.kv_heads * self.model.head_dim // min(self.ulysses, self.model.kv_heads)

    def pairs(self, window: int) -> int:
        """Visible pairs a head of one row."""
        if not self.documents:
            return visible_pairs(self.seq_len, window=window)
        whole, rest = divmod(self.seq_len, self.documents)
        return visible_pairs(self.seq_len, window=window, documents=[self.documents] * whole + ([rest] if rest else []))

    @property
    def step_pairs(self) -> list[int]:
        """Visible pairs a head of the whole step, for each distinct window."""
        return [self.rows * self.pairs(window) for window in self.model.distinct_windows]


def work_of(config: Any, model: ModelConfig, world_size: int, *, compute_bytes: int, documents: int = 0) -> Work:
    """The work of a training config (``ringattn.config.Config``) whose model has its vocabulary."""
    p, t = config.parallel, config.train
    ring = config.ring_processes(world_size)
    tensors = 2 if config.optim.name == "adamw" else int(config.optim.momentum > 0)
    each = {"bf16": 2, "8bit": 1}.get(config.optim.states, 8 if compute_bytes == 8 else 4)
    return Work(
        model=model, seq_len=t.seq_len, rows=t.rows, micro_rows=t.micro_rows, ring=ring, virtual=p.virtual, inner=p.inner,
        ulysses=p.ulysses,
        shard=p.shard, replicate=p.replicate, layout=p.layout, exchange=p.exchange, wire=p.wire, policy=config.activation,
        documents=documents, compute_bytes=compute_bytes, state_bytes=tensors * each, states=config.optim.states,
        states_on_host=config.optim.offload, grad_sync=p.grad_sync, reshard=p.reshard_after_forward,
    )
