"""The hop schedule: live steps, permutations, trimmed messages (CASES CM-03), against brute force over the dense mask."""

import numpy as np
import pytest
import torch
from oracle import MASKS, make_mask

from ringattn import Layout, Ring, make_schedule
from ringattn.kernels.contract import KEY_BLOCK
from ringattn.kernels.intervals import dense_mask, mask_intervals
from ringattn.ring.layout import LAYOUTS, next_length


def brute(layout, mask_kwargs):
    """visible[q][o]: bool [Bb, L, L] blocks of the dense mask in local order."""
    s, w = layout.seq_len, layout.ring_size
    dense = dense_mask(*mask_intervals(s, **mask_kwargs), s).numpy()
    rows = [layout.shard_positions(r) for r in range(w)]
    return [[dense[:, rows[q]][:, :, rows[o]] for o in range(w)] for q in range(w)]


@pytest.mark.parametrize("kind", LAYOUTS)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("w", [1, 2, 3, 5])
def test_bounds_steps_and_messages_match_brute_force(kind, mask, w, rng):
    s = next_length(kind, 150 * w, w)
    kwargs = make_mask(mask, s, 2, rng)
    layout = Layout(kind, s, w)
    schedule = make_schedule(layout, Ring(virtual=w), **kwargs)
    visible = brute(layout, kwargs)
    live = {d for d in range(w) if any(visible[q][(q - d) % w].any() for q in range(w))}
    assert live <= set(schedule.offsets) and schedule.offsets[0] == 0 and list(schedule.offsets) == sorted(schedule.offsets)
    if mask != "visible":  # holes between rows are counted as live there, which is documented
        assert set(schedule.offsets) == live | {0}
    assert schedule.pairs == sum(int(visible[q][o].sum()) for q in range(w) for o in range(w))
    for hop, d in enumerate(schedule.offsets):
        for q in range(w):
            block, bounds = visible[q][(q - d) % w], schedule.bounds[hop][q]
            if bounds is None:
                assert not block.any()
                continue
            key, row = np.arange(block.shape[2]), np.arange(block.shape[1])
            lo, hi, q_lo, q_hi = (x.numpy() for x in (bounds.lo, bounds.hi, bounds.q_lo, bounds.q_hi))
            assert np.array_equal((key >= lo[..., None]) & (key < hi[..., None]), block)
            assert np.array_equal((row >= q_lo[..., None]) & (row < q_hi[..., None]), block.transpose(0, 2, 1))
            assert all((np.diff(x, axis=1) >= 0).all() for x in (lo, hi, q_lo, q_hi))
            assert bounds.pairs == block.sum() and bounds.full == block.all()
    check_messages(schedule, visible, w, layout.shard_len)


def check_messages(schedule, visible, w, length):
    """Every block of keys that a later hop sees arrives; every gradient that an earlier hop made comes home."""
    hops = len(schedule.offsets)
    assert len(schedule.kv) == len(schedule.dkv) == hops - 1
    for o in range(w):
        have = np.ones(length, bool)
        for hop in range(1, hops):
            t = schedule.kv[hop - 1]
            assert t.shift == schedule.offsets[hop] - schedule.offsets[hop - 1]
            sent = np.zeros(length, bool)
            sent[t.slice(o)] = True
            assert sent.sum() == t.rows and (have | ~sent).all(), "a shard sends rows it never received"
            have = sent
            seen = visible[(o + schedule.offsets[hop]) % w][o].any((0, 1))
            blocks = np.repeat(np.add.reduceat(seen, np.arange(0, length, KEY_BLOCK)) > 0, KEY_BLOCK)[:length]
            assert (have | ~blocks).all()
        gone = np.zeros(length, bool)
        for hop in range(1, hops):
            t = schedule.dkv[hop - 1]
            gone |= visible[(o + schedule.offsets[hop]) % w][o].any((0, 1))
            carried = np.zeros(length, bool)
            carried[t.slice(o)] = True
            assert (carried | ~gone).all(), "a gradient row is left behind"
    if hops > 1:
        assert (schedule.offsets[-1] + schedule.dkv[-1].shift) % w == 0


def test_window_is_a_halo_exchange_and_documents_stay_home():
    w, length = 8, 1024
    layout, ring = Layout("contiguous", w * length, w), Ring(virtual=w)
    window = make_schedule(layout, ring, window=200)
    assert window.offsets == (0, 1) and [t.rows for t in window.kv] == [256] and [t.rows for t in window.dkv] == [256]
    documents = torch.arange(w).repeat_interleave(length)
    packed = make_schedule(layout, ring, documents=documents)
    assert packed.offsets == (0,) and packed.kv == ()
    # a window of a few shards: what travels shrinks from hop to hop, what comes home does not get lost
    wide = make_schedule(layout, ring, window=2 * length)
    assert wide.offsets == (0, 1, 2) and [t.rows for t in wide.kv] == [1024, 1024]


def test_schedules_are_cached_by_content_and_handles_expire():
    ring, layout = Ring(virtual=2), Layout("zigzag", 64, 2)
    documents = torch.arange(64) // 20
    first = make_schedule(layout, ring, documents=documents)
    assert make_schedule(layout, ring, documents=documents.clone()) is first
    assert make_schedule(layout, ring, documents=documents + (documents > 1)).pairs == first.pairs
    assert make_schedule(layout, ring) is not first


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({"window": 3, "causal": False}, "window=3 needs causal"),
        ({"window": 0}, "at least 1"),
        ({"documents": torch.tensor([1, 0] * 8)}, "contiguous, ids never decreasing"),
        ({"documents": torch.tensor([0, -1] + [1] * 14)}, "tail only"),
        ({"documents": torch.zeros(9, dtype=torch.int64)}, r"expected \[16\]"),
        ({"documents": torch.zeros(16)}, "must hold integers"),
        ({"visible": (torch.arange(16).flip(0), torch.arange(16))}, "decreases"),
        ({"visible": (torch.arange(16), torch.arange(16) + 5)}, "allowed are -1..15"),
    ],
)
def test_masks_that_are_not_intervals_are_refused(kwargs, words):
    with pytest.raises(ValueError, match=words):
        make_schedule(Layout("zigzag", 16, 2), Ring(virtual=2), **kwargs)
