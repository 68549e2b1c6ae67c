"""The ring's scripts run on a CPU from end to end: bench_ring.py over gloo processes and over a virtual ring, trace.py."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"
SHAPE = ["--heads", "2", "--kv-heads", "1", "--head-dim", "16"]


def run(script, *arguments):
    command = [sys.executable, str(SCRIPTS / script), *SHAPE, *arguments]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.mark.ring
def test_bench_over_processes(tmp_path):
    options = ["--lengths", "96,128", "--exchanges", "ring,allgather", "--ulysses", "1,2", "--documents", "3"]
    options += ["--layouts", "zigzag,balanced"]
    run("bench_ring.py", "--processes", "2", *options, "--repeats", "1", "--inner", "1", "--out", str(tmp_path))
    rows = json.loads((tmp_path / "ring.json").read_text())["rows"]
    done = {r["candidate"]: r for r in rows if "ms" in r and r["seq_len"] == 128}
    ours = {"ring zigzag", "ring balanced", "allgather zigzag", "allgather balanced", "ring zigzag ulysses 2"}
    assert set(done) == ours | {"one device"}
    assert all(done[c]["efficiency_pct"] > 0 and done[c]["ms"] > 0 for c in ours)
    assert 0 <= done["ring zigzag"]["comm_hidden_pct"] <= 100 and done["ring zigzag"]["comm_exposed_ms"] > 0
    assert all("documents" in r["failed"] for r in rows if r["candidate"].startswith(("torch", "ring-")))
    assert (tmp_path / "ring.png").stat().st_size > 5000


def test_bench_of_a_virtual_ring_stops_at_its_limit(tmp_path):
    run("bench_ring.py", "--virtual", "3", "--lengths", "96,192", "--limit", "0", "--repeats", "1", "--out", str(tmp_path))
    rows = json.loads((tmp_path / "ring.json").read_text())["rows"]
    assert [r["candidate"] for r in rows if r.get("failed") == "out of time"] == ["one device", "ring zigzag virtual 3", "all"]


@pytest.mark.ring
def test_trace_of_a_training_step(tmp_path):
    run("trace.py", "--processes", "2", "--out", str(tmp_path), "experiment=cpu_tiny", "train.seq_len=61", "train.rows=1")
    for timeline in json.loads((tmp_path / "timeline.json").read_text()):
        notes = [(t["note"]["direction"], t["note"]["what"]) for t in timeline["transfers"]]
        assert notes == [("forward", "kv")] * 2 + [("backward", "kv"), ("backward", "dkv")] * 2  # two layers
    names = {e["name"] for e in json.loads((tmp_path / "rank1.json").read_text())["traceEvents"]}
    assert {"training step", "waiting dkv, backward hop 1"} <= names


@pytest.mark.ring
def test_trace(tmp_path):
    run("trace.py", "--processes", "2", "--seq-len", "128", "--out", str(tmp_path))
    for rank, timeline in enumerate(json.loads((tmp_path / "timeline.json").read_text())):
        notes = [(t["note"]["direction"], t["note"]["what"]) for t in timeline["transfers"]]
        assert timeline["rank"] == rank and notes == [("forward", "kv"), ("backward", "kv"), ("backward", "dkv")]
        assert all(0 <= t["posted_ms"] <= t["waited_ms"] <= t["usable_ms"] <= timeline["end_ms"] for t in timeline["transfers"])
        names = {e["name"] for e in json.loads((tmp_path / f"rank{rank}.json").read_text())["traceEvents"]}
        assert {"ringattn::ring_forward", "ringattn::ring_backward", "waiting dkv, backward hop 1", "posting kv, forward hop 1"} <= names
    assert (tmp_path / "timeline.png").stat().st_size > 5000
