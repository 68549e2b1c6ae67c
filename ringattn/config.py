"""A run as plain dataclasses, and the one function that turns a dictionary into them.

The keys are those of the command line (``train.steps`` is ``Config.train.steps``). Nothing here knows Hydra or torch.distributed:
:func:`from_dict` takes what the command line composed and either returns a :class:`Config` that can run on ``world_size`` processes or
raises one :class:`ConfigError` that lists every problem.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from ringattn.data.config import DataConfig
from ringattn.kernels.select import KERNELS
from ringattn.model.config import ModelConfig
from ringattn.ring.layout import ALL_LAYOUTS, padded_length
from ringattn.ring.ring import inner_problem
from ringattn.ring.schedule import EXCHANGES, WIRES
from ringattn.ring.ulysses import check_heads
from ringattn.typed import ConfigError, Problems, build, suggest

__all__ = [
    "CheckpointConfig", "Config", "ConfigError", "DebugConfig", "LogConfig", "OptimConfig", "ParallelConfig", "ScheduleConfig",
    "TrainConfig", "flatten", "from_dict", "to_dict",
]

# Values that the design names and this version does not run: refused by name, so that nobody waits for a silent fallback.
NOT_OFFERED = {
    "precision": ("fp16", "fp8"),
}

LONGEST = 2**31 - 1  # tokens a row


@dataclass
class TrainConfig:
    """How much is trained. A row is one packed sequence of ``seq_len`` tokens."""

    steps: int  # optimizer steps of the whole run: the learning-rate schedule ends here
    stop_after: int | None = None  # stop after this step with a checkpoint, the schedule unchanged
    seq_len: int = 2048  # tokens a row
    rows: int = 8  # rows a step, over all ranks
    micro_rows: int = 1  # rows a forward pass; more rows a step are accumulated
    val_every: int = 100  # steps between validations, 0 = none
    val_rows: int = 16  # validation rows each time, 0 = all there are


@dataclass
class ParallelConfig:
    """The mesh replicate x shard x ring x ulysses. Parameters are sharded over the last three and replicated over replicate."""

    ring: int | None = None  # real ranks in a ring; null = the ranks that the other axes leave
    virtual: int = 1  # virtual shards on each rank of the ring
    inner: int | None = None  # shards of the ring that share a node: a ring of two levels; null: one level
    layout: str = "zigzag"  # contiguous | zigzag (equal causal work) | striped | chunk-striped; planned a batch: balanced | auto (the best)
    exchange: str = "ring"  # ring | allgather (gather all KV at once: fewer, larger transfers, more memory)
    wire: str = "exact"  # dtype of travelling dK / dV: exact (that of the sums) | bf16 (half the bytes; error 3e-3 in a ring of 8)
    ulysses: int = 1  # ranks that hold parts of one shard and split its heads in attention (DeepSpeed-Ulysses)
    transport: Literal["auto", "p2p", "push"] = "p2p"  # NCCL / gloo, or copy engines within a node; auto: push where all can
    shard: int = 1  # rings that share one copy of the parameters
    replicate: int = 1  # copies of the parameters
    grad_sync: Literal["last", "each"] = "last"  # reduce gradients after the last micro-batch, or after each (less memory)
    reshard_after_forward: bool = True  # free a block's gathered parameters between forward and backward
    timeout_s: float = 600.0  # a rank that waits longer than this for the others gives up


@dataclass
class OptimConfig:
    """AdamW (arXiv 1711.05101) or SGD. ``weight_decay`` acts on matrices only; embeddings are matrices here, norms and sinks are not."""

    name: Literal["adamw", "sgd"] = "adamw"  # optimizer
    lr: float = 3e-4  # highest learning rate
    weight_decay: float = 0.1  # on matrices only (the embedding is one)
    beta1: float = 0.9  # adamw
    beta2: float = 0.95  # adamw
    eps: float = 1e-8  # adamw
    momentum: float = 0.0  # sgd
    states: Literal["fp32", "bf16", "8bit"] = "fp32"  # adamw's moments; 8bit needs torchao
    offload: bool = False  # adamw's fp32 or bf16 moments wait in pinned host memory; the update streams them through the GPU
    clip: float = 1.0  # largest global gradient norm, 0 = off


@dataclass
class ScheduleConfig:
    """The learning rate as a pure function of the step: warm-up, then cosine, warmup-stable-decay (arXiv 2404.06395) or constant."""

    name: Literal["cosine", "wsd", "constant"] = "cosine"  # shape after the warm-up
    warmup_steps: int = 100  # linear from 0
    decay_steps: int = 0  # wsd: length of the final decay
    min_ratio: float = 0.1  # last learning rate / optim.lr


@dataclass
class CheckpointConfig:
    """Checkpoints are written every ``every`` steps and when a run ends or is stopped."""

    every: int = 500  # 0 = only when the run ends or is stopped
    keep: int = 3  # newest ones kept, 0 = write none at all


@dataclass
class LogConfig:
    """Where a run writes and how often it speaks."""

    dir: str = "runs"  # a run writes <dir>/<name>
    every: int = 10  # steps between console lines where the console is not a terminal
    console: Literal["auto", "plain", "off"] = "auto"  # auto | plain (lines even on a terminal) | off
    tensorboard: bool = True  # event files in the folder of the run
    wandb: Literal["off", "online", "offline"] = "off"  # Weights & Biases, with pip install "ringattn[wandb]"
    wandb_project: str = "ringattn"  # where W&B files the run
    report: bool = True  # report.html in the run's folder when it ends


@dataclass
class DebugConfig:
    """Looking for what is wrong (``debug=nan``, ``debug=check``, ``debug=profile``). Each costs time; check and profile change no bit of
    the result, nan may change the order of sums in gradients (their last bits)."""

    nan: bool = False  # name the first module whose output or gradient is not finite, with rank and step
    check: bool = False  # compare the first batch's attention, layer by layer, with fp64 before training
    check_rows: int = 16  # check: query rows sampled on each rank
    check_heads: int = 2  # check: KV heads sampled in each layer
    profile: list[int] = field(default_factory=list)  # steps whose trace and memory account go to <run>/profile/


@dataclass
class Config:
    """One run."""

    train: TrainConfig
    model: ModelConfig
    data: DataConfig
    name: str = "run"  # the folder of the run is <log.dir>/<name>; the same name goes on from its newest checkpoint
    seed: int = 0  # initial weights and the order of the data
    resume: str = "auto"  # auto | never | path of a checkpoint or of a run
    device: Literal["auto", "cpu", "cuda"] = "auto"  # auto: CUDA where there is a GPU
    precision: Literal["auto", "fp64", "fp32", "bf16"] = "auto"  # auto: bf16 with fp32 master weights on CUDA, fp32 on CPU
    kernel: str = "auto"  # auto (the fastest that works here) | gluon | triton | torch | reference
    activation: Literal["none", "block", "attention_saved", "offload"] = "none"  # recompute nothing, blocks, all but attention; host
    offload_gib: float | None = None  # host memory that a rank's offloaded tensors may take; null: 80 % of what is free
    compile: bool = False  # torch.compile each block; attention stays an opaque node
    deterministic: bool = False  # refuse operations without a fixed order of sums
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    log: LogConfig = field(default_factory=LogConfig)
    debug: DebugConfig = field(default_factory=DebugConfig)

    @property
    def last_step(self) -> int:
        """The step after which this process is done: ``train.stop_after`` or ``train.steps``."""
        stop = self.train.stop_after
        return self.train.steps if stop is None else min(stop, self.train.steps)

    def ring_processes(self, world_size: int) -> int:
        """Real ranks in one ring, when the whole run has ``world_size``."""
        p = self.parallel
        return world_size // (p.replicate * p.shard * p.ulysses) if p.ring is None else p.ring

    def padded_len(self, world_size: int) -> int:
        """Positions of a row with the padding at its end: the least length that the layout splits well (``auto``: as for balanced)."""
        p = self.parallel
        kind = "balanced" if p.layout == "auto" else p.layout
        return padded_length(kind, self.train.seq_len, self.ring_processes(world_size) * p.virtual, p.ulysses)

    def at(self, base: str | os.PathLike[str]) -> Config:
        """The same config with relative paths starting at the folder ``base`` (where the user launched the run)."""

        def absolute(path: str) -> str:
            return os.path.normpath(os.path.join(base, os.path.expanduser(path)))

        resume = self.resume if self.resume in ("auto", "never") else absolute(self.resume)
        log = dataclasses.replace(self.log, dir=absolute(self.log.dir))
        return dataclasses.replace(self, resume=resume, log=log, data=self.data.resolve(base))

    @property
    def folder(self) -> Path:
        """The folder that the run writes."""
        return Path(self.log.dir) / self.name


def to_dict(config: Config) -> dict[str, Any]:
    """The nested dictionary that :func:`from_dict` turns back into this config."""
    return dataclasses.asdict(config)


def flatten(nested: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Dotted keys to values."""
    flat: dict[str, Any] = {}
    for key, value in nested.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return flat


def from_dict(
    raw: dict[str, Any], *, world_size: int = 1, problems: Problems | None = None, more: Callable[[Config, Problems], None] | None = None
) -> Config:
    """A config that can run on ``world_size`` processes. Raises ConfigError with every problem; ``problems`` holds earlier ones.

    ``more`` may add problems of its own, e.g. of the machine that is to run it; keys that are known to be bad are in ``Problems.bad``.
    """
    problems = problems or Problems()
    refused = _refuse_not_offered(raw, problems)
    config: Config = build(Config, refused, problems)
    _check_values(config, problems)
    _check_mesh(config, world_size, problems)
    for key, section in (("model", config.model), ("data", config.data)):
        if problems.fine(key):
            before = len(problems.messages)
            section.validate(problems.messages, key)
            if len(problems.messages) > before:
                problems.bad.add(key)
    if more is not None:
        more(config, problems)
    if problems.messages:
        raise ConfigError(problems.messages)
    return config


def _refuse_not_offered(raw: dict[str, Any], problems: Problems) -> dict[str, Any]:
    """Refuse known but missing features by name; the returned copy leaves their keys at the default."""
    raw = {k: dict(v) if isinstance(v, dict) else v for k, v in raw.items()}
    for key, values in NOT_OFFERED.items():
        section, _, name = key.rpartition(".")
        holder = raw.get(section) if section else raw
        if isinstance(holder, dict) and holder.get(name) in values:
            problems.add(f"{key}={holder.pop(name)}: is not offered by this version")
    return raw


def _check_values(c: Config, problems: Problems) -> None:
    """Ranges of single values."""
    least: dict[str, float] = {
        "train.steps": 1, "train.seq_len": 1, "train.rows": 1, "train.micro_rows": 1, "train.val_every": 0, "train.val_rows": 0,
        "parallel.virtual": 1, "parallel.ulysses": 1, "parallel.shard": 1, "parallel.replicate": 1, "seed": 0,
        "optim.lr": 0, "optim.weight_decay": 0, "optim.beta1": 0, "optim.beta2": 0, "optim.eps": 0, "optim.momentum": 0, "optim.clip": 0,
        "schedule.warmup_steps": 0, "schedule.decay_steps": 0, "schedule.min_ratio": 0,
        "checkpoint.every": 0, "checkpoint.keep": 0, "log.every": 1, "debug.check_rows": 1, "debug.check_heads": 1,
    }
    for key, low in least.items():
        value = _get(c, key)
        if problems.fine(key) and not (low <= value < math.inf):
            finite = "" if isinstance(value, int) or math.isfinite(value) else "a finite number, "
            problems.add(f"{key}={value}: must be {finite}{low} or more", key)

    def check(ok: bool, key: str, allowed: str) -> None:
        if problems.fine(key) and not ok:
            problems.add(f"{key}={_get(c, key)}: {allowed}", key)

    check(c.train.stop_after is None or c.train.stop_after >= 1, "train.stop_after", "must be a step from 1 on, or null")
    check(c.parallel.ring is None or c.parallel.ring >= 1, "parallel.ring", "must be 1 or more, or null for the ranks that are left")
    check(0 < c.parallel.timeout_s < math.inf, "parallel.timeout_s", "must be a number of seconds above 0")
    check(c.optim.beta1 < 1, "optim.beta1", "must be below 1")
    check(c.optim.beta2 < 1, "optim.beta2", "must be below 1")
    check(c.optim.momentum < 1, "optim.momentum", "must be below 1")
    check(c.optim.states == "fp32" or c.optim.name == "adamw", "optim.states", "is for optim.name=adamw only")
    check(c.optim.states == "fp32" or c.precision != "fp64", "optim.states", "needs fp32 parameters: not with precision=fp64")
    check(not c.optim.offload or (c.optim.name == "adamw" and c.optim.states != "8bit"), "optim.offload",
          "is for optim.name=adamw with optim.states=fp32 or bf16 only")
    check(c.schedule.min_ratio <= 1, "schedule.min_ratio", "must be from 0 to 1")
    check(c.offload_gib is None or 0 < c.offload_gib < math.inf, "offload_gib", "must be a number above 0, or null")
    check(c.train.seq_len <= LONGEST, "train.seq_len", f"must be at most {LONGEST} (the kernels count rows in 32 bits)")
    words = {
        "kernel": KERNELS, "parallel.layout": (*ALL_LAYOUTS, "auto"), "parallel.exchange": EXCHANGES, "parallel.wire": WIRES,
    }
    for key, choices in words.items():
        check(_get(c, key) in choices, key, f"expected one of {', '.join(choices)}{suggest(_get(c, key), choices)}")
    check(not c.debug.nan or not c.compile, "debug.nan", "needs compile=false: it looks into the blocks")
    check(not c.debug.check or not c.compile, "debug.check", "needs compile=false: it looks into the blocks")
    check(not c.debug.check or c.parallel.ulysses == 1, "debug.check", "needs parallel.ulysses=1")
    check(all(s >= 1 for s in c.debug.profile), "debug.profile", "must be a list of steps, from 1 on")
    check(c.device != "cuda" or torch.cuda.is_available(), "device", "this machine (or this build of torch) has no CUDA device")
    plain = re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]*", c.name) is not None
    check(plain, "name", "is a folder's name: letters, digits, '.', '_' and '-' only, not starting with '.' or '-'")
    check(c.resume != "", "resume", "must be auto, never or the path of a checkpoint")
    check(c.log.dir != "", "log.dir", "must name a folder")
    installed = importlib.util.find_spec("wandb") is not None
    check(c.log.wandb == "off" or installed, "log.wandb", 'wandb is not installed (pip install "ringattn[wandb]"), only off works')
    check(c.log.wandb_project != "", "log.wandb_project", "must name a project")
    if problems.fine("schedule", "train.steps"):
        s, steps = c.schedule, c.train.steps
        if s.name == "wsd":
            check(s.warmup_steps + s.decay_steps <= steps, "schedule.decay_steps",
                  f"with schedule.warmup_steps={s.warmup_steps} must not exceed train.steps={steps}")


def _check_mesh(c: Config, world_size: int, problems: Problems) -> None:
    """Mistakes that show only when several keys are seen together."""
    p, t = c.parallel, c.train
    if problems.fine("parallel.ring", "parallel.shard", "parallel.replicate", "parallel.ulysses"):
        axes = {"parallel.replicate": p.replicate, "parallel.shard": p.shard} | ({"parallel.ulysses": p.ulysses} if p.ulysses > 1 else {})
        others, names = math.prod(axes.values()), " x ".join(axes)
        product = f"{names} = {' x '.join(map(str, axes.values()))} = {others}"
        if p.ring is None and world_size % others:
            problems.add(f"parallel.ring=null: {product} does not divide the {world_size} processes started", "parallel.ring")
        elif p.ring is not None and p.ring * others != world_size:
            problems.add(
                f"parallel.ring={p.ring}: ring x {names.replace('parallel.', '')} = "
                f"{' x '.join(map(str, (p.ring, *axes.values())))} = {p.ring * others}, "
                f"but {world_size} process{'es were' if world_size > 1 else ' was'} started "
                f"(torchrun --nproc-per-node {p.ring * others} starts as many)"
            )
    if p.inner is not None and problems.fine("parallel.inner", "parallel.ring", "parallel.virtual", "parallel.shard", "parallel.replicate"):
        problem = inner_problem(p.inner, c.ring_processes(world_size), p.virtual)
        if problem:
            problems.add(f"parallel.inner={p.inner}: {problem}", "parallel.inner")
        elif p.exchange == "allgather":
            words = "is for parallel.exchange=ring, the all-gather has no turns; or give null"
            problems.add(f"parallel.inner={p.inner}: {words}", "parallel.inner")
        elif p.transport == "push":
            problems.add("parallel.transport=push: copies within one node only; with parallel.inner give p2p or auto", "parallel.transport")
    if p.ulysses > 1 and problems.fine("parallel.ulysses", "model.heads", "model.kv_heads"):
        try:
            check_heads(c.model.heads, c.model.kv_heads, p.ulysses)
        except ValueError as error:
            problems.add(f"parallel.ulysses={p.ulysses}: {error}", "parallel.ulysses")
    if problems.fine("train.rows", "train.micro_rows", "parallel.shard", "parallel.replicate"):
        unit = p.replicate * p.shard * t.micro_rows
        if t.rows % unit:
            problems.add(
                f"train.rows={t.rows}: must be a multiple of parallel.replicate x parallel.shard x train.micro_rows = "
                f"{p.replicate} x {p.shard} x {t.micro_rows} = {unit}; the next that works is {-(-t.rows // unit) * unit}"
            )


def _get(c: Config, key: str) -> Any:
    value: Any = c
    for part in key.split("."):
        value = getattr(value, part)
    return value
