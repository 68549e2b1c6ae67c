"""The tokens: corpora, packed rows, and batches that are a pure function of (seed, step, row number, corpus)."""

from ringattn.data.config import DataConfig, DataError
from ringattn.data.corpus import BOS, BYTE_VOCAB_SIZE, EOS, Corpus, decode, encode
from ringattn.data.dataset import Batch, Dataset, build_dataset
from ringattn.data.memmap import TokenWriter, open_memmap
from ringattn.data.rows import IGNORE

__all__ = [
    "BOS",
    "BYTE_VOCAB_SIZE",
    "EOS",
    "IGNORE",
    "Batch",
    "Corpus",
    "DataConfig",
    "DataError",
    "Dataset",
    "TokenWriter",
    "build_dataset",
    "decode",
    "encode",
    "open_memmap",
]
