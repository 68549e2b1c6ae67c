"""Formulas of the papers that this project follows, in their own symbols, for comparison with the cost model and for quick estimates.

Ring Attention with Blockwise Transformers, arXiv 2310.01889; Striped Attention, arXiv 2311.09431. b batch, s sequence, h width, n heads,
c block (tokens a device); bytes are for bfloat16.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ringattn.cost.flops import block_parameters, parameters, visible_pairs

if TYPE_CHECKING:
    from ringattn.model.config import ModelConfig


def minimal_block(peak_flops: float, link_bytes_s: float) -> float:
    """Tokens a device from which a hop's computation hides its messages: 4 d c^2 / F >= 4 c d / B, so c >= F / B (2310.01889, sect. 3)."""
    return peak_flops / link_bytes_s


def minimal_sequence(peak_flops: float, link_bytes_s: float) -> float:
    """Table 2's minimal sequence length a device: 6 blocks, since that is how many a device holds (2310.01889, sect. 3)."""
    return 6 * minimal_block(peak_flops, link_bytes_s)


def activation_bytes(kind: str, *, b: int, s: int, h: int, n: int, c: int) -> tuple[int, int, int]:
    """Table 1 of 2310.01889: largest activations a layer of (self-attention, feed-forward, both), as printed there.

    ``kind``: vanilla | memory_efficient | blockwise | ring. (The printed total of vanilla, 2 b h s^2, has h where its own attention
    column has n; the larger of the two columns is 2 b n s^2.)
    """
    match kind:
        case "vanilla":
            return 2 * b * n * s * s, 8 * b * s * h, 2 * b * h * s * s
        case "memory_efficient":
            return 2 * b * s * h + 4 * b * c * h, 8 * b * s * h, 8 * b * s * h
        case "blockwise":
            return 2 * b * s * h, 2 * b * s * h, 2 * b * s * h
        case "ring":
            return 6 * b * c * h, 2 * b * c * h, 6 * b * c * h
    raise ValueError(f"kind={kind}: must be vanilla, memory_efficient, blockwise or ring")


def dataset_cost_ratio(width: int, seq_len: int, base: int) -> float:
    """FLOPs of training on the same tokens in rows of ``seq_len`` over those in rows of ``base`` (2310.01889, appendix D): the blocks'
    (24 s h^2 + 4 s^2 h), attention not counted as causal."""

    def per_token(s: int) -> float:
        return 24 * width**2 + 4 * s * width

    return per_token(seq_len) / per_token(base)


def ring_context(blockwise: int, devices: int) -> int:
    """Context of a ring of ``devices`` each of which holds ``blockwise`` tokens: memory does not depend on the ring's size."""
    return blockwise * devices


def striped_speedup(model: ModelConfig, *, seq_len: int, ring: int, attention_cost: float = 1.0) -> float:
    """The theoretical maximum speedup of the striped over the contiguous layout (2311.09431, section 4).

    Everything but matrix products is free, communication hidden. Contiguous: in each round but the first some device has a whole
    c x c block; striped: half of it always. The paper gives no FLOP count; its 103 figures follow from a block that is run
    again (products 4 x forward, the head's 3 x) around an attention whose own backward recomputes it once more (5 x forward).
    ``attention_cost``: of a FLOP in attention over one outside (2 in the paper's A100 runs: TF32 beside bf16).
    """
    block = seq_len // ring
    flat = 4 * model.layers * (block_parameters(model)["attention"] + block_parameters(model)["ffn"])
    flat += 3 * (parameters(model)["head"] or parameters(model)["embedding"])
    other = 2.0 * block * flat
    pair = 5 * attention_cost * 4 * model.layers * model.heads * model.head_dim
    diagonal = visible_pairs(block)
    contiguous, striped = diagonal + (ring - 1) * block * block, ring * diagonal
    return (other + pair * contiguous) / (other + pair * striped)
