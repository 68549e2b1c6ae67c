"""Train a model: ``python -m ringattn.train key=value ...``, or the same under ``torchrun --standalone --nproc-per-node N -m``.

    hydra      composes the config from configs/ and the command line; a sweep (-m) runs its jobs one after another
    config     turns it into dataclasses, or lists everything that is wrong with it
    launch     opens the process group
    training   does the rest; nothing below this file knows Hydra

Exit codes: 0 done; 1 an unexpected error; 2 refused (config, data or checkpoint; one message, nothing written); 3 loss or gradient not
finite; 4 out of memory (one page: what was largest, and what would fit); 5 a file could not be written (disk full, no permission); 6
debug.check found attention to be wrong; 75 stopped by SIGTERM, SIGINT or SIGUSR1 after saving. torchrun itself reports any but 0 as 1.
A rank that loses the others ends with 1 and says so in one line: the rank that failed first says what happened.

Start ranks with torchrun (or python -m torch.distributed.run): launchers that add --local-rank arguments are not understood. On a
machine that cannot resolve its own name, torchrun needs --local-addr 127.0.0.1.
"""

from __future__ import annotations

import dataclasses
import errno
import functools
import sys
from pathlib import Path
from typing import Any

import hydra
import torch
import torch.distributed as dist
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from torch.distributed.elastic.multiprocessing.errors import record

from ringattn.config import Config, ConfigError, from_dict
from ringattn.data import DataError
from ringattn.overrides import prepare
from ringattn.ring.hang import RingError
from ringattn.training.forecast import explain_out_of_memory
from ringattn.training.launch import Launch, process_group
from ringattn.training.loop import Outcome, train
from ringattn.training.preflight import check_here
from ringattn.training.ring_check import CheckFailed
from ringattn.training.run import assemble
from ringattn.training.safe_reader import CheckpointError, SaveError
from ringattn.training.stop import Diverged
from ringattn.training.together import lost_contact
from ringattn.typed import Problems

UNEXPECTED, REFUSED, DIVERGED, OUT_OF_MEMORY, UNWRITABLE, CHECK_FAILED = 1, 2, 3, 4, 5, 6
# A disk that is full, a quota, a limit on file sizes, no permission, a file system that is or became read-only, a path that is in the way.
UNWRITABLE_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EACCES, errno.EPERM, errno.EROFS, errno.EIO, errno.ENOTDIR)


def config_folder() -> Path:
    """The folder of config groups: inside an installed package, beside it in a source tree."""
    package = Path(__file__).resolve().parent
    return package / "configs" if (package / "configs").is_dir() else package.parent / "configs"


def main() -> None:
    """The command line."""
    problems = Problems()
    sys.argv[1:] = prepare(sys.argv[1:], config_folder(), problems)
    try:
        launch = Launch.from_environment()
    except ConfigError as error:
        print(error, file=sys.stderr)  # by each rank: they cannot talk to each other
        sys.exit(REFUSED)

    @record  # writes the error file that torchrun shows for the rank that failed first
    def job(composed: DictConfig) -> None:
        code = run_job(composed, launch, problems)
        if code != Outcome.DONE:
            sys.exit(code)

    hydra.main(version_base="1.3", config_path=str(config_folder()), config_name="config")(job)()


def run_job(composed: DictConfig, launch: Launch, problems: Problems) -> int:
    """One run, or one job of a sweep. Returns the exit code; what the user can mend is printed once, without a trace."""
    try:
        config = read_config(composed, launch, problems)
        return run_config(config, launch, HydraConfig.get().job.num if is_sweep() else 0)
    except ConfigError as error:
        launch.say_once(str(error), sys.stderr)
        return REFUSED


def run_config(config: Config, launch: Launch, number: int = 0) -> int:
    """A run whose config has been read; returns the exit code."""
    device = torch.device("cpu")
    run = None
    try:
        with process_group(config, launch, number) as device:
            run = assemble(config, device)
            try:
                outcome = train(run)
            finally:
                run.close()
            dist.barrier()  # a launcher ends all ranks when the first one leaves: not before the main rank has written its last files
            return int(outcome)
    except torch.OutOfMemoryError as error:  # of this rank: the others may be well
        print(f"rank {launch.rank}: {explain_out_of_memory(config, launch.world_size, device, error, run)}", file=sys.stderr, flush=True)
        return OUT_OF_MEMORY
    except (ConfigError, DataError, CheckpointError) as error:
        launch.say_once(str(error), sys.stderr)
        return REFUSED
    except RingError as error:  # says itself where each rank stood; a launcher then ends the others
        print(f"rank {launch.rank}: {error}", file=sys.stderr, flush=True)
        return UNEXPECTED
    except Diverged as error:
        launch.say_once(str(error), sys.stderr)
        return DIVERGED
    except CheckFailed as error:
        launch.say_once(str(error), sys.stderr)
        return CHECK_FAILED
    except SaveError as error:
        launch.say_once(str(error), sys.stderr)
        return UNWRITABLE
    except OSError as error:
        if error.errno not in UNWRITABLE_ERRORS:
            raise
        where = f" {error.filename}" if error.filename else f" the files of {config.folder}"
        said = f"rank {launch.rank}: cannot write{where} ({error.strerror}); checkpoints that are complete stay so"
        print(said, file=sys.stderr, flush=True)
        return UNWRITABLE
    except RuntimeError as error:
        if not lost_contact(error):
            raise
        cause = str(error).splitlines()[0][:200]
        print(f"rank {launch.rank}: lost the other ranks ({cause}). The rank that failed first says why; started again, the run goes on "
              "from its newest checkpoint", file=sys.stderr, flush=True)  # fmt: skip
        return UNEXPECTED


def read_config(composed: DictConfig, launch: Launch, problems: Problems) -> Config:
    """The composed config as dataclasses, with paths that start at the folder of the launch. Raises ConfigError with all problems."""
    raw: Any = None
    try:
        raw = OmegaConf.to_container(composed, resolve=True)
    except OmegaConfBaseException as error:
        raise ConfigError([*problems.messages, str(error).splitlines()[0]]) from None
    found = Problems(list(problems.messages), set(problems.bad))
    base = HydraConfig.get().runtime.cwd
    config = from_dict(raw, world_size=launch.world_size, problems=found, more=functools.partial(check_here, base=base))
    if is_sweep():
        # each job has a folder of its own: <name>-0, <name>-1, ... in the order of the sweep
        config = dataclasses.replace(config, name=f"{config.name}-{HydraConfig.get().job.num}")
    return config.at(base)


def is_sweep() -> bool:
    """Whether this is a job of a sweep (-m)."""
    return HydraConfig.get().mode == RunMode.MULTIRUN


if __name__ == "__main__":
    main()
