"""What is wrong is refused in one readable message, before the first step, with nothing written: the key, its value, what is allowed.

A table of bad command lines (through Hydra and the dataclasses), one of bad inputs (through a whole start), and some on two ranks, where
every rank must end with an exit code that is not 0, whoever found it.
"""

from __future__ import annotations

import functools
import json
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ranks import Ranks
from tasks import lines_of
from test_launch import command_line

from ringattn.compose import compose_keys
from ringattn.config import ConfigError, from_dict
from ringattn.data import TokenWriter
from ringattn.overrides import prepare
from ringattn.train import config_folder
from ringattn.training.launch import Launch
from ringattn.training.preflight import check_here
from ringattn.typed import Problems

ROOT = Path(__file__).parents[2]
TINY = ["experiment=cpu_tiny", "train.steps=2", "train.val_every=0", "train.seq_len=48", "log.tensorboard=false", "device=cpu"]


def refused(*arguments: str, world_size: int = 1, folder: Path = Path(".")) -> list[str]:
    """The problems of a command line, as the training command finds them."""
    problems = Problems()
    with pytest.raises(ConfigError) as caught:
        raw = compose_keys(list(arguments), config_folder(), problems)
        from_dict(raw, world_size=world_size, problems=problems, more=functools.partial(check_here, base=folder))
    return caught.value.problems


# (arguments, ranks, what the one message must say)
BAD_KEYS: list[tuple[str, int, str]] = [
    # words
    ("train.stpes=3", 1, "train.stpes: unknown key, did you mean train.steps?"),
    ("lr=1e-3", 1, "lr: unknown key, did you mean optim.lr?"),
    ("paralel.ring=2", 1, "paralel.ring: unknown key, did you mean parallel.ring?"),
    ("dropout=0.1", 1, "dropout: unknown key"),
    ("train.steps", 1, "train.steps: is not of the form key=value"),
    ("resume='a", 1, "cannot be parsed"),
    ("model=1bb", 1, "model=1bb: is no option of this group, choose from 125m, 13b, 1b, 350m, 3b, 8b, debug (did you mean 1b?)"),
    ("experiment=quikstart", 1, "(did you mean quickstart?)"),
    ("debug=virtualring", 1, "(did you mean virtual_ring?)"),
    ("optim=adamw,sgd", 1, "optim=adamw,sgd: chooses 2 options at once; add -m"),
    ("train.steps=1,2", 1, "train.steps=1,2: is several values; add -m to run them one after another, or write a list as train.steps=["),
    ("~optim.lr", 1, "~optim.lr: a key cannot be removed"),
    # choices
    ("parallel.layout=zigzack", 1, "parallel.layout=zigzack: expected one of contiguous, zigzag, "),
    ("parallel.layout=zigzack", 1, "(did you mean zigzag?)"),
    ("parallel.exchange=alltoall", 1, "parallel.exchange=alltoall: expected one of ring, allgather"),
    ("parallel.transport=nccl", 1, "parallel.transport='nccl': expected one of auto, p2p, push"),
    ("kernel=tritn", 1, "kernel=tritn: expected one of auto, gluon, triton, torch, reference (did you mean triton?)"),
    ("kernel=Torch", 1, "(did you mean torch?)"),
    ("kernel=gluon device=cpu", 1, "kernel=gluon: it runs on CUDA devices of compute capability 9.0, the inputs are on cpu; kernel=auto"),
    ("precision=fb16", 1, "precision='fb16': expected one of auto, fp64, fp32, bf16 (did you mean bf16?)"),
    ("precision=fp16", 1, "precision=fp16: is not offered by this version"),
    ("activation=null", 1, "activation=null: expected one of none, block, attention_saved, offload (did you mean none?)"),
    ("activation=blocks", 1, "(did you mean block?)"),
    ("optim.name=adam", 1, "optim.name='adam': expected one of adamw, sgd (did you mean adamw?)"),
    ("schedule.name=linear", 1, "schedule.name='linear': expected one of cosine, wsd, constant"),
    ("data.kind=txt", 1, "data.kind=txt: must be one of stdlib, text, memmap (did you mean text?)"),
    ("data.positions=reset", 1, "data.positions=reset: must be one of restart, continue"),
    # types
    ("train.steps=many", 1, "train.steps='many': expected a whole number"),
    ("train.steps=2.5", 1, "train.steps=2.5: expected a whole number"),
    ("train.steps=true", 1, "train.steps=True: expected a whole number"),
    ("compile=yes", 1, "compile='yes': expected true or false"),
    ("model.windows=64", 1, "model.windows=64: expected a list of whole numbers"),
    ("model.windows=[a]", 1, "model.windows=['a']: expected a whole number in each place"),
    ("optim.lr=fast", 1, "optim.lr='fast': expected a number"),
    ("optim.lr=null", 1, "optim.lr=null: expected a number"),
    # ranges
    ("optim.lr=nan", 1, "optim.lr=nan: must be a finite number, 0 or more"),
    ("optim.lr=inf", 1, "optim.lr=inf: must be a finite number, 0 or more"),
    ("optim.lr=-1", 1, "optim.lr=-1.0: must be 0 or more"),
    ("optim.beta2=1", 1, "optim.beta2=1.0: must be below 1"),
    ("train.rows=0", 1, "train.rows=0: must be 1 or more"),
    ("train.seq_len=0", 1, "train.seq_len=0: must be 1 or more"),
    ("train.seq_len=4294967296 parallel.layout=contiguous", 1, "train.seq_len=4294967296: must be at most 2147483647"),
    ("train.micro_rows=64 train.rows=64 train.seq_len=2000000000", 1, "64 whole rows take"),
    ("train.stop_after=0", 1, "train.stop_after=0: must be a step from 1 on, or null"),
    ("model.windows=[-1]", 1, "model.windows=[-1]: every entry must be 0 (full) or a number of tokens"),
    ("model.windows=[]", 1, "model.windows=[]: needs at least one entry"),
    ("model.heads=6 model.kv_heads=4", 1, "model.heads=6: must be a multiple of model.kv_heads=4"),
    ("model.head_dim=33", 1, "model.head_dim=33: must be even"),
    ("model.vocab_size=100", 1, "model.vocab_size=100: data.kind=stdlib has 258 tokens"),
    ("data.val_fraction=1", 1, "data.val_fraction=1.0: must be a number from 0 (no validation) to below 1"),
    ("parallel.timeout_s=0", 1, "parallel.timeout_s=0.0: must be a number of seconds above 0"),
    ("name=a/b", 1, "name=a/b: is a folder's name"),
    ("name=..", 1, "name=..: is a folder's name"),
    ("device=cuda", 1, "device=cuda: this machine (or this build of torch) has no CUDA device"),
    # the mesh
    ("parallel.ring=3 train.seq_len=2040", 4, "parallel.ring=3: ring x replicate x shard = 3 x 1 x 1 = 3, but 4 processes were started"),
    ("parallel.shard=3 train.rows=3", 4, "does not divide the 4 processes started"),
    ("train.rows=6 train.micro_rows=2 parallel.shard=2", 2, "train.rows=6: must be a multiple of"),
    ("parallel.ulysses=3", 3, "parallel.ulysses=3"),
    ("parallel.inner=3 parallel.virtual=4", 1, "parallel.inner=3: must divide the 4 shards of the ring: one of 1, 2, 4"),
    ("parallel.inner=2 parallel.virtual=4 parallel.exchange=allgather", 1, "parallel.inner=2: is for parallel.exchange=ring"),
    ("parallel.inner=2 parallel.transport=push", 4, "parallel.transport=push: copies within one node only; with parallel.inner"),
    ("parallel.wire=fp8", 1, "parallel.wire=fp8: expected one of exact, bf16"),
    # files
    ("data=text", 1, "data.path='': data.kind=text needs a file, a folder or a glob"),
    ("data=text data.path=nowhere", 1, "data.path=nowhere: no such file or folder: "),
    ("data=memmap data.path=nowhere", 1, "data.path=nowhere: no such file or folder: "),
    ("data=stdlib data.path=x", 1, "data.path=x: data.kind=stdlib reads no path"),
    ("resume=nowhere", 1, "resume=nowhere: no such folder: "),
    ("log.dir=a-file", 1, "log.dir=a-file: "),
    ("checkpoint.keep=1 model.width=1048576 model.layers=1000", 1, "checkpoint.keep=1: one checkpoint takes "),
]


@pytest.mark.parametrize(("arguments", "world_size", "expected"), BAD_KEYS, ids=[f"{i}-{a}" for i, (a, _, _) in enumerate(BAD_KEYS)])
def test_one_mistake_one_message(arguments: str, world_size: int, expected: str, tmp_path: Path) -> None:
    if arguments == "device=cuda" and os.path.exists("/dev/nvidiactl"):
        pytest.skip("there is one")
    (tmp_path / "a-file").write_text("in the way")
    found = refused(*arguments.split(), world_size=world_size, folder=tmp_path)
    assert len(found) == 1 and expected in found[0], found
    assert len(found[0]) < 250 and "\n" not in found[0] and [p.name for p in tmp_path.iterdir()] == ["a-file"]


def test_the_table_is_long_enough() -> None:
    assert len({a for a, _, _ in BAD_KEYS}) >= 40


def test_mistakes_of_all_kinds_come_in_one_message(tmp_path: Path) -> None:
    """Those of the command line, of types, of the mesh, of the machine."""
    line = "model=1bb ~optim.lr train.rows=7 train.micro_rows=2 kernel=gluon device=cpu data=text data.path=nowhere"
    keys = ("model=1bb", "~optim.lr", "train.rows=7", "kernel=gluon", "data.path=nowhere")
    found = refused(*line.split(), folder=tmp_path)
    assert len(found) == len(keys) and all(any(p.startswith(k) for p in found) for k in keys), found


@pytest.mark.skipif(os.getuid() == 0, reason="root may write anywhere")
def test_no_permission_to_write(tmp_path: Path) -> None:
    (tmp_path / "locked").mkdir(mode=0o500)
    assert "cannot be written to" in refused("log.dir=locked", folder=tmp_path)[0]


def test_options_of_sweeps_and_lists_are_not_taken_for_mistakes() -> None:
    for arguments in (["-m", "optim=adamw,sgd", "train.steps=1,2"], ["model.windows=[64,0]"], ["resume='a,b'"]):
        problems = Problems()
        prepare(arguments, config_folder(), problems)
        assert not problems.messages


# --- inputs: a whole start ----------------------------------------------------------------------------------------------


def write_tokens(folder: Path, highest: int = 99) -> None:
    """A corpus of 40 documents of 50 tokens."""
    with TokenWriter(folder, vocab_size=highest + 1, name="t") as writer:
        for i in range(40):
            writer.add(np.arange(i, i + 50) % (highest + 1), i)


def spoil_tokens(folder: Path) -> None:
    """Token ids beyond the vocabulary that only a full reading would find."""
    write_tokens(folder)
    tokens = np.memmap(folder / "tokens.bin", "<u2", "r+")
    tokens[:] = 60_000
    tokens.flush()


def cut_tokens(folder: Path) -> None:
    write_tokens(folder)
    os.truncate(folder / "tokens.bin", 100)


def flip_tokens(folder: Path) -> None:
    write_tokens(folder)
    with open(folder / "tokens.bin", "r+b") as file:
        file.write(b"\x01\x00\x02\x00")


def break_metadata(folder: Path) -> None:
    write_tokens(folder)
    (folder / "metadata.json").write_text('{"format": ')


def empty_folder(folder: Path) -> None:
    folder.mkdir()


def empty_files(folder: Path) -> None:
    folder.mkdir()
    (folder / "a.txt").touch()


def not_text(folder: Path) -> None:
    folder.mkdir()
    (folder / "a.bin").write_bytes(bytes(range(256)) * 8)


def dangling(folder: Path) -> None:
    folder.mkdir()
    (folder / "a.txt").symlink_to("nowhere")


def foreign_checkpoint(folder: Path) -> None:
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"x" * 100)


BAD_INPUTS: list[tuple[Callable[[Path], None], list[str], str]] = [
    (write_tokens, ["data=memmap", "data.path=input", "model.vocab_size=50"], "model.vocab_size=50: t has 100 tokens; 0 takes"),
    (spoil_tokens, ["data=memmap", "data.path=input", "data.verify=sizes"], "a token of t=60000: must be below 100, the vocabulary"),
    (spoil_tokens, ["data=memmap", "data.path=input"], "tokens.bin holds 60000 at token 0: must be below 100"),
    (cut_tokens, ["data=memmap", "data.path=input"], "tokens.bin holds 100 bytes and metadata.json says 4000: it is cut short"),
    (flip_tokens, ["data=memmap", "data.path=input"], "tokens.bin is not the file that was written (its sha256 differs)"),
    (break_metadata, ["data=memmap", "data.path=input"], "metadata.json is damaged"),
    (empty_folder, ["data=memmap", "data.path=input"], "no corpus here, metadata.json cannot be read"),
    (empty_folder, ["data=text", "data.path=input"], "no file here"),
    (empty_files, ["data=text", "data.path=input"], "all files are empty"),
    (not_text, ["data=text", "data.path=input"], "a.bin is not text (it has NUL bytes)"),
    (dangling, ["data=text", "data.path=input"], "a.txt (not a file, or a link to nothing)"),
    (foreign_checkpoint, ["resume=input"], "input: holds no complete checkpoint"),
]  # fmt: skip


@pytest.mark.ring
@pytest.mark.parametrize(("spoil", "arguments", "expected"), BAD_INPUTS, ids=lambda x: getattr(x, "__name__", ""))
def test_bad_inputs(spoil: Callable[[Path], None], arguments: list[str], expected: str, ranks: Ranks, tmp_path: Path) -> None:
    spoil(tmp_path / "input")
    code, out, err = ranks.run(1, command_line, str(tmp_path), *TINY, *arguments)
    assert code == 2 and expected in err and "Traceback" not in err and "Traceback" not in out
    assert not list(tmp_path.glob("runs/*/checkpoints/*"))


# --- two ranks ----------------------------------------------------------------------------------------------------------


def on_each(launch: Launch, folder: str, port: int, own: dict[int, list[str]], limit_bytes: int, *arguments: str) -> None:
    """The command line as a launcher starts it: ``own``: further arguments of single ranks. Results go to <folder>/<rank>.json."""
    place = {"RANK": launch.rank, "LOCAL_RANK": launch.rank, "WORLD_SIZE": launch.world_size, "LOCAL_WORLD_SIZE": launch.world_size,
             "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}  # fmt: skip
    os.environ.update({k: str(v) for k, v in place.items()})
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if limit_bytes:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, before[1]))
    try:
        result = command_line(launch, folder, *arguments, *own.get(launch.rank, []))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        for key in place:
            del os.environ[key]
    Path(folder, f"{launch.rank}.json").write_text(json.dumps(result))


def both(ranks: Ranks, folder: Path, *arguments: str, own: dict[int, list[str]] | None = None, limit_bytes: int = 0) -> list[Any]:
    """(exit code, stdout, stderr) of each of two ranks."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks.run(2, on_each, str(folder), port, own or {}, limit_bytes, *TINY, *arguments, limit_s=60.0)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


def said(results: list[Any]) -> str:
    """All that was said; no rank may have shown a trace."""
    text = "".join(out + err for _, out, err in results)
    assert "Traceback" not in text, text
    return text


@pytest.mark.ring
@pytest.mark.parametrize(
    ("own", "arguments", "expected"),
    [
        ({}, ["train.stpes=3"], "did you mean train.steps?"),
        ({}, ["train.rows=7", "train.micro_rows=2"], "the next that works is 8"),
        ({}, ["model.vocab_size=300", "data=text", "data.path=empty"], "no file here"),
        ({1: ["optim.lr=1e-4"]}, [], "ranks started with different settings: optim.lr=0.0001 on rank 1, 0.003 on rank 0"),
        ({1: ["data.path=empty"]}, ["data=text", "data.path=books"], "ranks started with different settings: data.path="),
        ({}, ["data=memmap", "data.path=spoilt", "data.verify=sizes"], "must be below 100, the vocabulary"),
        ({}, ["resume=empty"], "holds no complete checkpoint"),
    ],
    ids=["key", "batch", "data", "config differs", "data differs", "tokens", "checkpoint"],
)
def test_every_rank_ends_and_one_speaks(
    own: dict[int, list[str]], arguments: list[str], expected: str, ranks: Ranks, tmp_path: Path
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "books").mkdir()
    (tmp_path / "books" / "a.txt").write_text("words " * 500)
    (tmp_path / "books" / "b.txt").write_text("more words " * 500)
    spoil_tokens(tmp_path / "spoilt")
    results = both(ranks, tmp_path, *arguments, own=own)
    assert [code for code, _, _ in results] == [2, 2]
    assert said(results).count(expected) == 1
    assert not list(tmp_path.glob("runs/*/checkpoints/*"))


def hide_from_rank_1(launch: Launch, folder: str, *rest: Any) -> None:
    """Rank 1 is on a machine that does not hold the data."""
    from ringattn.data import DataError
    from ringattn.training import run

    build = run.build_dataset

    def nothing(*_args: Any, **_kwargs: Any) -> Any:
        raise DataError("data.path", "books", "cannot read books (Stale file handle)")

    if launch.rank == 1:
        run.build_dataset = nothing
    try:
        on_each(launch, folder, *rest)
    finally:
        run.build_dataset = build


@pytest.mark.ring
def test_a_mistake_that_one_rank_finds_is_everybodys(ranks: Ranks, tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks.run(2, hide_from_rank_1, str(tmp_path), port, {}, 0, *TINY, limit_s=60.0)
    results = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    assert [code for code, _, _ in results] == [2, 2]
    assert said(results).count("data.path=books: cannot read books (Stale file handle) (rank 1)") == 1
    assert not (tmp_path / "runs").exists()


@pytest.mark.ring
def test_a_full_disk_leaves_the_last_checkpoint_whole(ranks: Ranks, tmp_path: Path) -> None:
    """A limit on the size of files stands for the disk: the same error on the same calls."""
    assert [code for code, _, _ in both(ranks, tmp_path, "train.stop_after=1")] == [0, 0]
    checkpoints = tmp_path / "runs" / "cpu_tiny" / "checkpoints"
    before = {p.relative_to(checkpoints): p.read_bytes() for p in checkpoints.rglob("*") if p.is_file()}
    results = both(ranks, tmp_path, limit_bytes=60_000)
    assert [code for code, _, _ in results] == [5, 5]
    text = said(results)
    assert text.count("step-00000002: cannot be written (") == 1 and "File too large" in text
    assert "the newest complete one is step-00000001" in text
    assert {p.relative_to(checkpoints): p.read_bytes() for p in checkpoints.rglob("*") if p.is_file()} == before
    results = both(ranks, tmp_path)
    assert [code for code, _, _ in results] == [0, 0] and "resumed from step-00000001" in said(results)


@pytest.mark.ring
def test_metrics_that_cannot_be_written_are_said(ranks: Ranks, tmp_path: Path) -> None:
    code, out, err = ranks.run(1, limited, str(tmp_path), 6_000, *TINY, "train.steps=200", "checkpoint.keep=0", "log.report=false")
    assert code == 5 and "Traceback" not in out + err and re.search(r"rank 0: cannot write .*\(File too large\)", err), err


def limited(launch: Launch, folder: str, limit_bytes: int, *arguments: str) -> tuple[int, str, str]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, before[1]))
    try:
        return command_line(launch, folder, *arguments)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.slow
@pytest.mark.ring
def test_a_rank_that_dies_ends_the_others_in_a_line_each(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    arguments = [*TINY[:1], *TINY[2:], "train.steps=100000", "checkpoint.every=0", "log.every=1", "parallel.timeout_s=20"]
    processes = []
    for rank in range(2):
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        environment = os.environ | {k: str(v) for k, v in place.items()} | {"PYTHONPATH": str(ROOT)}
        with open(tmp_path / f"{rank}.log", "w") as log:
            command = [sys.executable, "-m", "ringattn.train", *arguments]
            processes.append(subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=log, stderr=log))
    metrics = tmp_path / "runs" / "cpu_tiny" / "metrics.jsonl"
    try:
        deadline = time.monotonic() + 60
        while not metrics.exists() or metrics.read_text().count("\n") < 3:
            assert time.monotonic() < deadline and all(p.poll() is None for p in processes), (tmp_path / "0.log").read_text()
            time.sleep(0.05)
        processes[1].send_signal(signal.SIGKILL)
        code = processes[0].wait(timeout=60)
    finally:
        for process in processes:
            process.kill()
    log = (tmp_path / "0.log").read_text()
    assert code == 1 and "Traceback" not in log, log
    assert sum(line.startswith("rank 0: ") for line in log.splitlines()) == 1
    assert [line["step"] for line in lines_of(metrics.parent)][:3] == [1, 2, 3]
    shutil.rmtree(tmp_path / "runs")
