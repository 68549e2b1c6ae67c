"""The loop: the story of one batch, from rows to an update, and what happens around it.

Loss and gradient are those of one device that sees the whole batch: each rank's loss is a sum over the targets it holds, divided by the
number of targets of the *whole* step (all rings, all micro-batches), and gradients are summed over all ranks. No mean is ever taken of
means, so the split into replicate x shard x ring x ulysses x micro-batches cannot be seen in the result.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from enum import IntEnum
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ringattn import cost
from ringattn.data import IGNORE
from ringattn.ring.timeline import hidden_pct, measure
from ringattn.training import checkpoint
from ringattn.training.forecast import KEPT_STEPS
from ringattn.training.metrics import exchange, peak_memory_gib
from ringattn.training.optimizer import clip_gradients, gradient_norm, learning_rate, local_gradients, set_learning_rate
from ringattn.training.parallelize import free_gathered, set_gradient_sync
from ringattn.training.placement import Placed
from ringattn.training.profiling import profiled
from ringattn.training.ring_check import check_ring
from ringattn.training.run import Run
from ringattn.training.stop import StopSignals, refuse_nonfinite

Hook = Callable[[int, nn.Module], None]


class Outcome(IntEnum):
    """How a run ended; the value is the process's exit code. (1: an unexpected error, 2: refused, 3: diverged; see train.py.)"""

    DONE = 0  # train.steps or train.stop_after reached, checkpoint written
    STOPPED = 75  # by a signal, checkpoint written: start it again to go on (EX_TEMPFAIL of sysexits.h)


def train(run: Run, *, before_update: Hook | None = None) -> Outcome:
    """Train from ``run.step`` to the last step. ``before_update(step, model)``, for tests and tools, sees each step's gradients.

    Raises Diverged on all ranks at the same step if loss or gradient are not finite; with debug.check, CheckFailed before the first step.
    """
    config, last_step = run.config, run.config.last_step
    saved_at = run.step
    step_s: list[float] = []
    if run.step >= last_step:
        where = "train.steps" if last_step == config.train.steps else "train.stop_after"
        run.console.note(f"nothing to do: step {run.step} is done already and {where}={last_step}; raise it to go on")
        return Outcome.DONE
    if config.debug.check:
        run.console.note(check_ring(run))
    run.console.start(run.step, last_step)
    with StopSignals() as signals:
        while run.step < last_step:
            with profiled(run.folder.path, run.step + 1, config.debug.profile, run.mesh.rank, run.mesh.device):
                record, stop = train_step(run, signals, before_update)
            run.step += 1
            if len(step_s) < KEPT_STEPS:
                step_s.append(record["step_s"])
            if validation_due(run):
                record |= validate(run)
                run.console.validation(record, run.val_rows)
            run.metrics.write(record)
            run.console.step(record, last_step)
            due = config.checkpoint.every and run.step % config.checkpoint.every == 0
            if config.checkpoint.keep and (due or stop or run.step == last_step):
                save(run)
                saved_at = run.step
            if stop:
                break
    run.console.stop()
    if run.mesh.device.type == "cuda":  # (on the CPU the peak is that of the whole process, libraries and all)
        run.console.note(run.forecast.compare(step_s, peak_memory_gib(run.mesh.device)))
    kept = "no checkpoint (checkpoint.keep=0)"
    if saved_at == run.step:
        kept = f"checkpoint {checkpoint.step_folder(run.folder.checkpoints, saved_at)}"
    if run.step < last_step:
        run.console.note(f"stopped by a signal after step {run.step}, {kept}; started again, the run goes on from its newest checkpoint")
        return Outcome.STOPPED
    run.console.note(f"{'done' if run.step == config.train.steps else 'stopped as asked'} at step {run.step}, {kept}")
    return Outcome.DONE


def train_step(run: Run, signals: StopSignals, before_update: Hook | None = None) -> tuple[dict[str, Any], bool]:
    """One optimizer step. Returns its metrics, and whether some rank has been asked to stop."""
    started = time.perf_counter()
    config, mesh, model, step = run.config, run.mesh, run.model, run.step

    # 1. Whole rows of this ring. Labels are known before any forward pass, so their global number is on its way while that runs.
    rows = run.batches.rows(step)
    targets = torch.tensor(run.batches.count_valid(rows), device=mesh.device)
    counting = dist.all_reduce(targets, async_op=True)

    loss_sum = torch.zeros((), dtype=torch.float64, device=mesh.device)
    pairs = [0] * len(run.model_config.distinct_windows)
    # Where real transfers are made, they are measured now and then: event records only, read once the step is enqueued.
    timed = mesh.ring.processes > 1 and (step + 1) % config.log.every == 0
    with measure(mesh.ring, mesh.device) if timed else nullcontext() as timeline:
        for i, placed in enumerate(rows):
            # 2. This rank's positions of them, and the hops that their mask needs.
            micro = run.batches.place(placed)
            pairs = [a + b for a, b in zip(pairs, micro.pairs, strict=True)]
            # 3. Gradients of earlier micro-batches wait, unreduced, for the last one (or are reduced each time: the same sum).
            set_gradient_sync(model, config.parallel.grad_sync == "each" or i == len(rows) - 1)
            # 4. Forward: the sum of this rank's losses. KV turns round the ring once a layer.
            loss = model(micro.tokens, micro.positions, micro.labels, micro.handles)
            # 5. Backward of its share of the mean. KV turns again, dKV comes home, FSDP sums what all ranks found.
            if i == 0 and counting is not None:
                counting.wait()
            (loss / targets).backward()
            loss_sum += loss.detach()

    # 6. All ranks look at the same numbers, once, before any weight changes.
    gradients = local_gradients(model.parameters())
    norm = gradient_norm(gradients, mesh.sharded)
    lr = learning_rate(config, step)
    uneven = sum(r.slowest for r in rows) / max(1e-30, sum(r.mean for r in rows))
    own: list[torch.Tensor | float] = [loss_sum, norm, targets, peak_memory_gib(mesh.device), float(signals.requested), uneven]
    own += timeline.totals() if timeline is not None else (0.0, 0.0)
    losses, norms, counts, memory, stops, balances, exposed, windows, *all_pairs = exchange(mesh, [*own, *map(float, pairs)])
    loss_mean = sum(losses) / counts[0] if counts[0] else float("nan")
    if run.watch is not None:
        run.watch.report(step + 1)
    refuse_nonfinite(step + 1, loss_mean, norms[0], counts[0], lr, losses, run.metrics.last)
    if before_update is not None:
        before_update(step, model)

    # 7. Clip, update, forget the gradients.
    clip_gradients(gradients, norm, config.optim.clip)
    set_learning_rate(run.optimizer, lr)
    run.optimizer.step()
    run.optimizer.zero_grad()

    seconds = time.perf_counter() - started
    record: dict[str, Any] = {
        "step": step + 1,
        "loss": loss_mean,
        "grad_norm": norms[0],
        "lr": lr,
        "targets": int(counts[0]),
        "tokens": (step + 1) * run.tokens_per_step,
        "tokens_per_s": run.tokens_per_step / seconds,
        "step_s": seconds,
        "mem_gib": max(memory),
    }
    if mesh.ring.size > 1:
        record["ring_balance"] = max(balances)
    if timed:
        record |= {"comm_exposed_ms": max(exposed), "comm_hidden_pct": hidden_pct(sum(exposed), sum(windows))}
    if mesh.device.type == "cuda":
        whole = [sum(p) / mesh.row_ranks for p in all_pairs]  # each rank of a ring has counted the whole ring
        flops = cost.step_flops(run.model_config, tokens=run.tokens_per_step, pairs=[round(p) for p in whole]).total
        used = cost.mfu(flops, seconds, mesh.world_size, torch.cuda.get_device_name(mesh.device))
        record |= {} if used is None else {"mfu": used}
    return record, any(stops)


@torch.no_grad()
def evaluate(run: Run, batches: Iterable[Placed]) -> float:
    """Loss in nats a target over whole rows, through the same ring: exact sums, divided once. Every ring brings as many batches."""
    loss = torch.zeros((), dtype=torch.float64, device=run.mesh.device)
    targets = 0
    for placed in batches:
        micro = run.batches.place(placed)
        targets += int((micro.labels != IGNORE).sum())
        loss += run.model(micro.tokens, micro.positions, micro.labels, micro.handles)
    free_gathered(run.model)
    losses, counts = exchange(run.mesh, [loss, float(targets)])
    return sum(losses) / max(1.0, sum(counts))


def validate(run: Run) -> dict[str, float]:
    """The validation split's loss, as fields of a metrics line."""
    loss = evaluate(run, run.batches.validation(run.val_rows))
    return {"val_loss": loss, "val_nats_per_byte": loss / run.dataset.bytes_per_token}


def validation_due(run: Run) -> bool:
    """After every ``train.val_every`` steps and after the last one; never because of a stop, which must leave no trace in the metrics."""
    train = run.config.train
    return bool(train.val_every and run.val_rows) and (run.step % train.val_every == 0 or run.step == train.steps)


def save(run: Run) -> None:
    """Write a checkpoint of this moment."""
    checkpoint.save(run.folder.checkpoints, run.progress(), run.model, run.optimizer, keep=run.config.checkpoint.keep)
