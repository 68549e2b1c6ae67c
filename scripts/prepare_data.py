#!/usr/bin/env python
"""Write a pre-tokenised corpus that `data=memmap data.path=OUT` trains on.

From text (a file, a folder or a glob; one document a file; bytes as tokens, 256 + begin and end of document, vocabulary 258):

    python scripts/prepare_data.py --text 'books/**/*.txt' --out corpora/books

From json lines, one document a line, either {"text": "..."} (bytes as tokens) or {"tokens": [...]} (your own tokenizer, needs
--vocab-size), each with an optional "loss_mask": one 0 or 1 for each token (for text: for each byte of its UTF-8); a token with 0 is
read but never predicted:

    python scripts/prepare_data.py --jsonl 'part-*.jsonl' --vocab-size 50304 --bytes-per-token 4.2 --out corpora/web

OUT appears under its name only when it is complete. Bad input stops the script with its file and line; nothing is skipped but
documents without any text or token, which are counted.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from ringattn.data.config import DataError
from ringattn.data.corpus import BYTE_VOCAB_SIZE, TextFile, encode, find_text, identity, read_file
from ringattn.data.memmap import TokenWriter

# A document: its tokens [n], its identity, its loss mask [n] if it has one, and where it comes from.
Document = tuple[np.ndarray, int, np.ndarray | None, str]


def text_documents(path: str) -> Iterator[Document]:
    """A document for each text file."""
    for file in find_text(path):
        content = read_file(file, "--text", path, text_only=True)
        yield encode(content) if content else np.empty(0, np.uint16), identity(content), None, str(file.path)


def jsonl_documents(path: str, kind: str) -> Iterator[Document]:
    """A document for each line of each file."""
    for file in find_text(path):
        for number, line in _lines(file, path):
            where = f"{file.path}:{number}"
            try:
                document = _document(json.loads(line), kind)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{where}: {error}") from None
            yield *document, where


def _lines(file: TextFile, path: str) -> Iterator[tuple[int, bytes]]:
    try:
        with open(file.path, "rb") as stream:
            yield from ((number, line) for number, line in enumerate(stream, 1) if line.strip())
    except OSError as error:
        raise DataError("--jsonl", path, f"cannot read {file.path} ({error.strerror})") from None


def _document(record: Any, kind: str) -> tuple[np.ndarray, int, np.ndarray | None]:
    """One json record as (tokens, identity, mask)."""
    if not isinstance(record, dict) or kind not in record or {"text": "tokens", "tokens": "text"}[kind] in record:
        raise ValueError(f'must be an object with "{kind}" (as the first line of the first file) and not the other of "text" and "tokens"')
    mask = record.get("loss_mask")
    mask = None if mask is None else _integers(mask, "loss_mask")
    if kind == "tokens":
        tokens = _integers(record["tokens"], "tokens")
        return tokens, identity(tokens.astype("<i8").tobytes()), mask
    if not isinstance(record["text"], str):
        raise ValueError('"text" must be a text')
    content = record["text"].encode()
    if mask is not None:
        if len(mask) != len(content):
            raise ValueError(f"loss_mask has {len(mask)} values for {len(content)} bytes of text")
        mask = np.concatenate([[1], mask, mask[-1:]])  # BOS is never a target; EOS counts as the last byte does
    return encode(content) if content else np.empty(0, np.uint16), identity(content), mask if content else None


def _integers(values: Any, key: str) -> np.ndarray:
    """A json list of whole numbers as int64 [n]."""
    if not isinstance(values, list) or not set(map(type, values)) <= {int}:
        raise ValueError(f'"{key}" must be a list of whole numbers')
    try:
        return np.asarray(values, np.int64)
    except OverflowError:
        raise ValueError(f'"{key}" has a number beyond 64 bits') from None


def jsonl_kind(path: str) -> str:
    """Whether the files hold "text" or "tokens": the first line decides."""
    for file in find_text(path):
        for number, line in _lines(file, path):
            try:
                record = json.loads(line)
            except ValueError as error:
                raise ValueError(f"{file.path}:{number}: {error}") from None
            kinds = [key for key in ("text", "tokens") if isinstance(record, dict) and key in record]
            if len(kinds) != 1:
                raise ValueError(f'{file.path}:{number}: must be an object with either "text" or "tokens"')
            return kinds[0]
    raise DataError("--jsonl", path, "all files are empty")


def prepare(args: argparse.Namespace) -> str:
    """Write the corpus; returns what was done, in a line."""
    source = args.text or args.jsonl
    kind = "text" if args.text else jsonl_kind(source)
    if kind == "tokens" and args.vocab_size is None:
        raise ValueError('--vocab-size: must be given with {"tokens": [...]}, the size of your tokenizer\'s vocabulary')
    if kind == "text" and (args.vocab_size, args.bytes_per_token) != (None, None):
        raise ValueError(f"--vocab-size, --bytes-per-token: text has bytes as tokens, a vocabulary of {BYTE_VOCAB_SIZE}; leave both out")
    documents = text_documents(source) if args.text else jsonl_documents(source, kind)
    empty = 0
    vocab_size, per_token = (BYTE_VOCAB_SIZE, 1.0) if kind == "text" else (args.vocab_size, args.bytes_per_token)
    out = TokenWriter(args.out, vocab_size=vocab_size, name=args.name or args.out.name, bytes_per_token=per_token, overwrite=args.overwrite)
    with out:
        for tokens, document, mask, where in documents:
            if len(tokens) == 0 and mask is not None and len(mask):
                raise ValueError(f"{where}: loss_mask has {len(mask)} values for no token")
            if len(tokens) == 0:
                empty += 1
                continue
            try:
                out.add(tokens, document, mask)
            except ValueError as error:
                raise ValueError(f"{where}: {error}") from None
    skipped = f" ({empty} empty documents left out)" if empty else ""
    return f"{args.out}: {out.documents:,} documents, {out.tokens:,} tokens, vocabulary {vocab_size:,}{skipped}"


def main(argv: list[str] | None = None) -> int:
    """0 when the corpus was written, 2 for bad input or options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--text", metavar="PATH", help="a text file, a folder or a glob")
    source.add_argument("--jsonl", metavar="PATH", help="a json lines file, a folder of them or a glob")
    parser.add_argument("--out", required=True, type=Path, help="the folder to write")
    parser.add_argument("--vocab-size", type=int, help='for {"tokens"}: the size of your tokenizer\'s vocabulary')
    parser.add_argument("--bytes-per-token", type=float, help='for {"tokens"}: mean bytes of text a token, if known')
    parser.add_argument("--name", help="what a run calls the corpus (default: the name of OUT)")
    parser.add_argument("--overwrite", action="store_true", help="replace the corpus in OUT, once the new one is complete")
    args = parser.parse_args(argv)
    try:
        print(prepare(args))
    except (ValueError, OSError) as error:
        print(f"prepare_data: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
