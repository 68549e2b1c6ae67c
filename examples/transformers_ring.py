"""Ring attention inside a Hugging Face transformers model, through its attention-function registry: no change to the model's code.

    python examples/transformers_ring.py                                              one process, a virtual ring of 4
    torchrun --standalone --nproc-per-node 2 examples/transformers_ring.py            two processes x 2 virtual shards
    python examples/transformers_ring.py --model qwen3 --layout striped

Makes a small Llama (or Qwen3, with sliding windows) from a local config, no download. Each process feeds it the tokens and positions of
its own shard; everything but attention is row-local, so attention is all that has to know of the ring. Prints how far logits and
parameter gradients are from eager attention over the whole sequence on one device: about 1e-7, because eager attention takes its softmax
in fp32 whatever the model's dtype.

What a registry function sees are q, k, v and the layer's options. Which positions a shard holds, and which documents are packed into the
row, it gets from the object that is registered; a padding mask given to the model does not reach it (use documents, -1 for padding).
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.distributed as dist
from einops import rearrange
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, Qwen3Config
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ringattn import Layout, Ring, ring_attention


class RingAttention:
    """An attention function for ``ALL_ATTENTION_FUNCTIONS``. ``documents``: int [S] or [B, S] of the batch at hand, or None."""

    def __init__(self, ring: Ring, layout: Layout) -> None:
        self.ring, self.layout = ring, layout
        self.documents: Tensor | None = None

    def __call__(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, scaling: float | None = None,
        dropout: float = 0.0, sliding_window: int | None = None, softcap: float | None = None, s_aux: Tensor | None = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        """query [B, H, S / P, D], key and value [B, Hkv, S / P, D] -> [B, S / P, H, D]. Schedules are cached by content."""
        if attention_mask is not None or dropout:
            raise ValueError("ring attention takes documents instead of an attention mask, and offers no dropout")
        q, k, v = (rearrange(x, "b h s d -> b s h d") for x in (query, key, value))
        out = ring_attention(
            q, k, v, ring=self.ring, layout=self.layout, causal=getattr(module, "is_causal", True), window=sliding_window,
            documents=self.documents, scale=scaling, softcap=softcap, sinks=s_aux,
        )
        assert isinstance(out, Tensor)
        return out, None


def make_config(name: str) -> PreTrainedConfig:
    """A small model of a family, four query heads a KV head."""
    shape: dict[str, Any] = {
        "vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 4096,
    }
    match name:
        case "llama":
            return LlamaConfig(**shape)
        case "qwen3":  # its second layer has a sliding window
            return Qwen3Config(**shape, use_sliding_window=True, sliding_window=9, max_window_layers=1)
    raise ValueError(f"model {name!r} is unknown, choose from llama, qwen3")


def gradients(model: nn.Module, logits: Tensor, labels: Tensor, count: int) -> dict[str, Tensor]:
    """Gradients of the sum over these labels divided by the number of all labels, so that shards add up."""
    loss = cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum") / count
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def compare(name: str, ring: Ring, layout_kind: str, seq_len: int = 96, seed: int = 0) -> dict[str, float]:
    """Relative errors of ring attention against eager attention: of the logits, and the worst of any parameter's gradient."""
    torch.manual_seed(seed)
    layout = Layout(layout_kind, seq_len, ring.size)
    attention = RingAttention(ring, layout)
    ALL_ATTENTION_FUNCTIONS.register("ring", attention)
    model = AutoModelForCausalLM.from_config(make_config(name), attn_implementation="eager").double()
    tokens = torch.randint(0, 97, (2, seq_len))
    labels = torch.cat([tokens[:, 1:], torch.full((2, 1), -100)], 1)  # shifted on the whole row, before any sharding
    count = int((labels != -100).sum())

    gold = model(tokens, use_cache=False).logits
    gold_gradients = gradients(model, gold, labels, count)

    model.set_attn_implementation("ring")
    local, positions = layout.shard(tokens, ring), layout.positions(ring)[None]
    logits = model(local, position_ids=positions, use_cache=False).logits
    own = gradients(model, logits, layout.shard(labels, ring), count)
    if ring.processes > 1:
        for gradient in own.values():
            dist.all_reduce(gradient, group=ring.group)

    def error(x: Tensor, y: Tensor) -> float:
        return ((x - y).norm() / y.norm()).item()

    return {
        "logits": error(layout.unshard(logits.detach(), ring), gold.detach()),
        "gradients": max(error(own[n], g) for n, g in gold_gradients.items()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama", choices=("llama", "qwen3"))
    parser.add_argument("--layout", default="zigzag", choices=("contiguous", "zigzag", "striped"))
    args = parser.parse_args()
    if dist.is_torchelastic_launched():
        dist.init_process_group("gloo")
    processes = dist.get_world_size() if dist.is_initialized() else 1
    ring = Ring(virtual=max(1, 4 // processes))
    errors = compare(args.model, ring, args.layout, seq_len=96 * ring.size // 4 * 4)
    print(f"{args.model}, {args.layout}, {ring}: relative error of logits {errors['logits']:.1e}, of gradients {errors['gradients']:.1e}")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
