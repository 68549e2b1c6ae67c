"""The network: a Llama-family decoder whose attention is handed in (see :mod:`ringattn.model.transformer`)."""

from ringattn.model.config import ModelConfig
from ringattn.model.loss import IGNORE, linear_cross_entropy
from ringattn.model.transformer import FREE_TO_SAVE, Attend, Block, Transformer

__all__ = ["FREE_TO_SAVE", "IGNORE", "Attend", "Block", "ModelConfig", "Transformer", "linear_cross_entropy"]
