"""Shared: a pool of real ranks, a tiny corpus of real text, and a config of a tiny run in a folder of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from ranks import Ranks
from tasks import BASE, merged, write_corpus


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Processes for tests that need real ranks."""
    pool = Ranks()
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of small text files."""
    folder = tmp_path_factory.mktemp("corpus")
    write_corpus(folder)
    return folder


@pytest.fixture
def raw(corpus: Path, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """``raw({"train.steps": 3})``: the tiny run's config as a dictionary, writing under this test's folder."""

    def make(changes: dict[str, Any] | None = None) -> dict[str, Any]:
        return merged(BASE, {"data.path": str(corpus), "log.dir": str(tmp_path / "runs")} | (changes or {}))

    return make
