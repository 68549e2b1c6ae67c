"""The transformers example: same logits and gradients as eager attention (skipped where transformers is not installed)."""

import importlib.util
from pathlib import Path

import pytest

from ringattn import Ring

pytest.importorskip("transformers")


@pytest.mark.parametrize("model, layout, virtual", [("llama", "zigzag", 4), ("llama", "contiguous", 1), ("qwen3", "striped", 3)])
def test_same_logits_and_gradients_as_eager_attention(model, layout, virtual):
    path = Path(__file__).parents[2] / "examples" / "transformers_ring.py"
    spec = importlib.util.spec_from_file_location("transformers_ring", path)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    errors = example.compare(model, Ring(virtual=virtual), layout, seed=int(pytest.importorskip("torch").initial_seed()))
    assert max(errors.values()) < 5e-6, errors  # eager attention's softmax is fp32
