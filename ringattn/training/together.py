"""Ranks that fail, fail together: a mistake that one rank finds is raised by all of them, instead of leaving the others to wait."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from ringattn.config import ConfigError
from ringattn.data import DataError
from ringattn.training.safe_reader import CheckpointError

T = TypeVar("T")


def attempt(problems: list[str], work: Callable[[], T]) -> T | None:
    """The result of ``work()``; what the user can mend about it goes into ``problems`` instead, and the result is None."""
    try:
        return work()
    except ConfigError as error:
        problems += error.problems
    except DataError as error:
        problems.append(str(error))
    return None


def agree(own: list[str]) -> list[str]:
    """The problems of all ranks; those that not all ranks have are said with their rank. Every rank calls this and gets the same."""
    everyone: list[list[str]] = [[]] * dist.get_world_size()
    dist.all_gather_object(everyone, own)
    found: list[str] = []
    for rank, problems in enumerate(everyone):
        for problem in problems:
            shared = all(problem in other for other in everyone)
            said = problem if shared else f"{problem} (rank {rank})"
            if said not in found:
                found.append(said)
    return found


def refuse_together(own: list[str]) -> None:
    """Raise ConfigError on all ranks if one of them has a problem. Every rank calls this."""
    found = agree(own)
    if found:
        raise ConfigError(found)


def everywhere(work: Callable[[], T]) -> T:
    """``work()`` on every rank, without collectives of its own; where it fails on one, CheckpointError is raised on all."""
    result, own = None, list[str]()
    try:
        result = work()
    except (CheckpointError, OSError) as error:
        own.append(str(error))
    found = agree(own)
    if found:
        raise CheckpointError(found[0])
    return result  # type: ignore[return-value]


def on_main(work: Callable[[], T]) -> T:
    """``work()`` on rank 0, its result on all ranks, which wait here until it is done.

    What it raises of ConfigError, CheckpointError and OSError is raised on all.
    """
    answer: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            answer[0] = work()
        except ConfigError as error:
            answer[1] = ConfigError, (error.problems,)
        except CheckpointError as error:
            answer[1] = CheckpointError, (str(error),)
        except OSError as error:
            answer[1] = OSError, (error.errno, error.strerror, error.filename) if error.strerror else (str(error),)
    dist.broadcast_object_list(answer, src=0)
    if answer[1] is not None:
        kind, arguments = answer[1]
        raise kind(*arguments)
    result: T = answer[0]
    return result


def lost_contact(error: BaseException) -> bool:
    """Whether an error only says that another rank is gone or silent. Process groups raise plain RuntimeErrors for that on the CPU."""
    if isinstance(error, dist.DistError):
        return True
    text = str(error)
    words = ("gloo/transport", "Connection closed by peer", "Connection reset by peer", "Broken pipe", "Timed out waiting", "timed out")
    return isinstance(error, RuntimeError) and any(word in text for word in words)
