"""scripts/doctor.py: what is wrong is said plainly, with what to do; the exit code says whether training can begin."""

from __future__ import annotations

import importlib.util
import os
import socket
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("doctor", ROOT / "scripts" / "doctor.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["doctor"] = module
    spec.loader.exec_module(module)
    return module


def run(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, *command], cwd=folder, env=environment, capture_output=True, text=True, timeout=120, check=False)


def test_a_healthy_cpu_machine(tmp_path: Path) -> None:
    done = run(tmp_path, str(ROOT / "scripts" / "doctor.py"), "--device", "cpu")
    assert done.returncode == 0 and "BAD" not in done.stdout, done.stdout
    assert done.stdout.rstrip().splitlines()[-1].startswith("Ready to train.")
    for subject in ("versions", "gpu", "host", "disk", "kernel"):
        assert f"  {subject} " in done.stdout
    assert f"torch {torch.__version__}" in done.stdout and not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.ring
def test_two_ranks_measure_their_links_and_agree_on_the_exit_code(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("in the way")
    launcher = ["-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", "2"]
    done = run(tmp_path, *launcher, str(ROOT / "scripts" / "doctor.py"), "--device", "cpu")
    assert done.returncode == 1
    assert "2 meet over gloo" in done.stdout and "0 -> 1 (within a node): " in done.stdout and "1 -> 0 (within a node): " in done.stdout
    assert done.stdout.count("BAD  disk") == 1 and "-> give log.dir another folder" in done.stdout
    assert "1 thing will not work" in done.stdout


def findings(script: ModuleType, subject: str, look: str, *arguments: Any) -> list[tuple[str, str, str, str]]:
    doctor = script.Doctor()
    doctor.examine(subject, lambda: getattr(script, look)(doctor, *arguments))
    return [f for f in doctor.findings if f[1] == subject]


def test_too_many_threads_and_a_name_that_does_not_resolve(script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "64")
    monkeypatch.setattr(socket, "gethostname", lambda: "nowhere-to-be-found.invalid")
    [host] = findings(script, "host", "host", str(tmp_path), 8)
    assert host[0] == "look" and "OMP_NUM_THREADS=64 on each of them is too much" in host[3]
    [name] = findings(script, "name", "host", str(tmp_path), 8)
    assert name[0] == "look" and "--local-addr" in name[3]


def test_a_full_disk_and_one_that_cannot_be_written(script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(script.shutil, "disk_usage", lambda _: SimpleNamespace(free=2**30))
    [disk] = findings(script, "disk", "disk", str(tmp_path / "runs" / "deep"))
    assert disk[0] == "look" and "1.0 GiB free" in disk[2] and not list(tmp_path.iterdir())

    def full(*_args: Any, **_kwargs: Any) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(script.tempfile, "NamedTemporaryFile", full)
    [disk] = findings(script, "disk", "disk", str(tmp_path))
    assert disk[0] == "BAD" and "No space left on device" in disk[2] and "make room" in disk[3]


def test_a_kernel_that_is_off(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    right = script.attention

    def wrong(tensors: Any, kernel: str) -> Any:
        out, dq, *rest = right(tensors, kernel)
        return [out, dq * 1.1 if kernel == "torch" and dq.dtype == torch.float32 else dq, *rest]

    monkeypatch.setattr(script, "attention", wrong)
    bf16, fp32 = findings(script, "kernel", "kernels", torch.device("cpu"))
    assert bf16[0] == "ok" and fp32[0] == "BAD" and "torch, float32: is off by 1.0e-01" in fp32[2] and "kernel=torch" in fp32[3]


def test_ranks_that_do_not_meet(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    for key, value in {"RANK": 1, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items():
        monkeypatch.setenv(key, str(value))
    monkeypatch.setattr(script, "MEET_S", 1.0)
    [ranks] = findings(script, "ranks", "meet", torch.device("cpu"))
    assert ranks[0] == "BAD" and "2 ranks do not meet over gloo" in ranks[2] and "reach the first one's port" in ranks[3]


def test_asked_for_a_gpu_that_is_not_there(script: ModuleType) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    [gpu] = findings(script, "gpu", "gpus", torch.device("cuda", 0), 0, 1)
    assert gpu[0] == "BAD" and "--device cpu" in gpu[3]


def test_an_examination_that_fails_is_a_finding(script: ModuleType) -> None:
    doctor = script.Doctor()
    doctor.examine("host", lambda: [][1])
    assert doctor.findings[0][0] == "BAD" and "IndexError" in doctor.findings[0][2]


def test_ranks_that_differ_are_named(script: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    same, old, new = ("ok", "host", "8 cores", ""), ("ok", "versions", "torch 2.11", ""), ("ok", "versions", "torch 2.13", "")
    lines = script.compare([[old, same], [new, same], [new, same]], ["a", "b", "b"])
    assert script.show(lines) == 1
    said = capsys.readouterr().out
    assert said.count("8 cores") == 1 and "rank 0 (a): torch 2.11" in said and "ranks 1, 2 (b): torch 2.13" in said
    assert "BAD  versions   differ between ranks" in said
