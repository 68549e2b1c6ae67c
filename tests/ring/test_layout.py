"""Layouts: a permutation, exact after a round trip, and its index arithmetic (CASES RM-09, SH-01, SH-06)."""

import numpy as np
import pytest
import torch

from ringattn import Layout, Ring
from ringattn.ring.layout import LAYOUTS, next_length


@pytest.mark.parametrize("kind", LAYOUTS)
@pytest.mark.parametrize("w", [1, 2, 3, 4, 5, 8])
def test_positions_are_a_permutation_and_round_trip(kind, w):
    s = next_length(kind, 47 * w, w)
    layout, ring = Layout(kind, s, w), Ring(virtual=w)
    positions = layout.positions(ring)
    assert positions.dtype == torch.int64
    assert torch.equal(positions.sort().values, torch.arange(s))
    for shard in range(w):
        rows = layout.shard_positions(shard)
        assert (np.diff(rows) > 0).all() and len(rows) == s // w
        # local index of any global position, against a search
        p = np.arange(s + 1)
        assert np.array_equal(layout.count_below(shard, p), np.searchsorted(rows, p))
    x = torch.arange(2 * s * 3).view(2, s, 3)
    assert torch.equal(layout.unshard(layout.shard(x, ring), ring), x)
    assert torch.equal(layout.shard(torch.arange(s), ring, dim=0), positions)
    # side tensors split alike, over the sequence and not the batch
    index = torch.arange(s).expand(2, s)
    assert torch.equal(layout.shard(index, ring), positions.expand(2, s))


def test_balanced_causal_work_in_zigzag():
    w, s = 4, 64
    layout = Layout("zigzag", s, w)
    work = [int((layout.shard_positions(r) + 1).sum()) for r in range(w)]
    assert len(set(work)) == 1


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("zigzag", 30, 4), "next length that works is 32"),
        (("contiguous", 31, 4), "next length that works is 32"),
        (("striped", 0, 4), "next length that works is 4"),
        (("spiral", 32, 4), "contiguous, zigzag, striped"),
        (("striped", 32, 0), "ring_size=0"),
        (("zigzag", 32, 4, 2), "ulysses=2"),
        (("zigzag", 32, 4, 1, torch.zeros(32)), "documents"),
    ],
)
def test_refusals(args, words):
    with pytest.raises(ValueError, match=words):
        Layout(*args)


def test_wrong_lengths_and_rings_are_refused():
    layout, ring = Layout("zigzag", 32, 4), Ring(virtual=4)
    with pytest.raises(ValueError, match="whole 32 positions"):
        layout.shard(torch.zeros(2, 30), ring)
    with pytest.raises(ValueError, match="must hold 32 rows"):
        layout.unshard(torch.zeros(2, 30), ring)
    with pytest.raises(ValueError, match="ring of 4 shards but the ring has 2"):
        layout.positions(Ring(virtual=2))
    with pytest.raises(ValueError, match="virtual=0"):
        Ring(virtual=0)
