"""The command line from end to end: launchers, folders, sweeps, refusals, threads (HY-01, HY-04, HY-05, HY-07, HY-08)."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import chdir, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import Ranks
from tasks import lines_of, with_run

from ringattn.config import ConfigError, from_dict
from ringattn.training.launch import Launch, check_main_address, limit_threads

pytestmark = pytest.mark.ring

ROOT = Path(__file__).parents[2]
TINY = ["experiment=cpu_tiny", "train.steps=2", "train.val_every=0", "train.seq_len=48", "log.tensorboard=false", "checkpoint.every=1"]


def command_line(_launch: Launch, folder: str, *arguments: str) -> tuple[int, str, str]:
    """``python -m ringattn.train`` in a process that has torch loaded: exit code, stdout, stderr."""
    from ringattn.train import main

    out, err, code = io.StringIO(), io.StringIO(), 0
    before = sys.argv
    with chdir(folder), redirect_stdout(out), redirect_stderr(err):
        sys.argv = ["train", *arguments]
        try:
            main()
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else 1
        finally:
            sys.argv = before
    return code, out.getvalue(), err.getvalue()


def test_refusal_is_one_message_and_leaves_nothing_behind(ranks: Ranks, tmp_path: Path) -> None:
    arguments = ["experiment=cpu_tyny", "train.stpes=2", "train.rows=7", "train.micro_rows=2", "optim.lr=fast", "resume=a=b"]
    code, out, err = ranks.run(1, command_line, str(tmp_path), *arguments)
    assert code == 2 and out == "" and "Traceback" not in err and list(tmp_path.iterdir()) == []
    assert err.count("5 problems in the configuration:") == 1
    meant = ("did you mean cpu_tiny?", "did you mean train.steps?")
    for word in (*meant, "the next that works is 8", "optim.lr='fast'", "resume=a=b: no such folder"):
        assert word in err


def test_data_that_is_not_there_is_refused(ranks: Ranks, tmp_path: Path) -> None:
    code, _, err = ranks.run(1, command_line, str(tmp_path), *TINY, "data=text", "data.path=nowhere")
    assert code == 2 and "data.path=" in err and "Traceback" not in err and not (tmp_path / "runs").exists()


@pytest.mark.parametrize("change_folder", ["true", "false"])
def test_paths_are_relative_to_the_launch_folder(change_folder: str, ranks: Ranks, tmp_path: Path) -> None:
    """HY-04."""
    (tmp_path / "books").mkdir()
    (tmp_path / "books" / "a.txt").write_text("All happy families are alike; " * 200)
    (tmp_path / "books" / "b.txt").write_text("every unhappy family is unhappy in its own way. " * 200)
    start = [*TINY, "data=text", "data.path=books", f"hydra.job.chdir={change_folder}"]
    code, _, err = ranks.run(1, command_line, str(tmp_path), *start)
    assert code == 0, err
    code, out, err = ranks.run(1, command_line, str(tmp_path), *start, "name=next", "resume=runs/cpu_tiny", "train.steps=3")
    assert code == 0 and "resumed from step-00000002" in out, err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["books", "runs"]
    written = ["checkpoints", "config.yaml", "environment.json", "metrics.jsonl", "report.html"]
    assert sorted(p.name for p in (tmp_path / "runs" / "cpu_tiny").iterdir()) == written


def test_a_finished_run_says_so(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks.run(1, command_line, str(tmp_path), *TINY)[0] == 0
    code, out, _ = ranks.run(1, command_line, str(tmp_path), *TINY)
    assert code == 0 and "nothing to do: step 2 is done already" in out
    assert len(lines_of(tmp_path / "runs" / "cpu_tiny")) == 2


def test_a_sweep_gives_each_job_its_own_folder(ranks: Ranks, tmp_path: Path) -> None:
    code, _, err = ranks.run(1, command_line, str(tmp_path), "-m", *TINY, "name=rates", "optim.lr=1e-3,1e-2", "seed=0,1")
    assert code == 0, err
    assert sorted(p.name for p in (tmp_path / "runs").iterdir()) == ["rates-0", "rates-1", "rates-2", "rates-3", "rates-sweep"]
    assert len({json.dumps(lines_of(tmp_path / "runs" / f"rates-{n}")) for n in range(4)}) == 4


@pytest.mark.slow
@pytest.mark.parametrize(
    "launcher",
    [
        ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "ringattn.train"],
        ["-m", "ringattn.train"],
    ],
)
def test_launchers(launcher: list[str], tmp_path: Path) -> None:
    """HY-05 and HY-01: a sweep over two real ranks and plain python; one folder a job. (torchrun is torch.distributed.run.)"""
    environment = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"} | {"PYTHONPATH": str(ROOT)}
    arguments = [*TINY, "-m", "seed=0,1"] if "--standalone" in launcher else TINY
    done = subprocess.run(
        [sys.executable, *launcher, *arguments], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    folders = sorted(p.name for p in (tmp_path / "runs").iterdir())
    assert folders == (["cpu_tiny-0", "cpu_tiny-1", "cpu_tiny-sweep"] if "--standalone" in launcher else ["cpu_tiny"])
    for folder in folders:
        if not folder.endswith("sweep"):
            assert [line["step"] for line in lines_of(tmp_path / "runs" / folder)] == [1, 2]
    assert ("ring 2" in done.stdout) == ("--standalone" in launcher)


@pytest.mark.slow
def test_a_refusal_under_torchrun_is_printed_once(tmp_path: Path) -> None:
    """Whichever rank is first to exit, rank 0's message must have been printed."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4", "-m", "ringattn.train"]
    done = subprocess.run(
        [sys.executable, *launcher, *TINY, "train.stpes=1"], cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=120, check=False,
    )
    assert done.returncode == 1 and done.stderr.count("did you mean train.steps?") == 1
    assert re.search(r"exitcode\s+: 2", done.stderr)  # torchrun's own report
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_ctrl_c_under_torchrun_saves(tmp_path: Path) -> None:
    """The terminal's SIGINT reaches torchrun and the ranks, and torchrun passes it on once more: the step is finished and saved."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "ringattn.train"]
    process = subprocess.Popen(
        [sys.executable, *launcher, *TINY[:1], *TINY[2:-1], "train.steps=100000", "checkpoint.every=0", "log.every=1"], cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )
    assert process.stdout is not None
    seen = []
    for text in process.stdout:
        seen.append(text)
        if text.startswith("step      3/"):
            os.killpg(process.pid, signal.SIGINT)
            break
    seen.append(process.communicate(timeout=60)[0])
    folder = tmp_path / "runs" / "cpu_tiny"
    last = lines_of(folder)[-1]["step"]
    assert f"stopped by a signal after step {last}" in "".join(seen), seen
    assert [p.name for p in (folder / "checkpoints").iterdir()] == [f"step-{last:08d}"]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux" or os.getuid() != 0, reason="changing the host name of a namespace needs root on Linux")
def test_a_host_that_cannot_resolve_its_own_name(tmp_path: Path) -> None:
    """HY-08, as scripts/quickstart.sh starts it: torchrun itself needs --local-addr there."""
    launcher = f"{sys.executable} -m torch.distributed.run --standalone --local-addr 127.0.0.1 --nproc-per-node 2 -m ringattn.train"
    script = f"hostname nowhere-to-be-found && exec {launcher} {' '.join(TINY)}"
    done = subprocess.run(
        ["unshare", "--uts", "bash", "-c", script], cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=120, check=False,
    )
    if "unshare failed" in done.stderr:
        pytest.skip("no permission for a namespace of its own")
    assert done.returncode == 0 and "ring 2" in done.stdout, done.stderr


def test_several_hosts_need_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "nowhere-to-be-found.invalid")
    with pytest.raises(ConfigError, match="MASTER_ADDR=nowhere-to-be-found.invalid: cannot be resolved"):
        check_main_address(one_host=False)
    check_main_address(one_host=True)
    assert os.environ["MASTER_ADDR"] == "127.0.0.1"


def late(launch: Launch, raw: dict[str, Any]) -> list[str]:
    """HY-01: rank 1 reaches its config two seconds after rank 0."""
    time.sleep(2.0 * launch.rank)
    result: list[str] = with_run(launch, raw, lambda run: [str(run.folder.path)])
    return result


def test_one_folder_whatever_the_clock_says(ranks: Ranks, raw: Callable[..., Any]) -> None:
    settings = raw()
    assert ranks.run(2, late, settings) == [f"{settings['log']['dir']}/t"]
    assert [p.name for p in Path(settings["log"]["dir"]).iterdir()] == ["t"]


def threads(launch: Launch, raw: dict[str, Any]) -> int:
    before, setting = torch.get_num_threads(), os.environ.pop("OMP_NUM_THREADS", None)
    try:
        from_dict(raw, world_size=launch.world_size)
        limit_threads(launch, torch.device("cpu"))
        return torch.get_num_threads()
    finally:
        torch.set_num_threads(before)
        if setting is not None:
            os.environ["OMP_NUM_THREADS"] = setting


def test_ranks_share_the_cores(ranks: Ranks, raw: Callable[..., Any]) -> None:
    """HY-07."""
    cores = len(os.sched_getaffinity(0))
    for n in (1, 2, 4):
        assert ranks.run(n, threads, raw()) == max(1, cores // n)
