"""Pre-tokenised corpora on disk: written whole or not at all, read back equal, refused when damaged."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ringattn.data import IGNORE, DataConfig, DataError, TokenWriter, build_dataset, open_memmap
from ringattn.data import memmap as module

DOCUMENTS = [[5, 6, 7, 8], [1], [2, 3, 9]]


def write(out: Path, documents: list[list[int]] | None = None, masks: Any = None, vocab_size: int = 10, **options: Any) -> Path:
    documents = DOCUMENTS if documents is None else documents
    with TokenWriter(out, vocab_size=vocab_size, name="test", **options) as writer:
        for i, document in enumerate(documents):
            mask = masks[i] if masks else None
            writer.add(np.asarray(document, np.int64), hash(tuple(document)) % 2**64, None if mask is None else np.asarray(mask))
    return out


def edit(out: Path, **fields: Any) -> None:
    meta = json.loads((out / "metadata.json").read_text())
    (out / "metadata.json").write_text(json.dumps({**meta, **fields}))


def poke(out: Path, file: str, dtype: str, index: int, value: int) -> None:
    array = np.fromfile(out / file, dtype)
    array[index] = value
    array.tofile(out / file)


def truncate(out: Path, file: str, bytes_less: int) -> None:
    os.truncate(out / file, (out / file).stat().st_size - bytes_less)


# Round trips


@pytest.mark.parametrize("vocab_size, dtype", [(10, np.uint16), (2**16, np.uint16), (2**16 + 1, np.uint32), (2**32, np.uint32)])
def test_round_trip(tmp_path: Path, rng: np.random.Generator, vocab_size: int, dtype: type) -> None:
    documents = [rng.integers(0, vocab_size, n).tolist() for n in (3, 1, 50)] + [[vocab_size - 1, 0]]
    corpus = open_memmap(str(write(tmp_path / "c", documents, vocab_size=vocab_size, bytes_per_token=3.5)))
    assert corpus.tokens.dtype == dtype and corpus.tokens.tolist() == [t for d in documents for t in d]
    assert corpus.offsets.tolist() == [0, 3, 4, 54, 56] and corpus.identities.tolist() == [hash(tuple(d)) % 2**64 for d in documents]
    assert (corpus.vocab_size, corpus.name, corpus.bytes_per_token, corpus.mask) == (vocab_size, "test", 3.5, None)
    assert isinstance(corpus.tokens, np.memmap) and not corpus.tokens.flags.writeable


def test_unknown_bytes_per_token_is_nan(tmp_path: Path) -> None:
    assert np.isnan(open_memmap(str(write(tmp_path / "c"))).bytes_per_token)


def test_masks_may_start_late(tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "CHUNK_BYTES", 3)
        out = write(tmp_path / "c", DOCUMENTS, masks=[None, [0], [1, 0, 1]])
    corpus = open_memmap(str(out))
    assert corpus.mask is not None and corpus.mask.tolist() == [1, 1, 1, 1, 0, 1, 0, 1]
    cfg = DataConfig(kind="memmap", path=str(out), val_fraction=0.0)
    labels = build_dataset(cfg, seq_len=8, seed=0).batch(0, [0], 1).labels
    assert sorted(labels[labels != IGNORE].tolist()) == [6, 7, 8, 9]


def test_fingerprint_is_of_the_content(tmp_path: Path) -> None:
    prints = [
        open_memmap(str(write(tmp_path / "a"))).fingerprint,
        open_memmap(str(write(tmp_path / "b"))).fingerprint,
        open_memmap(str(write(tmp_path / "c", DOCUMENTS[::-1]))).fingerprint,
        open_memmap(str(write(tmp_path / "d", masks=[[1, 1, 1, 0], None, None]))).fingerprint,
        open_memmap(str(write(tmp_path / "e", vocab_size=11))).fingerprint,
        open_memmap(str(write(tmp_path / "f", [[5, 6, 7], [8, 1], [2, 3, 9]]))).fingerprint,
    ]
    assert prints[0] == prints[1] and len(set(prints)) == 5


def test_a_corpus_on_disk_knows_no_ring_and_is_only_read(tmp_path: Path) -> None:
    """Nothing of a run is stored with the corpus: the same folder gives, for 1 rank or 4, the same padded rows, and stays as it was."""
    out = write(tmp_path / "c", [[1, 2, 3]] * 5 + [[4] * 7])
    before = {p.name: (p.read_bytes(), p.stat().st_mtime_ns) for p in tmp_path.rglob("*.*")}
    cfg = DataConfig(kind="memmap", path=str(out), val_fraction=0.0)
    one = build_dataset(cfg, seq_len=8, seed=0).batch(0, range(4), 4)
    for rank in range(4):
        part = build_dataset(cfg, seq_len=8, seed=0).batch(0, [rank], 4)
        assert torch.equal(part.tokens[0], one.tokens[rank]) and torch.equal(part.documents[0], one.documents[rank])
    assert {p.name: (p.read_bytes(), p.stat().st_mtime_ns) for p in tmp_path.rglob("*.*")} == before


# Damage


def _remove(file: str) -> Callable[[Path], object]:
    return lambda out: (out / file).unlink()


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "no folder": (lambda out: os.rename(out, out.with_name("gone")), "no corpus here"),
    "no metadata": (_remove("metadata.json"), "no corpus here"),
    "metadata cut": (lambda out: truncate(out, "metadata.json", 20), "metadata.json is damaged"),
    "metadata no object": (lambda out: (out / "metadata.json").write_text("[1]"), "format and version"),
    "other format": (lambda out: edit(out, format="other"), r"format and version \['other', 1\]: must be"),
    "later version": (lambda out: edit(out, version=2), r"format and version \['ringattn-tokens', 2\]: must be"),
    "no vocabulary": (lambda out: edit(out, vocab_size=None), "no valid vocab_size"),
    "bad fields": (lambda out: edit(out, tokens=-1, dtype="int8", name=3, sha256={}), "no valid tokens, name, dtype, sha256"),
    "bad rate": (lambda out: edit(out, bytes_per_token=0), "no valid bytes_per_token"),
    "tokens cut": (lambda out: truncate(out, "tokens.bin", 2), "tokens.bin holds 14 bytes and metadata.json says 16"),
    "tokens cut by a byte": (lambda out: truncate(out, "tokens.bin", 1), "tokens.bin holds 15 bytes"),
    "tokens gone": (_remove("tokens.bin"), "cannot read tokens.bin"),
    "other token count": (lambda out: edit(out, tokens=9), "tokens.bin holds 16 bytes and metadata.json says 18"),
    "other dtype": (lambda out: edit(out, dtype="uint32"), "tokens.bin holds 16 bytes and metadata.json says 32"),
    "other document count": (lambda out: edit(out, documents=2), "offsets.bin holds 32 bytes and metadata.json says 24"),
    "identities cut": (lambda out: truncate(out, "identities.bin", 8), "identities.bin holds 16 bytes"),
    "mask cut": (lambda out: truncate(out, "mask.bin", 1), "mask.bin holds 7 bytes"),
    "mask gone": (_remove("mask.bin"), "mask.bin is missing"),
    "offsets fall": (lambda out: poke(out, "offsets.bin", "<i8", 2, 3), r"must increase, and does not after document 1 \(4, then 3\)"),
    "offsets stand": (lambda out: poke(out, "offsets.bin", "<i8", 2, 4), "must increase"),
    "offsets start late": (lambda out: poke(out, "offsets.bin", "<i8", 0, 1), "runs from 1 to 8"),
    "offsets end early": (lambda out: poke(out, "offsets.bin", "<i8", 3, 7), "runs from 0 to 7"),
    "token too large": (lambda out: poke(out, "tokens.bin", "<u2", 5, 10), "tokens.bin holds 10 at token 5: must be below 10"),
    "mask not 0 or 1": (lambda out: poke(out, "mask.bin", "|u1", 2, 7), "mask.bin holds 7 at token 2: must be below 2"),
    "token changed": (lambda out: poke(out, "tokens.bin", "<u2", 5, 9), "tokens.bin is not the file that was written"),
    "offset changed": (lambda out: poke(out, "offsets.bin", "<i8", 1, 3), "offsets.bin is not the file that was written"),
    "vocabulary shrunk": (lambda out: edit(out, vocab_size=9), "tokens.bin holds 9 at token 7: must be below 9"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_refused_by_name(tmp_path: Path, damage: str) -> None:
    out = write(tmp_path / "c", masks=[[1, 1, 0, 1], [1], [1, 1, 1]])
    hurt, message = DAMAGE[damage]
    hurt(out)
    with pytest.raises(DataError, match=message) as error:
        build_dataset(DataConfig(kind="memmap", path=str(out)), seq_len=4, seed=0)
    assert str(error.value).startswith(f"data.path={out}: ")


def test_how_deep_verify_looks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = write(tmp_path / "c")
    poke(out, "tokens.bin", "<u2", 5, 11)
    assert open_memmap(str(out), "sizes").vocab_size == 10
    monkeypatch.setattr(module, "VERIFY_LIMIT_BYTES", 15)
    open_memmap(str(out), "auto")
    with pytest.raises(DataError, match="holds 11"):
        open_memmap(str(out), "full")
    monkeypatch.setattr(module, "VERIFY_LIMIT_BYTES", 16)
    with pytest.raises(DataError, match="holds 11"):
        open_memmap(str(out), "auto")
    data = build_dataset(DataConfig(kind="memmap", path=str(out), verify="sizes", val_fraction=0.0), seq_len=8, seed=0)
    with pytest.raises(DataError, match="a token of test=11"):  # what the start did not look at, the step does
        data.batch(0, [0], 1)


def test_large_files_are_scanned_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK_BYTES", 8)
    out = write(tmp_path / "c")
    open_memmap(str(out), "full")
    poke(out, "tokens.bin", "<u2", 7, 12)
    with pytest.raises(DataError, match="holds 12 at token 7"):
        open_memmap(str(out), "full")


# Writing


@pytest.mark.parametrize(
    "document, mask, message",
    [
        ([], None, "non-empty"),
        ([1.5], None, "whole numbers"),
        ([[1]], None, "non-empty list"),
        ([3, 10], None, "token 10: must be from 0 to 9"),
        ([-1, 3], None, "token -1: must be"),
        ([1, 2], [1], "a loss mask must be one 0 or 1 for each of the document's 2 tokens"),
        ([1, 2], [1, 2], "a loss mask must be"),
        ([1, 2], [1, 0.5], "a loss mask must be"),
    ],
)
def test_bad_documents_stop_the_writer_and_leave_nothing(tmp_path: Path, document: Any, mask: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message), TokenWriter(tmp_path / "c", vocab_size=10, name="test") as writer:
        writer.add(np.asarray([1, 2]), 0)
        writer.add(np.asarray(document), 1, None if mask is None else np.asarray(mask))
    assert list(tmp_path.iterdir()) == []


def test_no_document_is_no_corpus(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no document"):
        write(tmp_path / "c", [])
    with pytest.raises(ValueError, match="vocab_size=0"):
        TokenWriter(tmp_path / "c", vocab_size=0, name="test")
    with pytest.raises(ValueError, match="bytes_per_token=nan"):
        TokenWriter(tmp_path / "c", vocab_size=9, name="test", bytes_per_token=float("nan"))
    assert list(tmp_path.iterdir()) == []


def test_the_folder_appears_when_it_is_complete(tmp_path: Path) -> None:
    with TokenWriter(tmp_path / "deep" / "c", vocab_size=10, name="test") as writer:
        writer.add(np.asarray([1]), 0)
        assert not (tmp_path / "deep" / "c").exists()
    assert [p.name for p in (tmp_path / "deep").iterdir()] == ["c"]


def test_overwriting_is_asked_for_and_safe(tmp_path: Path) -> None:
    out = write(tmp_path / "c")
    with pytest.raises(FileExistsError, match="exists already"):
        write(out)
    with pytest.raises(ValueError, match="token 99"):
        write(out, [[1], [99]], overwrite=True)
    assert open_memmap(str(out)).tokens.tolist() == [t for d in DOCUMENTS for t in d]
    write(out, [[1, 2]], overwrite=True)
    assert open_memmap(str(out)).tokens.tolist() == [1, 2] and [p.name for p in tmp_path.iterdir()] == ["c"]
    (tmp_path / "other").mkdir()
    with pytest.raises(FileExistsError, match="not a corpus"):
        write(tmp_path / "other", overwrite=True)
