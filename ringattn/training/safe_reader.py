"""Reading a checkpoint's index and tensors without ever running code that comes with them.

torch.distributed.checkpoint keeps its index (``.metadata``) as a pickle, and a pickle can name any function to call. Here it is
unpickled with a list of the few classes that an index consists of; anything else is refused. What it says is then checked: tensors only
(entries of other types would be unpickled by torch), and only files that lie in the folder itself. The tensors' own bytes are read by
torch with ``weights_only=True``.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

INDEX = ".metadata"

# Every name that an index of torch 2.9 to 2.13 uses; dtypes come on top. None of them does more than hold values.
ALLOWED = {
    ("collections", "OrderedDict"),
    ("pathlib", "Path"),
    ("pathlib", "PosixPath"),
    ("pathlib", "WindowsPath"),
    ("pathlib", "PurePosixPath"),
    ("pathlib._local", "PosixPath"),
    ("pathlib._local", "WindowsPath"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.distributed.checkpoint.metadata", "BytesStorageMetadata"),
    ("torch.distributed.checkpoint.metadata", "ChunkStorageMetadata"),
    ("torch.distributed.checkpoint.metadata", "Metadata"),
    ("torch.distributed.checkpoint.metadata", "MetadataIndex"),
    ("torch.distributed.checkpoint.metadata", "StorageMeta"),
    ("torch.distributed.checkpoint.metadata", "TensorProperties"),
    ("torch.distributed.checkpoint.metadata", "TensorStorageMetadata"),
    ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"),
}


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be used: incomplete, damaged, or made by something else. The message names it and says why."""


class SaveError(RuntimeError):
    """A checkpoint could not be written, and nothing of it is left. The message says why and which complete one there is."""


class _IndexUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in ALLOWED or (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)):
            return super().find_class(module, name)
        raise CheckpointError(f"its index names {module}.{name}, which no checkpoint of tensors needs: not loaded")


def read_index(folder: Path) -> Metadata:
    """The index of a checkpoint folder. Raises CheckpointError if it is missing, damaged, or asks for more than tensors of this folder."""
    try:
        with open(folder / INDEX, "rb") as file:
            index = _IndexUnpickler(file).load()
    except CheckpointError as error:
        raise CheckpointError(f"checkpoint {folder}: {error}") from None
    except Exception as error:  # a damaged pickle can raise nearly anything
        raise CheckpointError(f"checkpoint {folder}: its index {INDEX} cannot be read ({type(error).__name__}: {error})") from None
    if not isinstance(index, Metadata) or not isinstance(index.storage_data, dict) or not isinstance(index.state_dict_metadata, dict):
        raise CheckpointError(f"checkpoint {folder}: {INDEX} is not the index of a checkpoint")
    for key, entry in index.state_dict_metadata.items():
        if not isinstance(entry, TensorStorageMetadata):
            raise CheckpointError(f"checkpoint {folder}: its entry {key} is not a tensor: not loaded")
    for where in index.storage_data.values():
        name = getattr(where, "relative_path", None)
        if not isinstance(name, str) or Path(name).name != name or not (folder / name).is_file():
            raise CheckpointError(f"checkpoint {folder}: its index points to {name!r}, which is no file of this folder")
        if getattr(where, "transform_descriptors", None):
            raise CheckpointError(f"checkpoint {folder}: {name} is stored with transformations, which are not offered")
    return index


class SafeReader(FileSystemReader):
    """A reader whose index has been read by :func:`read_index`; the base class would unpickle it without a list."""

    def __init__(self, folder: Path, index: Metadata) -> None:
        super().__init__(folder)
        self._index = index

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The checked index (the same on all ranks)."""
        return self._index
