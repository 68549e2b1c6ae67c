"""Corpora read from files: the standard library, text files, their names and fingerprints; what cannot be read; the config."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from omegaconf import OmegaConf

from ringattn.data import BOS, BYTE_VOCAB_SIZE, EOS, DataConfig, DataError, build_dataset, decode, encode
from ringattn.data.corpus import find_stdlib, find_text, read_files, read_stdlib, read_text

CONFIGS = Path(__file__).parents[2] / "configs" / "data"


def write(root: Path, files: dict[str, bytes]) -> Path:
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)
    return root


def names(path: Path | str) -> list[str]:
    return [f.name for f in find_text(str(path))]


# The tokenizer and the standard library


def test_bytes_are_tokens_between_bos_and_eos(rng: np.random.Generator) -> None:
    content = rng.integers(0, 256, 100, np.uint8).tobytes()
    tokens = encode(content)
    assert tokens.tolist() == [BOS, *content, EOS] and decode(tokens.tolist()) == content
    assert (BOS, EOS, BYTE_VOCAB_SIZE) == (256, 257, 258)


def test_stdlib_leaves_out_what_the_machine_adds(tmp_path: Path) -> None:
    kept = ["abc.py", "email/mime/text.py", "sysconfig.py"]
    machine = [
        "site-packages/numpy/a.py",
        "dist-packages/b.py",
        "email/__pycache__/c.py",
        "config-3.11-x86_64-linux-gnu/python-config.py",
        "_sysconfigdata__linux_x86_64-linux-gnu.py",
        "sitecustomize.py",
        "lib-dynload/d.so",
        "LICENSE.txt",
        ".hidden.py",
    ]
    write(tmp_path, dict.fromkeys(machine + kept[::-1], b"x = 1\n"))
    (tmp_path / "dangling.py").symlink_to(tmp_path / "nowhere")
    assert [f.name for f in find_stdlib(tmp_path)] == kept
    with pytest.raises(DataError, match="no source files"):
        find_stdlib(tmp_path / "nothing")


def test_the_real_stdlib_is_a_corpus_of_real_text() -> None:
    corpus = read_stdlib()
    again = read_stdlib()
    assert corpus.fingerprint == again.fingerprint and np.array_equal(corpus.tokens, again.tokens)
    assert len(corpus.lengths) > 300 and len(corpus.tokens) > 5e6 and corpus.vocab_size == 258 and corpus.bytes_per_token == 1.0
    assert (corpus.tokens[corpus.offsets[:-1]] == BOS).all() and (corpus.tokens[corpus.offsets[1:] - 1] == EOS).all()
    assert (corpus.tokens == BOS).sum() == (corpus.tokens == EOS).sum() == len(corpus.lengths)
    counts = np.bincount(corpus.tokens, minlength=256)[:256]
    share = counts[counts > 0] / counts.sum()
    assert 3.0 < -(share * np.log(share)).sum() < 3.5  # nats a byte


def test_default_config_trains_and_validates_on_the_stdlib() -> None:
    data = build_dataset(DataConfig(), seq_len=512, seed=0)
    batch, val = data.batch(0, range(4), 4), data.batch(0, range(4), 4, "val")
    assert batch.tokens.shape == val.tokens.shape == (4, 512) and data.vocab_size == 258
    assert data.val_rows > 10 and 0.001 < data.val_tokens / data.tokens < 0.05
    assert data.name.startswith("stdlib")


# Text files


def test_folder_glob_and_file(tmp_path: Path) -> None:
    files = {"b.txt": b"bb", "a/z.txt": b"zz", "a.txt": b"aa", "c.md": b"cc", ".hidden": b"h", ".git/config": b"g"}
    write(tmp_path / "corpus", files)
    assert names(tmp_path / "corpus") == ["a.txt", "a/z.txt", "b.txt", "c.md"]
    assert names(tmp_path / "corpus" / "*.txt") == ["a.txt", "b.txt"]
    assert names(tmp_path / "corpus" / "**" / "*.txt") == ["a.txt", "a/z.txt", "b.txt"]
    assert names(tmp_path / "c*s" / "*.md") == ["corpus/c.md"]
    assert names(tmp_path / "corpus" / "c.md") == ["c.md"]
    corpus = read_text(str(tmp_path / "corpus"))
    assert decode(corpus.tokens.tolist()) == b"aazzbbcc" and corpus.lengths.tolist() == [4] * 4


def test_a_path_that_exists_is_no_glob(tmp_path: Path) -> None:
    write(tmp_path, {"data[1]/a.txt": b"one", "data1/b.txt": b"two"})
    assert names(tmp_path / "data[1]") == ["a.txt"]
    assert names(tmp_path / "data[0-9]" / "*") == ["data1/b.txt"]


def test_empty_files_make_no_document(tmp_path: Path) -> None:
    assert len(read_text(str(write(tmp_path, {"a": b"", "b": b"b", "c": b""}))).lengths) == 1


def test_fingerprint_is_of_names_lengths_and_contents(tmp_path: Path) -> None:
    def fingerprint(folder: str, files: dict[str, bytes]) -> str:
        return read_text(str(write(tmp_path / folder, files))).fingerprint

    base = fingerprint("1", {"a": b"xy", "b": b"z"})
    assert fingerprint("2", {"b": b"z", "a": b"xy"}) == base
    others = [{"a": b"x", "b": b"yz"}, {"a": b"xy", "c": b"z"}, {"a": b"xy", "b": b"w"}, {"a": b"xy"}, {"a": b"xy", "b": b"z", "c": b"z"}]
    assert len({base, *(fingerprint(f"o{i}", files) for i, files in enumerate(others))}) == 1 + len(others)


def test_relative_paths_start_at_the_given_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, {"launch/corpus/a.txt": b"abc", "elsewhere/x": b""})
    cfg = DataConfig(kind="text", path="corpus/*.txt", val_fraction=0.0).resolve(tmp_path / "launch")
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert build_dataset(cfg, seq_len=4, seed=0).tokens == 5
    assert DataConfig(path="/x/y").resolve("/launch").path == "/x/y" and DataConfig().resolve("/launch").path == ""
    monkeypatch.setenv("HOME", "/home/someone")
    assert DataConfig(path="~/x").resolve("/launch").path == "/home/someone/x"


def test_nothing_is_written(tmp_path: Path) -> None:
    root = write(tmp_path / "corpus", {"a": b"aaa", "b": b"bbb"})
    root.chmod(0o555)
    before = sorted(os.walk(tmp_path))
    build_dataset(DataConfig(kind="text", path=str(root), val_fraction=0.5), seq_len=4, seed=0).batch(0, [0], 1)
    assert sorted(os.walk(tmp_path)) == before


@pytest.mark.parametrize(
    "path, message",
    [
        ("nothing", "no such file or folder"),
        ("*.nothing", "no file here"),
        ("none", "no file here"),
        ("empty", "all files are empty"),
        ("binary", "x.bin is not text"),
        ("dangling", "cannot read .*link"),
        ("pipe", "cannot read .*pipe"),
    ],
)
def test_text_that_cannot_be_trained_on(tmp_path: Path, path: str, message: str) -> None:
    write(tmp_path, {"empty/a": b"", "empty/b": b"", "binary/x.bin": b"ab\0cd"})
    (tmp_path / "none" / "folder").mkdir(parents=True)
    (tmp_path / "dangling").mkdir()
    (tmp_path / "dangling" / "link").symlink_to(tmp_path / "gone")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(DataError, match=rf"^data\.path=.*{message}"):
        read_text(str(tmp_path / path))


def test_unreadable_and_changing_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = str(write(tmp_path, {"a": b"abc"}))
    with pytest.MonkeyPatch.context() as patch:  # root may read all files, so the refusal comes from a patch
        patch.setattr(Path, "read_bytes", lambda self: (_ for _ in ()).throw(PermissionError(13, "Permission denied")))
        with pytest.raises(DataError, match="cannot read .*a .Permission denied"):
            read_text(path)
    monkeypatch.setattr(Path, "read_bytes", lambda self: b"abcdef")
    with pytest.raises(DataError, match="is being written to"):
        read_text(path)


def test_more_text_than_memory_holds_is_refused(tmp_path: Path) -> None:
    files = find_text(str(write(tmp_path, {"a": b"abc", "b": b"def"})))
    with pytest.raises(DataError, match=r"prepare_data\.py and data=memmap"):
        read_files("text", files, "data.path", "x", text_only=True, limit_bytes=5)


# Config


@pytest.mark.parametrize(
    "change, message",
    [
        ({"kind": "parquet"}, "data.kind=parquet: must be one of stdlib, text, memmap"),
        ({"positions": "reset"}, "data.positions=reset: must be one of restart, continue (did you mean restart?)"),
        ({"verify": "no"}, "data.verify=no: must be one of auto, full, sizes"),
        ({"val_fraction": 1.0}, "data.val_fraction=1.0: must be a number from 0 (no validation) to below 1"),
        ({"val_fraction": -0.1}, "data.val_fraction=-0.1: must be a number from 0 (no validation) to below 1"),
        ({"val_fraction": float("nan")}, "data.val_fraction=nan: must be a number from 0 (no validation) to below 1"),
        ({"val_fraction": True}, "data.val_fraction=True: must be a number from 0 (no validation) to below 1"),
        ({"mask_documents": "no"}, "data.mask_documents=no: must be true or false"),
        ({"kind": "text"}, "data.path='': data.kind=text needs a file, a folder or a glob of text files"),
        ({"kind": "memmap"}, "data.path='': data.kind=memmap needs a folder written by scripts/prepare_data.py"),
        ({"path": "x"}, "data.path=x: data.kind=stdlib reads no path; data=text or data=memmap does"),
    ],
)
def test_config_mistakes_are_named(change: dict[str, Any], message: str) -> None:
    problems: list[str] = []
    cfg = DataConfig(**change)
    cfg.validate(problems)
    assert problems == [message]
    with pytest.raises(ValueError) as error:
        build_dataset(cfg, seq_len=8, seed=0)
    assert str(error.value) == message


def test_all_mistakes_are_listed_at_once() -> None:
    problems = ["model.heads=7: from elsewhere"]
    DataConfig(kind="x", positions="y", verify="z", val_fraction=2).validate(problems, "other")
    assert [p.split("=")[0] for p in problems] == ["model.heads", "other.kind", "other.positions", "other.verify", "other.val_fraction"]


@pytest.mark.parametrize("kind", ["stdlib", "text", "memmap"])
def test_yaml_files_match_the_config(kind: str) -> None:
    file = CONFIGS / f"{kind}.yaml"
    assert file.read_text().startswith("# ")
    cfg = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(DataConfig), OmegaConf.load(file)))
    assert cfg == DataConfig(kind=kind)


def test_the_error_survives_a_process_border() -> None:
    error = pickle.loads(pickle.dumps(DataError("data.path", "x", "gone")))
    assert str(error) == "data.path=x: gone" and error.key == "data.path"
