"""Loss, gradients and stops over real ranks: the cases LS-01 to LS-10, and FS-02 and FS-03 (recompute, compile)."""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import Ranks
from tasks import gathered, lines_of, merged, trajectory, whole, with_run
from torch.distributed.tensor import DTensor, Replicate

from ringattn.data import IGNORE, Batch
from ringattn.ring import transport
from ringattn.training import checkpoint
from ringattn.training.launch import Launch
from ringattn.training.loop import evaluate, train, train_step
from ringattn.training.run import Run
from ringattn.training.stop import Diverged, StopSignals

pytestmark = pytest.mark.ring


def same_gradients(got: dict[str, list[torch.Tensor]], wanted: dict[str, list[torch.Tensor]], bound: float) -> None:
    assert got.keys() == wanted.keys()
    for name, steps in wanted.items():
        for a, b in zip(got[name], steps, strict=True):
            assert (a - b).norm() <= bound * b.norm(), name


def uneven(launch: Launch, raw: dict[str, Any]) -> dict[str, Any]:
    """One step in which nearly all targets lie in the first half of the rows."""

    def work(run: Run) -> dict[str, Any]:
        read = run.batches._read

        def masked(step: int) -> list[Batch]:
            batches = read(step)
            for batch in batches:
                batch.labels[:, 48:] = IGNORE
                batch.labels[:, 53] = 7
            return batches

        run.batches._read = masked  # type: ignore[method-assign]
        seen: dict[str, list[torch.Tensor]] = {}

        def record(_step: int, model: torch.nn.Module) -> None:
            for name, p in model.named_parameters():
                grad = p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad
                seen.setdefault(name, []).append(grad.clone())

        line, _ = train_step(run, StopSignals(), record)
        return {"line": line, "gradients": {n: gathered(seen[n], p) for n, p in run.model.named_parameters()}}

    result: dict[str, Any] = with_run(launch, raw, work)
    return result


def test_uneven_targets(ranks: Ranks, raw: Callable[..., Any]) -> None:
    """LS-01: the loss is the token mean although one rank holds 4 targets and the other nearly 200."""
    one = ranks.run(1, uneven, raw({"train.micro_rows": 4}))
    for mesh in ({"parallel.ring": 2}, {"parallel.ring": 2, "parallel.layout": "contiguous"}, {"parallel.replicate": 2}):
        two = ranks.run(2, uneven, raw(mesh))
        assert two["line"]["targets"] == one["line"]["targets"]
        assert two["line"]["loss"] == pytest.approx(one["line"]["loss"], rel=1e-6)
        same_gradients(two["gradients"], one["gradients"], 1e-5)


def test_gradient_has_no_factor_of_the_mesh(ranks: Ranks, raw: Callable[..., Any]) -> None:
    """LS-03, LS-04, LS-07: data x ring = 4 x 1 (replicated and sharded), 2 x 2, 1 x 4 against 1 x 1; SGD, no clipping."""
    common = {"optim.name": "sgd", "optim.lr": 0.1, "optim.clip": 0.0, "train.steps": 2}
    one = ranks.run(1, trajectory, raw(common))
    meshes = [
        {"parallel.replicate": 4}, {"parallel.shard": 4}, {"parallel.replicate": 2, "parallel.shard": 2},
        {"parallel.shard": 2}, {"parallel.ring": 4},
    ]
    for mesh in meshes:
        four = ranks.run(4, trajectory, raw(common | mesh | {"name": "four"}))
        same_gradients(four["gradients"], one["gradients"], 1e-5)
        for line, wanted in zip(four["lines"], one["lines"], strict=True):
            assert line["loss"] == pytest.approx(wanted["loss"], rel=1e-5)
            assert line["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=1e-5)


def train_and_evaluate(launch: Launch, raw: dict[str, Any]) -> dict[str, float]:
    """The loss of a step's rows by evaluation and by the training step; then the validation loss."""

    def work(run: Run) -> dict[str, float]:
        evaluated = evaluate(run, run.batches.rows(0))
        validation = evaluate(run, run.batches.validation(run.val_rows))
        line, _ = train_step(run, StopSignals())
        return {"evaluated": evaluated, "validation": validation, "trained": line["loss"]}

    result: dict[str, float] = with_run(launch, raw, work)
    return result


def test_evaluation_goes_through_the_ring(ranks: Ranks, raw: Callable[..., Any]) -> None:
    """LS-05: evaluation and training agree on the same rows, on any mesh; 3 validation rows are each counted once, also by 4 rings."""
    one = ranks.run(1, train_and_evaluate, raw())
    assert one["evaluated"] == pytest.approx(one["trained"], rel=1e-6)
    for n, mesh in ((2, {"parallel.ring": 2}), (4, {"parallel.ring": 4}), (4, {"parallel.replicate": 4}), (2, {"parallel.shard": 2})):
        other = ranks.run(n, train_and_evaluate, raw(mesh))
        for key, value in one.items():
            assert other[key] == pytest.approx(value, rel=1e-6), key


def hashes_each_step(launch: Launch, raw: dict[str, Any]) -> list[list[str]]:
    """LS-09: after each step, a hash of all parameters as each rank holds them (replicas compared locally, shards as a whole)."""

    def digest(run: Run) -> str:
        sha = hashlib.sha256()
        for name, p in run.model.named_parameters():
            assert isinstance(p, DTensor)
            sharded = p.redistribute(placements=[*p.placements[:-1], Replicate()]) if p.device_mesh.ndim > 1 else p
            value = sharded.to_local() if p.device_mesh.ndim > 1 else whole(p)  # of two replicas, this rank's own
            sha.update(name.encode() + value.detach().numpy().tobytes())
        return sha.hexdigest()

    def work(run: Run) -> list[list[str]]:
        rows = []
        for _ in range(3):
            train_step(run, StopSignals())
            run.step += 1
            everyone: list[Any] = [None] * launch.world_size
            dist.all_gather_object(everyone, digest(run))
            rows.append(everyone)
        return rows

    result: list[list[str]] = with_run(launch, raw, work)
    return result


@pytest.mark.parametrize("mesh", [{"parallel.ring": 2}, {"parallel.replicate": 2}])
def test_parameters_do_not_drift_apart(mesh: dict[str, Any], ranks: Ranks, raw: Callable[..., Any]) -> None:
    steps = ranks.run(2, hashes_each_step, raw(mesh))
    assert all(len(set(everyone)) == 1 for everyone in steps)
    assert len({everyone[0] for everyone in steps}) == 3


def poisoned(launch: Launch, raw: dict[str, Any], where: str) -> list[str]:
    """On rank 1, from the second step on, the loss or only its gradient is infinite. Returns what each rank raised."""

    def work(run: Run) -> list[str]:
        def spoil(_module: Any, _inputs: Any, loss: torch.Tensor) -> torch.Tensor | None:
            if run.step < 1 or launch.rank != 1:
                return None
            if where == "loss":
                return loss * math.inf
            loss.register_hook(lambda g: g * math.inf)
            return None

        run.model.head.register_forward_hook(spoil)
        try:
            train(run)
            said = "nothing"
        except Diverged as error:
            said = str(error)
        everyone: list[Any] = [None] * launch.world_size
        dist.all_gather_object(everyone, said)
        return everyone

    result: list[str] = with_run(launch, raw, work)
    return result


@pytest.mark.parametrize("where", ["loss", "gradient"])
def test_overflow_on_one_rank_stops_all(where: str, ranks: Ranks, raw: Callable[..., Any]) -> None:
    """LS-10: all ranks stop at the same step, say the same, and nothing of that step is written."""
    settings = raw({"checkpoint.keep": 3, "checkpoint.every": 1})
    first, second = ranks.run(2, poisoned, settings, where)
    assert first == second and first.startswith("step 2:") and "look at" in first.lower()
    assert ("loss of rank 1" in first) == (where == "loss")
    folder = Path(settings["log"]["dir"]) / "t"
    assert [line["step"] for line in lines_of(folder)] == [1]
    assert checkpoint.list_steps(folder / "checkpoints") == [1]
    assert not list((folder / "checkpoints").glob(".tmp*"))


def no_targets(launch: Launch, raw: dict[str, Any]) -> str:
    def work(run: Run) -> str:
        read = run.batches._read

        def masked(step: int) -> list[Batch]:
            batches = read(step)
            for batch in batches:
                batch.labels.fill_(IGNORE)
            return batches

        run.batches._read = masked  # type: ignore[method-assign]
        try:
            train(run)
        except Diverged as error:
            return str(error)
        return "nothing"

    return str(with_run(launch, raw, work))


def test_a_step_without_targets_is_named(ranks: Ranks, raw: Callable[..., Any]) -> None:
    assert "no token of the whole step is to be predicted" in ranks.run(2, no_targets, raw())


def with_transfer_log(launch: Launch, raw: dict[str, Any]) -> dict[str, Any]:
    """A trajectory, and how many messages of which size each rank posted."""
    log: list[tuple[str, int]] = []
    original = dist.batch_isend_irecv

    def logged(ops: list[Any]) -> Any:
        log.extend((op.op.__name__, op.tensor.numel()) for op in ops)
        return original(ops)

    transport.dist.batch_isend_irecv = logged
    try:
        result = trajectory(launch, raw)
    finally:
        transport.dist.batch_isend_irecv = original
    launch.store.set(f"log {launch.rank}", json.dumps(log))
    logs = [json.loads(launch.store.get(f"log {r}")) for r in range(launch.world_size)]
    return result | {"logs": logs}


@pytest.mark.parametrize("processes", [2, 3])
def test_recompute_changes_no_bit(processes: int, ranks: Ranks, raw: Callable[..., Any]) -> None:
    """FS-02: equal bits with and without recomputation; all ranks post the same messages; attention_saved never turns the ring again."""
    common = {"train.steps": 3, "model.layers": 3, "parallel.ring": processes, "train.rows": 2}
    plain = ranks.run(processes, with_transfer_log, raw(common))
    for activation, turns in (("attention_saved", 1.0), ("block", 1.2)):
        other = ranks.run(processes, with_transfer_log, raw(common | {"activation": activation, "name": activation}))
        assert other["lines"] == plain["lines"]
        for name, steps in plain["gradients"].items():
            assert all(torch.equal(a, b) for a, b in zip(other["gradients"][name], steps, strict=True)), name
        assert all(log == other["logs"][0] for log in other["logs"])
        count, before = len(other["logs"][0]), len(plain["logs"][0])
        assert count == before if turns == 1.0 else count > turns * before


def test_blockwise_feed_forward_under_recompute(ranks: Ranks, raw: Callable[..., Any]) -> None:
    common = {"train.steps": 2, "model.ffn_chunk": 17}
    plain = ranks.run(1, trajectory, raw(common))
    saved = ranks.run(1, trajectory, raw(common | {"activation": "attention_saved", "name": "saved"}))
    assert saved["lines"] == plain["lines"]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("c++") is None, reason="torch.compile needs a C++ compiler on the CPU")
def test_compile(ranks: Ranks, raw: Callable[..., Any]) -> None:
    """FS-03: compiled against eager, two sequence lengths, over a ring."""
    for seq_len in (96, 48):
        common = {"train.steps": 3, "train.seq_len": seq_len, "parallel.ring": 2}
        eager = ranks.run(2, trajectory, raw(common | {"name": f"eager{seq_len}"}))
        compiled = ranks.run(2, trajectory, raw(common | {"compile": True, "name": f"compiled{seq_len}"}), limit_s=400.0)
        for line, wanted in zip(compiled["lines"], eager["lines"], strict=True):
            assert line["loss"] == pytest.approx(wanted["loss"], rel=1e-5)
        same_gradients(compiled["gradients"], eager["gradients"], 1e-4)


def test_memory_that_nobody_wrote_never_counts(ranks: Ranks, raw: Callable[..., Any]) -> None:
    """With ``deterministic`` torch fills fresh memory with NaN, the rows that trimmed ring messages leave out among it."""
    common = {"train.steps": 2, "train.seq_len": 768, "train.rows": 2, "deterministic": True}
    one = ranks.run(1, trajectory, raw(common))
    for processes, layout in ((2, "zigzag"), (3, "contiguous")):
        ring = ranks.run(processes, trajectory, raw(common | {"parallel.ring": processes, "parallel.layout": layout, "name": layout}))
        assert [line["loss"] for line in ring["lines"]] == pytest.approx([line["loss"] for line in one["lines"]], rel=1e-5)
        same_gradients(ring["gradients"], one["gradients"], 1e-4)


def bf16(launch: Launch, raw: dict[str, Any]) -> dict[str, Any]:
    def work(run: Run) -> dict[str, Any]:
        line, _ = train_step(run, StopSignals(), lambda _s, model: dtypes.update(p.grad.dtype for p in model.parameters()))
        dtypes.update(p.dtype for p in run.model.parameters())
        dtypes.update(v.dtype for s in run.optimizer.state.values() for v in s.values())
        return {"loss": line["loss"], "dtypes": dtypes}

    dtypes: set[torch.dtype] = set()
    result: dict[str, Any] = with_run(launch, raw, work)
    return result


def test_bf16_keeps_fp32_weights(ranks: Ranks, raw: Callable[..., Any]) -> None:
    exact = ranks.run(2, bf16, raw({"parallel.ring": 2}))
    rounded = ranks.run(2, bf16, raw({"parallel.ring": 2, "precision": "bf16"}))
    assert rounded["dtypes"] == exact["dtypes"] == {torch.float32}
    assert rounded["loss"] == pytest.approx(exact["loss"], rel=1e-2) and rounded["loss"] != exact["loss"]


def disagreeing(launch: Launch, raw: dict[str, Any]) -> str:
    from ringattn.config import ConfigError

    try:
        with_run(launch, merged(raw, {"seed": launch.rank, "optim.lr": 1e-3 * (1 + launch.rank)}), lambda run: None)
    except ConfigError as error:
        return str(error)
    return "nothing"


def test_ranks_with_different_settings_are_refused(ranks: Ranks, raw: Callable[..., Any]) -> None:
    message = ranks.run(2, disagreeing, raw())
    assert "seed=1 on rank 1, 0 on rank 0" in message and "optim.lr=0.002 on rank 1" in message
