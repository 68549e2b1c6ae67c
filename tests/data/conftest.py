"""Fresh random numbers for the tests of the data."""

from __future__ import annotations

import numpy as np
import pytest


@pytest.fixture
def rng() -> np.random.Generator:
    """Fresh numbers in every run; a failure shows the seed."""
    seed = np.random.SeedSequence().entropy
    print(f"rng seed {seed}")
    return np.random.default_rng(seed)
