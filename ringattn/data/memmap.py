"""Pre-tokenised corpora on disk: the format, its writer and its reader.

A corpus is a folder of little-endian arrays without headers and one json file:

    tokens.bin       uint16 or uint32 [N]   uint32 only where the vocabulary has more than 65,536 tokens
    offsets.bin      int64 [D + 1]          the document borders, strictly increasing from 0 to N
    identities.bin   uint64 [D]             a hash of each document's content: it decides what is held out for validation
    mask.bin         uint8 [N]              optional; 0: the token is read but never predicted, 1: it is a target as usual
    metadata.json    format, version, name, dtype, vocab_size, tokens (N), documents (D), bytes_per_token (or null),
                     sha256 (of each .bin file)

The folder holds no rows, no padding and no shuffling, so it fits any row length, seed, and number of ranks. It is written under a
temporary name and renamed when complete: a folder of the right name is a whole one. Reading maps the files and writes nothing.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

import numpy as np

from ringattn.data.config import DataError
from ringattn.data.corpus import Corpus

FORMAT, VERSION = "ringattn-tokens", 1
ARRAYS = {"offsets": "<i8", "identities": "<u8", "mask": "|u1"}
VERIFY_LIMIT_BYTES = 2**30
CHUNK_BYTES = 2**24


class _Out:
    """A file that is hashed as it is written."""

    def __init__(self, path: Path) -> None:
        self.file: BinaryIO = open(path, "wb")  # noqa: SIM115 - closed by `close`
        self.digest = hashlib.sha256()

    def write(self, array: np.ndarray) -> None:
        data = array.tobytes()
        self.file.write(data)
        self.digest.update(data)

    def close(self) -> str:
        self.file.flush()
        os.fsync(self.file.fileno())
        self.file.close()
        return self.digest.hexdigest()


class TokenWriter:
    """Writes a corpus document by document; the folder ``out`` appears when the ``with`` block ends without an error.

    Raises ValueError for a document that is empty, not integers, outside the vocabulary, or whose mask does not fit; FileExistsError
    where ``out`` exists, unless ``overwrite``. A block that fails leaves nothing behind, and an older ``out`` as it was.
    """

    def __init__(
        self, out: str | os.PathLike[str], *, vocab_size: int, name: str, bytes_per_token: float | None = None, overwrite: bool = False
    ) -> None:
        if not 1 <= vocab_size <= 2**32:
            raise ValueError(f"vocab_size={vocab_size}: must be from 1 to 2^32")
        if bytes_per_token is not None and not (math.isfinite(bytes_per_token) and bytes_per_token > 0):
            raise ValueError(f"bytes_per_token={bytes_per_token}: must be above 0")
        self.out, self.overwrite = Path(out), overwrite
        if os.path.lexists(self.out) and not overwrite:
            raise FileExistsError(f"{self.out} exists already")
        if os.path.lexists(self.out) and not (self.out / "metadata.json").is_file():
            raise FileExistsError(f"{self.out} is not a corpus, so it is not overwritten")
        self.vocab_size, self.name, self.bytes_per_token = vocab_size, name, bytes_per_token
        self.dtype = np.dtype("<u2" if vocab_size <= 2**16 else "<u4")
        self.temporary = self.out.with_name(f".{self.out.name}.tmp-{os.getpid()}")
        self.tokens = self.documents = 0
        self._files: dict[str, _Out] = {}

    def __enter__(self) -> Self:
        self.out.parent.mkdir(parents=True, exist_ok=True)
        self.temporary.mkdir()
        self._files = {key: _Out(self.temporary / f"{key}.bin") for key in ("tokens", "offsets", "identities")}
        self._files["offsets"].write(np.zeros(1, "<i8"))
        return self

    def add(self, tokens: np.ndarray, identity: int, mask: np.ndarray | None = None) -> None:
        """One document: integer tokens [n], its `identity`, and an optional loss mask [n] of 0 and 1."""
        if tokens.ndim != 1 or tokens.dtype.kind not in "iu" or len(tokens) == 0:
            raise ValueError("a document must be a non-empty list of whole numbers")
        low, high = int(tokens.min()), int(tokens.max())
        if low < 0 or high >= self.vocab_size:
            raise ValueError(f"token {low if low < 0 else high}: must be from 0 to {self.vocab_size - 1}, the vocabulary's last")
        if mask is not None:
            if mask.shape != tokens.shape or mask.dtype.kind not in "iub" or not np.isin(mask, (0, 1)).all():
                raise ValueError(f"a loss mask must be one 0 or 1 for each of the document's {len(tokens)} tokens")
            self._open_mask()
        if "mask" in self._files:
            self._files["mask"].write(np.ones(len(tokens), np.uint8) if mask is None else mask.astype(np.uint8))
        self.tokens += len(tokens)
        self.documents += 1
        self._files["tokens"].write(tokens.astype(self.dtype))
        self._files["offsets"].write(np.asarray([self.tokens], "<i8"))
        self._files["identities"].write(np.asarray([identity], "<u8"))

    def _open_mask(self) -> None:
        """The first mask makes the mask file; the documents before it are targets throughout."""
        if "mask" not in self._files:
            self._files["mask"] = _Out(self.temporary / "mask.bin")
            for start in range(0, self.tokens, CHUNK_BYTES):
                self._files["mask"].write(np.ones(min(CHUNK_BYTES, self.tokens - start), np.uint8))

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            hashes = {key: file.close() for key, file in self._files.items()}
            if kind is None:
                self._finish(hashes)
        finally:
            shutil.rmtree(self.temporary, ignore_errors=True)

    def _finish(self, hashes: dict[str, str]) -> None:
        if self.documents == 0:
            raise ValueError("no document was written: the source holds no tokens")
        metadata = {
            "format": FORMAT,
            "version": VERSION,
            "name": self.name,
            "dtype": "uint16" if self.dtype.itemsize == 2 else "uint32",
            "vocab_size": self.vocab_size,
            "tokens": self.tokens,
            "documents": self.documents,
            "bytes_per_token": self.bytes_per_token,
            "sha256": hashes,
        }
        with open(self.temporary / "metadata.json", "w", encoding="utf-8") as file:
            json.dump(metadata, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        if self.overwrite and os.path.lexists(self.out):  # a folder cannot be renamed onto a full one: between two renames there is none
            old = self.temporary.with_name(self.temporary.name + "-old")
            os.rename(self.out, old)
            os.rename(self.temporary, self.out)
            shutil.rmtree(old)
        else:
            os.rename(self.temporary, self.out)


def open_memmap(path: str, verify: str = "auto") -> Corpus:
    """The corpus in the folder ``path``, mapped. What is damaged is refused by a DataError; how deep it looks: see `DataConfig.verify`."""
    folder = Path(path)

    def refuse(what: str) -> DataError:
        return DataError("data.path", path, f"{what}; write the folder again with scripts/prepare_data.py")

    meta = _read_metadata(folder, path)
    total, documents, vocab_size = meta["tokens"], meta["documents"], meta["vocab_size"]
    kinds = {"tokens": np.dtype(meta["dtype"]).newbyteorder("<"), **{key: np.dtype(kind) for key, kind in ARRAYS.items()}}
    counts = {"tokens": total, "offsets": documents + 1, "identities": documents, "mask": total}
    if (folder / "mask.bin").exists() != ("mask" in meta["sha256"]):
        raise refuse(f"mask.bin is {'missing' if 'mask' in meta['sha256'] else 'not known to metadata.json'}")
    arrays: dict[str, np.ndarray] = {}
    for key in meta["sha256"]:
        file, expected = folder / f"{key}.bin", counts[key] * kinds[key].itemsize
        try:
            size = file.stat().st_size
            if size == expected:
                arrays[key] = np.memmap(file, kinds[key], "r", shape=(counts[key],))
        except OSError as error:
            raise refuse(f"cannot read {key}.bin ({error.strerror})") from None
        if size != expected:
            raise refuse(f"{key}.bin holds {size} bytes and metadata.json says {expected}: it is cut short or from another corpus")
    offsets = np.array(arrays["offsets"], np.int64)
    if offsets[0] != 0 or offsets[-1] != total:
        raise refuse(f"offsets.bin runs from {offsets[0]} to {offsets[-1]}, and must from 0 to {total}, the number of tokens")
    if (np.diff(offsets) <= 0).any():
        bad = int(np.argmax(np.diff(offsets) <= 0))
        raise refuse(f"offsets.bin must increase, and does not after document {bad} ({offsets[bad]}, then {offsets[bad + 1]})")
    if verify == "full" or (verify == "auto" and arrays["tokens"].nbytes <= VERIFY_LIMIT_BYTES):
        for key, array in arrays.items():
            limit = {"tokens": vocab_size, "mask": 2}.get(key)
            if problem := _scan(key, array, meta["sha256"][key], limit):
                raise refuse(problem)
    fingerprint = hashlib.sha256(json.dumps([VERSION, meta["dtype"], vocab_size, sorted(meta["sha256"].items())]).encode()).hexdigest()
    per_token = meta["bytes_per_token"]
    bytes_per_token = float("nan") if per_token is None else float(per_token)
    identities = np.array(arrays["identities"], np.uint64)
    return Corpus(meta["name"], arrays["tokens"], offsets, identities, arrays.get("mask"), vocab_size, bytes_per_token, fingerprint)


def _scan(key: str, array: np.ndarray, expected: str, limit: int | None) -> str | None:
    """Reads the array once: what is wrong with it, if anything."""
    digest, step = hashlib.sha256(), CHUNK_BYTES // array.dtype.itemsize
    for start in range(0, len(array), step):
        part = np.ascontiguousarray(array[start : start + step])
        digest.update(part.data)
        if limit is not None and int(part.max()) >= limit:
            where = start + int(np.argmax(part >= limit))
            return f"{key}.bin holds {int(array[where])} at token {where}: must be below {limit}"
    return None if digest.hexdigest() == expected else f"{key}.bin is not the file that was written (its sha256 differs)"


def _read_metadata(folder: Path, path: str) -> dict[str, Any]:
    """metadata.json with every field of the right type, or a DataError."""
    try:
        meta = json.loads((folder / "metadata.json").read_text("utf-8"))
    except OSError as error:
        message = f"no corpus here, metadata.json cannot be read ({error.strerror}); scripts/prepare_data.py writes such a folder"
        raise DataError("data.path", path, message) from None
    except ValueError as error:
        raise DataError("data.path", path, f"metadata.json is damaged ({error})") from None
    if not isinstance(meta, dict) or meta.get("format") != FORMAT or meta.get("version") != VERSION:
        got = [meta.get("format"), meta.get("version")] if isinstance(meta, dict) else meta
        raise DataError("data.path", path, f"metadata.json has format and version {got}: must be {[FORMAT, VERSION]}")

    def count(key: str) -> bool:
        return type(meta.get(key)) is int and meta[key] >= 1

    per_token = meta.get("bytes_per_token")
    hashes = meta.get("sha256")
    names = set(hashes) if isinstance(hashes, dict) and all(isinstance(h, str) for h in hashes.values()) else set()
    wrong = [key for key in ("vocab_size", "tokens", "documents") if not count(key)]
    wrong += [] if isinstance(meta.get("name"), str) else ["name"]
    wrong += [] if meta.get("dtype") in ("uint16", "uint32") else ["dtype"]
    wrong += [] if per_token is None or (isinstance(per_token, int | float) and per_token > 0) else ["bytes_per_token"]
    wrong += [] if names in ({"tokens", "offsets", "identities"}, {"tokens", "offsets", "identities", "mask"}) else ["sha256"]
    if wrong:
        raise DataError("data.path", path, f"metadata.json is damaged: no valid {', '.join(wrong)}")
    return meta
