"""Documents as one array of tokens: the corpus, the byte tokenizer, and the two corpora that are read from text files.

A corpus is N tokens [N] and the border of each of its D documents, offsets [D + 1]. Text is tokenised by bytes: a token is a byte
value (0 to 255), and each document stands between BOS (256) and EOS (257), so the vocabulary is 258. Files are documents, in the
order of their relative posix paths; a file of no bytes holds nothing to learn and makes no document.

Nothing is ever written. Text lives in memory once, at two bytes a token.
"""

from __future__ import annotations

import glob
import hashlib
import os
import platform
import sysconfig
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ringattn.data.config import DataError

BOS, EOS, BYTE_VOCAB_SIZE = 256, 257, 258
TEXT_LIMIT_BYTES = 4 * 2**30


@dataclass(frozen=True, eq=False)
class Corpus:
    """All documents of a data set, in a fixed order.

    ``tokens``: uint16 or uint32 [N], in memory or mapped. ``offsets``: int64 [D + 1], strictly increasing from 0 to N; document d is
    ``tokens[offsets[d]:offsets[d + 1]]``. ``identities``: uint64 [D], a hash of each document's content (equal content, equal
    identity). ``mask``: uint8 [N] or None; a token with 0 is read but never predicted. ``vocab_size``: all tokens are below it.
    ``bytes_per_token``: bytes of text a token stands for (NaN where it is not known). ``fingerprint``: sha256, in hexadecimal digits,
    over what the corpus is: names, lengths and contents.
    """

    name: str
    tokens: np.ndarray
    offsets: np.ndarray
    identities: np.ndarray
    mask: np.ndarray | None
    vocab_size: int
    bytes_per_token: float
    fingerprint: str

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each document, int64 [D]."""
        return np.diff(self.offsets)


def encode(content: bytes) -> np.ndarray:
    """BOS, the bytes, EOS: uint16 [len(content) + 2]."""
    tokens = np.empty(len(content) + 2, np.uint16)
    tokens[0], tokens[-1] = BOS, EOS
    tokens[1:-1] = np.frombuffer(content, np.uint8)
    return tokens


def decode(tokens: Iterable[int]) -> bytes:
    """The bytes among the tokens; BOS and EOS say nothing."""
    return bytes(int(t) for t in tokens if t < 256)


def identity(content: bytes) -> int:
    """64 bits that stand for a document's content, the same on every machine."""
    return int.from_bytes(hashlib.sha256(content).digest()[:8], "little")


# 1. Find: which files, under which names.


@dataclass(frozen=True)
class TextFile:
    """A text file, and its relative posix path as its name in the corpus."""

    name: str
    path: Path


def find_stdlib(root: str | os.PathLike[str] | None = None) -> list[TextFile]:
    """The *.py files of this Python's standard library.

    Left out is what comes from the machine and not from Python: installed packages, caches, the build's own settings
    (``config-*``, ``_sysconfigdata*``) and the site's start-up files.
    """
    root = Path(root or sysconfig.get_path("stdlib"))

    def enter(folder: str) -> bool:
        return folder not in ("site-packages", "dist-packages", "__pycache__") and not folder.startswith("config-")

    def keep(name: str) -> bool:
        return name.endswith(".py") and not name.startswith(("_sysconfigdata", "sitecustomize", "usercustomize"))

    # A distribution may leave dangling links behind in its library: they are no part of Python.
    files = [f for f in _walk(root, "data.kind", "stdlib", enter, keep) if f.path.is_file()] if root.is_dir() else []
    if not files:
        message = f"this Python has no source files in {root}; train on your own text (data=text data.path=...)"
        raise DataError("data.kind", "stdlib", message)
    return files


def find_text(path: str) -> list[TextFile]:
    """The files that ``data.path`` means: a file, all files of a folder (hidden ones left out), or the matches of a glob (``**`` too).

    Names are relative to the folder, or to the glob's part before its first wildcard, so a corpus may move as a whole.
    """
    if os.path.isdir(path):
        files = _walk(Path(path), "data.path", path, lambda folder: True, lambda name: True)
    elif os.path.lexists(path):
        files = [TextFile(os.path.basename(path), Path(path))]
    elif glob.has_magic(path):
        root = Path(path)
        while glob.has_magic(str(root)):
            root = root.parent
        hits = (Path(hit) for hit in glob.glob(path, recursive=True) if not os.path.isdir(hit))
        files = [TextFile(hit.relative_to(root).as_posix(), hit) for hit in hits]
    else:
        raise DataError("data.path", path, "no such file or folder, and not a glob")
    if not files:
        raise DataError("data.path", path, "no file here; give a file, a folder or a glob of text files")
    return sorted(files, key=lambda f: f.name)


def _walk(root: Path, key: str, value: str, enter: Callable[[str], bool], keep: Callable[[str], bool]) -> list[TextFile]:
    """All kept files below ``root``, sorted by name; hidden files and folders are not entered."""

    def refuse(error: OSError) -> None:
        raise DataError(key, value, f"cannot read the folder {error.filename} ({error.strerror})")

    files = []
    for folder, folders, names in os.walk(root, onerror=refuse):
        folders[:] = [f for f in folders if not f.startswith(".") and enter(f)]
        paths = (Path(folder, name) for name in names if not name.startswith(".") and keep(name))
        files += [TextFile(path.relative_to(root).as_posix(), path) for path in paths]
    return sorted(files, key=lambda f: f.name)


# 2. Read: files to tokens.


def read_files(name: str, files: list[TextFile], key: str, value: str, *, text_only: bool, limit_bytes: int = TEXT_LIMIT_BYTES) -> Corpus:
    """The files as a corpus, one document a file. ``text_only`` refuses a NUL byte, which no text has in UTF-8 or Latin-1."""
    sizes = [_size(f, key, value) for f in files]
    files, sizes = [f for f, n in zip(files, sizes, strict=True) if n], [n for n in sizes if n]
    if not files:
        raise DataError(key, value, "all files are empty")
    if sum(sizes) > limit_bytes:
        allowed = f"{sum(sizes) / 2**30:.3g} GiB of text; up to {limit_bytes / 2**30:.3g} GiB is held in memory"
        raise DataError(key, value, f"{allowed}, more needs scripts/prepare_data.py and data=memmap")
    offsets = np.concatenate([[0], np.cumsum(np.asarray(sizes, np.int64) + 2)])
    tokens, identities = np.empty(int(offsets[-1]), np.uint16), np.empty(len(files), np.uint64)
    digest = hashlib.sha256()
    for d, (file, size) in enumerate(zip(files, sizes, strict=True)):
        content = read_file(file, key, value, text_only=text_only)
        if len(content) != size:
            raise DataError(key, value, f"{file.path} is being written to ({size} bytes, then {len(content)}); train on files at rest")
        tokens[offsets[d] : offsets[d + 1]] = encode(content)
        identities[d] = identity(content)
        for part in (os.fsencode(file.name), content):
            digest.update(len(part).to_bytes(8, "little") + part)
    return Corpus(name, tokens, offsets, identities, None, BYTE_VOCAB_SIZE, 1.0, digest.hexdigest())


def read_file(file: TextFile, key: str, value: str, *, text_only: bool) -> bytes:
    """A file's bytes, or a DataError that names the file."""
    try:
        content = file.path.read_bytes()
    except OSError as error:
        raise DataError(key, value, f"cannot read {file.path} ({error.strerror})") from None
    if text_only and b"\0" in content:
        message = f"{file.path} is not text (it has NUL bytes); choose the text files by a glob such as 'folder/**/*.txt'"
        raise DataError(key, value, message)
    return content


def _size(file: TextFile, key: str, value: str) -> int:
    try:
        if not file.path.is_file():
            raise DataError(key, value, f"cannot read {file.path} (not a file, or a link to nothing)")
        return file.path.stat().st_size
    except OSError as error:
        raise DataError(key, value, f"cannot read {file.path} ({error.strerror})") from None


def read_stdlib() -> Corpus:
    """The source of Python's own standard library: real text that every machine has (about 31 MB where its tests are installed)."""
    name = f"stdlib (Python {platform.python_version()})"
    return read_files(name, find_stdlib(), "data.kind", "stdlib", text_only=False)


def read_text(path: str) -> Corpus:
    """The text files that ``path`` means (see `find_text`)."""
    return read_files(f"text ({os.path.basename(os.path.normpath(path))})", find_text(path), "data.path", path, text_only=True)
