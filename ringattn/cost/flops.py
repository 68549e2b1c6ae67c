"""Parameters and FLOPs of a training step, by part. Plain arithmetic, no torch.

One multiply-add is 2 FLOPs. Three conventions for attention are in use, and a number means nothing without its name:

- ``visible``: the (query, key) pairs that the mask lets through, counted exactly; backward 2.5 x forward (5 matrix products for 2,
  since FlashAttention recomputes the scores). What this project reports unless it says otherwise.
- ``flash``: S^2 / 2 pairs a row (causal), whatever the documents or window; backward 2.5 x forward (FlashAttention-2,
  arXiv 2307.08691, section 4.1).
- ``palm``: S^2 pairs, backward 2 x forward, that is 6 N + 12 L H Q T FLOPs a token (PaLM, arXiv 2204.02311, appendix B).

The N of all three counts the parameters that multiply: the output head, tied or not, but neither the embedding lookup nor norms.

Symbols: E width, L layers, H heads, Hkv KV heads, D head dim, F FFN width, V vocabulary.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from ringattn.model.config import ModelConfig

Convention = Literal["visible", "flash", "palm"]
Policy = Literal["none", "block", "attention_saved", "offload"]

# Dense bf16 tensor-core peak, FLOP/s, from NVIDIA's data sheets (SXM unless named); the first pattern that matches counts.
PEAK_FLOPS = [
    (r"\bH100.*PCIe", 756e12),
    (r"\bH[12]00.*NVL", 835e12),
    (r"\bA100\b", 312e12),
    (r"\b(H100|H200|GH200)\b", 989e12),
    (r"\bGB200\b", 2500e12),
    (r"\bB200\b", 2250e12),
]


def peak_flops(device_name: str) -> float | None:
    """Dense bf16 peak in FLOP/s of a device named as ``torch.cuda.get_device_name`` does; None where unknown (CPU too)."""
    return next((peak for pattern, peak in PEAK_FLOPS if re.search(pattern, device_name)), None)


def mfu(flops: float, seconds: float, devices: int, device_name: str) -> float | None:
    """Model FLOPs utilisation, 0 to 1, of a step of ``flops`` in total; None where the device's peak is unknown."""
    peak = peak_flops(device_name)
    return None if peak is None else flops / (seconds * devices * peak)


# --- parameters ---------------------------------------------------------------------------------------------------------


def block_parameters(model: ModelConfig) -> dict[str, int]:
    """Parameters of one layer by part: attention and ffn matrices, norms (and QK-norm), sinks."""
    m = model
    return {
        "attention": m.width * m.head_dim * (2 * m.heads + 2 * m.kv_heads),
        "ffn": 3 * m.width * m.ffn_width,
        "norms": 2 * m.width + (2 * m.head_dim if m.qk_norm else 0),
        "sinks": m.heads if m.sinks else 0,
    }


def parameters(model: ModelConfig) -> dict[str, int]:
    """Parameters of the whole model by part; a tied head counts with the embedding, so that the sum is the true count."""
    parts = {part: count * model.layers for part, count in block_parameters(model).items()}
    parts["norms"] += model.width
    table = model.vocab_size * model.width
    return {"embedding": table, **parts, "head": 0 if model.tied else table}


# --- FLOPs --------------------------------------------------------------------------------------------------------------


def visible_pairs(seq_len: int, *, window: int = 0, causal: bool = True, documents: Sequence[int] | None = None) -> int:
    """Visible (query, key) pairs of one row and head. ``documents``: their lengths in tokens (padding not among them)."""
    pairs = 0
    for n in [seq_len] if documents is None else documents:
        w = min(window, n) if window else n
        pairs += w * n - w * (w - 1) // 2 if causal else n * n
    return pairs


@dataclass(frozen=True)
class Flops:
    """FLOPs of one step over all ranks. ``total`` is the model's own work (for MFU); ``recompute`` comes on top (for HFU)."""

    matmul_forward: float
    matmul_backward: float
    attention_forward: float
    attention_backward: float
    recompute: float
    convention: Convention

    @property
    def total(self) -> float:
        """Forward and backward without recomputation."""
        return self.matmul_forward + self.matmul_backward + self.attention_forward + self.attention_backward


def step_flops(
    model: ModelConfig,
    *,
    tokens: int,
    pairs: Sequence[int] | None = None,
    seq_len: int | None = None,
    convention: Convention = "visible",
    policy: Policy = "none",
) -> Flops:
    """FLOPs of one optimizer step.

    ``tokens``: all tokens of the step, padding and unlabelled ones included (they are computed).
    ``pairs``: for "visible": one number for each of ``model.distinct_windows``, the visible pairs per head summed over all rows of
    the step (``Schedule.pairs``, summed over micro-batches; times the rows if the schedule is bound to one row for all).
    ``seq_len``: for "flash" and "palm", tokens a row. ``policy``: what activation checkpointing recomputes ("attention_saved"
    is taken to save the blockwise feed-forward's output too, which is free: ``ringattn.model.FREE_TO_SAVE``). Raises
    ValueError if the convention's input is missing.
    """
    policy = "none" if policy == "offload" else policy  # nothing is run again
    windows = model.layer_windows
    if convention == "visible":
        if pairs is None or len(pairs) != len(model.distinct_windows):
            raise ValueError(f"convention 'visible' needs pairs for each of the windows {model.distinct_windows}, got {pairs}")
        by_window = dict(zip(model.distinct_windows, pairs, strict=True))
        all_pairs: float = sum(by_window[w] for w in windows)
    else:
        if seq_len is None:
            raise ValueError(f"convention {convention!r} needs seq_len")
        all_pairs = len(windows) * tokens * seq_len * (0.5 if convention == "flash" else 1.0)
    block = block_parameters(model)
    per_token = 2 * model.layers * (block["attention"] + block["ffn"])
    head = 2 * model.vocab_size * model.width
    attention = 4 * all_pairs * model.heads * model.head_dim

    # The down projection is never recomputed: no gradient needs its output.
    recompute: float = 2 * model.layers * tokens * (block["ffn"] * 2 // 3) if policy != "none" or model.ffn_chunk else 0
    if policy != "none":
        recompute += 2 * model.layers * tokens * block["attention"]
    if policy == "block":
        recompute += attention
        # A blockwise feed-forward is one op, run again as a whole by a policy that does not save its output.
        recompute += 2 * model.layers * tokens * block["ffn"] if model.ffn_chunk else 0
    return Flops(
        matmul_forward=tokens * (per_token + head),
        matmul_backward=2 * tokens * (per_token + head),
        attention_forward=attention,
        attention_backward=attention * (2.0 if convention == "palm" else 2.5),
        recompute=recompute,
        convention=convention,
    )
