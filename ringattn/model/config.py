"""What a model is, as plain numbers: :class:`ModelConfig`, its checks and its parameter count."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from ringattn import cost


@dataclass
class ModelConfig:
    """The shape of one decoder of the Llama family.

    E width, H heads, Hkv kv_heads, D head_dim, F ffn_width. The ``attend`` given to the model applies softcap and sinks.
    """

    name: str = "custom"  # shown in the header of a run
    vocab_size: int = 0  # distinct tokens; 0 = take it from the data (the caller fills it in before building the model)
    width: int = 128  # E
    layers: int = 4  # decoder blocks
    heads: int = 4  # query heads, a multiple of kv_heads
    kv_heads: int = 2  # key and value heads
    head_dim: int = 32  # D, even; heads x head_dim need not equal width
    ffn_width: int = 512  # hidden width of the SwiGLU feed-forward
    rope_theta: float = 10_000.0  # base of the rotary frequencies (arXiv 2104.09864)
    norm_eps: float = 1e-5  # of every RMSNorm
    qk_norm: bool = False  # RMSNorm of every query and key head before the rotation (arXiv 2302.05442, as in Qwen 3 and Gemma 3)
    tied: bool = True  # the output head is the embedding matrix
    windows: list[int] = field(default_factory=lambda: [0])  # attention windows in tokens, repeated over the layers; 0 = full causal
    softcap: float = 0.0  # attention scores become c * tanh(s / c) (Gemma 2); 0 = off
    sinks: bool = False  # one learned attention sink for each head and layer (arXiv 2309.17453, as in gpt-oss)
    init_std: float = 0.02  # standard deviation of the initial weights; see ringattn/model/init.py
    ffn_chunk: int = 0  # tokens at once in the blockwise feed-forward (arXiv 2305.19370); 0 = whole, not recomputed
    loss_chunk: int = 1024  # tokens at once in head and loss, at most [loss_chunk, vocab_size] logits exist; 0 = what fits 251 MiB
    logit_softcap: float = 0.0  # output logits become c * tanh(z / c) before the loss (Gemma 2); 0 = off
    z_loss: float = 0.0  # adds z_loss * (log of the softmax's denominator)^2 to each target's training loss (PaLM); 0 = off

    @property
    def layer_windows(self) -> list[int]:
        """The window of each layer, in tokens (0 = full)."""
        return [self.windows[i % len(self.windows)] for i in range(self.layers)]

    @property
    def distinct_windows(self) -> list[int]:
        """The windows that occur, in the order of their first layer: one schedule is needed for each."""
        return list(dict.fromkeys(self.layer_windows))

    def validate(self, problems: list[str], prefix: str = "model") -> None:
        """Append one message ``<key>=<value>: <what is allowed>`` to ``problems`` for every mistake."""

        def check(ok: bool, key: str, allowed: str) -> None:
            if not ok:
                problems.append(f"{prefix}.{key}={getattr(self, key)}: {allowed}")

        for key in ("width", "layers", "heads", "kv_heads", "head_dim", "ffn_width"):
            check(getattr(self, key) >= 1, key, "must be at least 1")
        for key, meaning in (("vocab_size", "0 takes it from the data"), ("ffn_chunk", "0 means the whole sequence at once"),
                             ("loss_chunk", "0 chooses by memory")):
            check(getattr(self, key) >= 0, key, f"must be 0 or more ({meaning})")
        if self.kv_heads >= 1:
            check(self.heads % self.kv_heads == 0, "heads", f"must be a multiple of {prefix}.kv_heads={self.kv_heads}")
        check(self.head_dim % 2 == 0, "head_dim", "must be even (rotary embedding turns pairs)")
        check(self.rope_theta > 1 and math.isfinite(self.rope_theta), "rope_theta", "must be a finite number above 1")
        check(0 < self.norm_eps < 1, "norm_eps", "must lie between 0 and 1")
        check(0 < self.init_std < math.inf, "init_std", "must be a finite number above 0")
        check(0 <= self.softcap < math.inf, "softcap", "must be 0 (off) or a finite number above 0")
        check(0 <= self.logit_softcap < math.inf, "logit_softcap", "must be 0 (off) or a finite number above 0")
        check(0 <= self.z_loss < math.inf, "z_loss", "must be 0 (off) or a finite number above 0")
        check(len(self.windows) > 0, "windows", "needs at least one entry, e.g. [0] for full attention")
        check(all(w >= 0 for w in self.windows), "windows", "every entry must be 0 (full) or a number of tokens")

    def parameters(self) -> int:
        """How many parameters the model has (a tied head counts once). Needs ``vocab_size``; with 0 it counts the rest."""
        return sum(cost.parameters(self).values())
