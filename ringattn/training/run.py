"""Putting a run together: from a config to the objects that the loop works with. :class:`Run` is all the state there is."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ringattn.config import Config, ConfigError, flatten, to_dict
from ringattn.data import Dataset, build_dataset
from ringattn.model.config import ModelConfig
from ringattn.model.transformer import Transformer
from ringattn.training import checkpoint
from ringattn.training.batches import Batches
from ringattn.training.checkpoint import Progress
from ringattn.training.console import Console
from ringattn.training.folder import RunFolder
from ringattn.training.forecast import Forecast, forecast, visible_length
from ringattn.training.header import introduce
from ringattn.training.mesh import Mesh, build_mesh
from ringattn.training.metrics import Metrics, open_tracker
from ringattn.training.nan_watch import NanWatch
from ringattn.training.offload import check_budget
from ringattn.training.optimizer import build_optimizer
from ringattn.training.parallelize import agree_on_kernel, build_model, precision
from ringattn.training.placement import Placement
from ringattn.training.provenance import document_lengths, write_environment
from ringattn.training.report import write_report
from ringattn.training.safe_reader import CheckpointError
from ringattn.training.together import attempt, everywhere, on_main, refuse_together

# Keys that say where and how a run is carried out, not what it computes: a change of these needs no note on resuming.
UNREMARKABLE = (
    "name", "resume", "log.", "checkpoint.", "parallel.", "debug.", "device", "train.stop_after", "train.val_", "data.path", "data.verify",
)


@dataclass
class Run:
    """A run on this rank. ``step``: finished steps. ``model_config``: with the vocabulary of the data filled in."""

    config: Config
    model_config: ModelConfig
    mesh: Mesh
    dataset: Dataset
    placement: Placement
    batches: Batches
    model: Transformer
    optimizer: torch.optim.Optimizer
    folder: RunFolder
    metrics: Metrics
    console: Console
    kernel: str
    forecast: Forecast
    step: int
    watch: NanWatch | None = None

    @property
    def tokens_per_step(self) -> int:
        """Positions a step, over all ranks."""
        return self.config.train.rows * self.config.train.seq_len

    @property
    def val_rows(self) -> int:
        """Validation rows each time."""
        asked = self.config.train.val_rows
        return min(asked, self.dataset.val_rows) if asked else self.dataset.val_rows

    def progress(self) -> Progress:
        """What a checkpoint of this moment says about itself."""
        config = to_dict(dataclasses.replace(self.config, model=self.model_config))
        return Progress(self.step, self.step * self.tokens_per_step, corpus_identity(self.dataset), config, self.mesh.world_size)

    def close(self) -> None:
        """Stop threads, close files, and write the report: on the main rank, and whatever goes wrong with that is only said."""
        self.batches.close()
        self.metrics.close()
        self.console.stop()
        if self.mesh.is_main and self.config.log.report:
            try:
                path = write_report(self.folder.path)
            except Exception as error:
                self.console.note(f"note: no report ({type(error).__name__}: {error})")
            else:
                if path is not None:
                    self.console.note(f"report {path}")


def assemble(config: Config, device: torch.device) -> Run:
    """Build everything, resuming if there is something to resume from. Every rank calls this within the default process group.

    Raises ConfigError or CheckpointError, on all ranks, before anything is written.
    """
    check_agreement(config)
    mesh = build_mesh(config, device)
    torch.manual_seed((config.seed * 1_000_003 + mesh.rank) % 2**63)  # nothing in training draws from it today; ranks must not draw alike
    torch.use_deterministic_algorithms(config.deterministic)
    problems: list[str] = []
    dataset = attempt(problems, lambda: build_dataset(config.data, seq_len=config.train.seq_len, seed=config.seed))
    model_config = (attempt(problems, lambda: fill_vocabulary(config.model, dataset)) if dataset is not None else None) or config.model
    kernel = attempt(problems, lambda: agree_on_kernel(config, model_config, mesh))
    attempt(problems, lambda: check_budget(config, model_config, mesh.world_size, mesh.host_ranks, precision(config, device)[1].itemsize))
    refuse_together(problems)
    assert dataset is not None and kernel is not None
    placement = Placement(config, model_config, mesh.ring, config.padded_len(mesh.world_size))
    model = build_model(config, model_config, mesh, kernel)
    optimizer = build_optimizer(config.optim, model)

    folder = RunFolder(config.folder)
    console = Console(config.log, enabled=mesh.is_main)
    # as the main rank sees it: all ranks must go on from the same checkpoint
    found, notes = on_main(lambda: checkpoint.find(config.resume, folder.checkpoints))
    step = 0
    if found is not None:
        saved, remarks = everywhere(lambda: examine(found, config, model_config, dataset))
        notes += remarks
        notes += checkpoint.load(found, model, optimizer, seed=config.seed)
        step = saved.step
    if config.schedule.warmup_steps > config.train.steps:
        notes.append(f"the warm-up ({config.schedule.warmup_steps} steps) is longer than the run: optim.lr is never reached")
    facts = {"world_size": mesh.world_size, "device": str(device), "kernel": kernel}
    batches = Batches(dataset, mesh, placement, config.train)
    first = attempt(problems, lambda: batches.first(step))  # every ring tries its next rows: a damaged corpus may show here
    refuse_together(problems)
    if first is not None and config.data.mask_documents:
        facts["documents"] = document_lengths(first.batch.documents[0, : config.train.seq_len])
    notes += prepare_folder(folder, config, step, facts)
    tracker = start_tracker(folder, config, step)
    metrics = Metrics(folder.path, step=step, enabled=mesh.is_main, tensorboard=config.log.tensorboard, tracker=tracker)
    predicted = forecast(
        config, model_config, world_size=mesh.world_size, compute_bytes=precision(config, device)[1].itemsize, device=device,
        documents=visible_length(dataset, config),
    )
    run = Run(config, model_config, mesh, dataset, placement, batches, model, optimizer, folder, metrics, console, kernel, predicted, step)
    run.watch = NanWatch(model) if config.debug.nan else None
    introduce(run, found, notes)
    return run


def check_agreement(config: Config) -> None:
    """All ranks must have started with the same config. Raises ConfigError, on all of them, naming the first keys that differ."""
    own = flatten(to_dict(config))
    first: list[Any] = [own]
    dist.broadcast_object_list(first, src=0)
    main, rank = first[0], dist.get_rank()
    differing = [f"{k}={own.get(k)} on rank {rank}, {main.get(k)} on rank 0" for k in own if own.get(k) != main.get(k)]
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, differing[:3])
    if any(everyone):
        raise ConfigError([f"ranks started with different settings: {d}" for rank in everyone for d in rank][:8])


def fill_vocabulary(model: ModelConfig, dataset: Dataset) -> ModelConfig:
    """The model's config with ``vocab_size`` from the data where it says 0. Raises ConfigError if the data has tokens beyond it."""
    if 0 < model.vocab_size < dataset.vocab_size:
        has = f"{dataset.name} has {dataset.vocab_size} tokens; 0 takes the data's number"
        raise ConfigError([f"model.vocab_size={model.vocab_size}: {has}"])
    return dataclasses.replace(model, vocab_size=model.vocab_size or dataset.vocab_size)


def prepare_folder(folder: RunFolder, config: Config, step: int, facts: dict[str, Any]) -> list[str]:
    """Make the run's folder ready, on one rank, with ``facts`` about the run in it. Returns notes for the user.

    Raises ConfigError on all ranks if it cannot be written.
    """

    def prepare() -> list[str]:
        notes = folder.prepare(config, step, fresh=config.resume == "never")
        write_environment(folder.path, facts)
        return notes

    try:
        return on_main(prepare)
    except OSError as error:
        where, why = error.filename or folder.path, error.strerror or error
        raise ConfigError([f"log.dir={config.log.dir}: cannot write {where} ({why})"]) from None


def start_tracker(folder: RunFolder, config: Config, step: int) -> Any:
    """The W&B run, on the main rank, if one is wanted. Raises ConfigError on all ranks if it cannot start."""
    if config.log.wandb == "off":
        return None
    trackers: list[Any] = []
    on_main(lambda: trackers.append(open_tracker(config.log, folder.path, to_dict(config), step=step)))
    return trackers[0] if trackers else None


def examine(found: Path, config: Config, model_config: ModelConfig, dataset: Dataset) -> tuple[Progress, list[str]]:
    """What a checkpoint says about itself, and notes on what has changed since. Raises CheckpointError if it cannot be used."""
    saved = checkpoint.read_progress(found)
    return saved, compare_runs(found, saved, config, model_config, dataset)


def compare_runs(found: Path, saved: Progress, config: Config, model_config: ModelConfig, dataset: Dataset) -> list[str]:
    """Notes on what has changed since the checkpoint was written. Raises CheckpointError for another corpus or another shape of model."""
    hint = "choose another name=, or resume=never to start afresh"
    if saved.corpus.get("fingerprint") != dataset.fingerprint:
        raise CheckpointError(
            f"checkpoint {found}: was trained on the corpus {saved.corpus.get('name')} ({str(saved.corpus.get('fingerprint'))[:12]}), "
            f"this run reads {dataset.name} ({dataset.fingerprint[:12]}); {hint}"
        )
    before = flatten(saved.config)
    now = flatten(to_dict(dataclasses.replace(config, model=model_config)))
    changed = [k for k in now if before.get(k) != now[k] and not k.startswith(UNREMARKABLE)]
    shapes = ("vocab_size", "width", "layers", "heads", "kv_heads", "head_dim", "ffn_width", "qk_norm", "tied", "sinks")
    differing = [k for k in changed if k in {f"model.{s}" for s in shapes}]
    if differing:
        what = ", ".join(f"{k} {before.get(k)} -> {now[k]}" for k in differing)
        raise CheckpointError(f"checkpoint {found}: holds a model of another shape ({what}); {hint}")
    notes = [f"changed since the checkpoint: {k} {before.get(k)} -> {now[k]}" for k in changed]
    if saved.corpus.get("stream") != dataset.stream_fingerprint or before.get("train.rows") != now["train.rows"]:
        notes.append("the next rows are not those that the run so far would have read: seed, seq_len, rows or the data's settings changed")
    return notes


def corpus_identity(dataset: Dataset) -> dict[str, str]:
    """What a checkpoint remembers of its data: ``fingerprint`` of the corpus, ``stream`` of the order of rows."""
    return {"name": dataset.name, "fingerprint": dataset.fingerprint, "stream": dataset.stream_fingerprint}
