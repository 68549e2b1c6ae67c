"""Fresh seeds: each test draws its inputs from a seed that is printed on failure and can be set with --seed."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))  # `from oracle import ...` in every test folder


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seed", type=int, default=None, help="seed of the random inputs (default: a new one each run)")


def pytest_configure(config: pytest.Config) -> None:
    config.stash_seed = config.getoption("--seed") or random.SystemRandom().randrange(1, 2**31)  # type: ignore[attr-defined]
    torch.set_num_threads(1)


def pytest_report_header(config: pytest.Config) -> str:
    return f"inputs seed: {config.stash_seed} (repeat with --seed)"  # type: ignore[attr-defined]


@pytest.fixture(autouse=True)
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    """Seeds torch too, so that every test can draw with torch.randn."""
    seed = request.config.stash_seed  # type: ignore[attr-defined]
    torch.manual_seed(seed)
    return np.random.default_rng(seed)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))
