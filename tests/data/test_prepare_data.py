"""scripts/prepare_data.py: what it writes trains like its source, and bad input is refused with its place."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from ringattn.data import BOS, EOS, DataConfig, build_dataset, open_memmap

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "prepare_data.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("prepare_data", SCRIPT)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def jsonl(path: Path, records: list[Any]) -> Path:
    path.write_text("".join(r if isinstance(r, str) else json.dumps(r) + "\n" for r in records))
    return path


def test_text_trains_as_its_memmap_does(tmp_path: Path, rng: np.random.Generator) -> None:
    """The same rows and the same validation split; the script run as a user runs it."""
    for i in range(20):
        (tmp_path / "text" / str(i % 3)).mkdir(parents=True, exist_ok=True)
        (tmp_path / "text" / str(i % 3) / f"{i}.txt").write_bytes(rng.integers(1, 256, rng.integers(0, 60), np.uint8).tobytes())
    command = [sys.executable, str(SCRIPT), "--text", "text", "--out", "out/corpus"]
    done = subprocess.run(command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    text, memmap = (
        build_dataset(DataConfig(kind=kind, path=str(tmp_path / path), val_fraction=0.3), seq_len=32, seed=4)
        for kind, path in (("text", "text"), ("memmap", "out/corpus"))
    )
    assert (text.tokens, text.val_tokens, text.vocab_size, text.bytes_per_token) == (
        memmap.tokens,
        memmap.val_tokens,
        memmap.vocab_size,
        memmap.bytes_per_token,
    )
    assert f"{text.tokens + text.val_tokens:,} tokens, vocabulary 258" in done.stdout
    for step in range(4):
        for split in ("train", "val"):
            a, b = text.batch(step, [0, 1], 2, split), memmap.batch(step, [0, 1], 2, split)
            assert torch.equal(a.tokens, b.tokens) and torch.equal(a.labels, b.labels) and torch.equal(a.documents, b.documents)


def test_jsonl_text(script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    records = [{"text": "hé"}, "\n", {"text": ""}, {"text": "ab", "loss_mask": [0, 1], "id": 3}, {"text": "c", "loss_mask": [0]}]
    source = jsonl(tmp_path / "a.jsonl", records)
    assert script.main(["--jsonl", str(source), "--out", str(tmp_path / "c"), "--name", "mine"]) == 0
    assert "1 empty documents left out" in capsys.readouterr().out
    corpus = open_memmap(str(tmp_path / "c"))
    assert corpus.tokens.tolist() == [BOS, *"hé".encode(), EOS, BOS, *b"ab", EOS, BOS, *b"c", EOS]
    assert corpus.mask is not None and corpus.mask.tolist() == [1, 1, 1, 1, 1, 1, 0, 1, 1, 1, 0, 0]
    assert (corpus.name, corpus.vocab_size, corpus.bytes_per_token) == ("mine", 258, 1.0)


def test_jsonl_tokens(script: ModuleType, tmp_path: Path) -> None:
    jsonl(tmp_path / "b.jsonl", [{"tokens": [70000]}])
    jsonl(tmp_path / "a.jsonl", [{"tokens": [1, 2, 3], "loss_mask": [1, 0, 1]}, {"tokens": []}])
    base = ["--jsonl", str(tmp_path / "*.jsonl"), "--vocab-size", "70001"]
    assert script.main([*base, "--out", str(tmp_path / "c"), "--bytes-per-token", "4.25"]) == 0
    corpus = open_memmap(str(tmp_path / "c"))
    assert corpus.tokens.tolist() == [1, 2, 3, 70000] and corpus.tokens.dtype == np.uint32 and corpus.bytes_per_token == 4.25
    assert corpus.mask is not None and corpus.mask.tolist() == [1, 0, 1, 1] and corpus.offsets.tolist() == [0, 3, 4]
    assert script.main([*base, "--out", str(tmp_path / "c")]) == 2
    assert script.main([*base, "--out", str(tmp_path / "c"), "--overwrite"]) == 0
    assert math.isnan(open_memmap(str(tmp_path / "c")).bytes_per_token)


TOKENS = ["--vocab-size", "10"]


@pytest.mark.parametrize(
    "records, options, message",
    [
        ([{"tokens": [1]}], [], "--vocab-size: must be given"),
        ([{"text": "a"}], TOKENS, "leave both out"),
        ([{"tokens": [1]}, {"tokens": [3, 10]}], TOKENS, "a.jsonl:2: token 10: must be from 0 to 9"),
        ([{"tokens": [1]}, {"tokens": [-1]}], TOKENS, "a.jsonl:2: token -1"),
        ([{"tokens": [1]}, {"tokens": [1.0]}], TOKENS, 'a.jsonl:2: "tokens" must be a list of whole numbers'),
        ([{"tokens": [1]}, {"tokens": [True]}], TOKENS, 'a.jsonl:2: "tokens" must be a list of whole numbers'),
        ([{"tokens": [1]}, {"tokens": 5}], TOKENS, 'a.jsonl:2: "tokens" must be a list'),
        ([{"tokens": [1]}, {"tokens": [2**70]}], TOKENS, "a.jsonl:2: .* beyond 64 bits"),
        ([{"tokens": [1], "loss_mask": [1, 1]}], TOKENS, "a.jsonl:1: a loss mask must be one 0 or 1 for each of the document's 1 tokens"),
        ([{"tokens": [1], "loss_mask": [2]}], TOKENS, "a.jsonl:1: a loss mask must be"),
        ([{"tokens": [], "loss_mask": [1]}], TOKENS, "a.jsonl:1: loss_mask has 1 values for no token"),
        ([{"tokens": []}], TOKENS, "no document was written"),
        ([{"tokens": [1]}, {"text": "a"}], TOKENS, 'a.jsonl:2: must be an object with "tokens"'),
        ([{"tokens": [1], "text": "a"}], TOKENS, 'a.jsonl:1: must be an object with either "text" or "tokens"'),
        ([{"content": "a"}], [], 'a.jsonl:1: must be an object with either "text" or "tokens"'),
        (["not json\n"], [], "a.jsonl:1: Expecting value"),
        ([{"text": "a"}, '{"text": "cut'], [], "a.jsonl:2: "),
        ([{"text": "a"}, {"text": 5}], [], 'a.jsonl:2: "text" must be a text'),
        ([{"text": "a"}, '{"text": "\\ud800"}\n'], [], "a.jsonl:2: .*surrogates not allowed"),
        ([{"text": "é", "loss_mask": [1]}], [], "a.jsonl:1: loss_mask has 1 values for 2 bytes of text"),
        ([], [], "all files are empty"),
    ],
)
def test_bad_json_lines_are_refused_with_their_place(
    script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], records: list[Any], options: list[str], message: str
) -> None:
    source = jsonl(tmp_path / "a.jsonl", records)
    assert script.main(["--jsonl", str(source), "--out", str(tmp_path / "c"), *options]) == 2
    with pytest.raises(ValueError, match=message):
        raise ValueError(capsys.readouterr().err)
    assert [p.name for p in tmp_path.iterdir()] == ["a.jsonl"]


@pytest.mark.parametrize("option", ["--text", "--jsonl"])
def test_bad_sources_are_refused(script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], option: str) -> None:
    assert script.main([option, str(tmp_path / "gone"), "--out", str(tmp_path / "c")]) == 2
    assert "gone: no such file or folder" in capsys.readouterr().err and not list(tmp_path.iterdir())
    with pytest.raises(SystemExit):
        script.main(["--out", str(tmp_path / "c")])
