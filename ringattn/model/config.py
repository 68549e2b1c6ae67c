"""What a model is, as plain numbers: :class:`ModelConfig`, its checks and its parameter count."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from ringattn import cost


@dataclass
class ModelConfig:
    """The shape of one decoder of the Llama family.

    ``vocab_size``  distinct tokens; 0 = take it from the data (the caller fills it in before building the model)
    ``width`` E, ``layers``, ``heads`` H, ``kv_heads`` Hkv (H a multiple of Hkv), ``head_dim`` D (even; H * D need not equal E)
    ``ffn_width`` F  hidden width of the SwiGLU feed-forward
    ``rope_theta``   base of the rotary frequencies (arXiv 2104.09864)
    ``qk_norm``      RMSNorm over D of every query and key head, before the rotation (arXiv 2302.05442, as in Qwen 3 and Gemma 3)
    ``tied``         the output head is the embedding matrix
    ``windows``      attention windows in tokens, a pattern repeated over the layers; 0 = full causal attention
    ``softcap``      attention scores become ``c * tanh(s / c)`` (Gemma 2); 0 = off. The ``attend`` given to the model applies it.
    ``sinks``        one learned attention sink for each head and layer (arXiv 2309.17453, as in gpt-oss)
    ``init_std``     standard deviation of the initial weights; see :mod:`ringattn.model.init`
    ``ffn_chunk``    tokens per chunk of the blockwise feed-forward (arXiv 2305.19370); 0 = whole and not recomputed
    ``loss_chunk``   tokens per chunk of head and cross-entropy; at most [loss_chunk, vocab_size] logits exist at once
    """

    name: str = "custom"
    vocab_size: int = 0
    width: int = 128
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    ffn_width: int = 512
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5
    qk_norm: bool = False
    tied: bool = True
    windows: list[int] = field(default_factory=lambda: [0])
    softcap: float = 0.0
    sinks: bool = False
    init_std: float = 0.02
    ffn_chunk: int = 0
    loss_chunk: int = 1024

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

        for key in ("width", "layers", "heads", "kv_heads", "head_dim", "ffn_width", "loss_chunk"):
            check(getattr(self, key) >= 1, key, "must be at least 1")
        for key, meaning in (("vocab_size", "0 takes it from the data"), ("ffn_chunk", "0 means the whole sequence at once")):
            check(getattr(self, key) >= 0, key, f"must be 0 or more ({meaning})")
        if self.kv_heads >= 1:
            check(self.heads % self.kv_heads == 0, "heads", f"must be a multiple of {prefix}.kv_heads={self.kv_heads}")
        check(self.head_dim % 2 == 0, "head_dim", "must be even (rotary embedding turns pairs)")
        check(self.rope_theta > 1 and math.isfinite(self.rope_theta), "rope_theta", "must be a finite number above 1")
        check(0 < self.norm_eps < 1, "norm_eps", "must lie between 0 and 1")
        check(0 < self.init_std < math.inf, "init_std", "must be a finite number above 0")
        check(0 <= self.softcap < math.inf, "softcap", "must be 0 (off) or a finite number above 0")
        check(len(self.windows) > 0, "windows", "needs at least one entry, e.g. [0] for full attention")
        check(all(w >= 0 for w in self.windows), "windows", "every entry must be 0 (full) or a number of tokens")

    def parameters(self) -> int:
        """How many parameters the model has (a tied head counts once). Needs ``vocab_size``; with 0 it counts the rest."""
        return sum(cost.parameters(self).values())
