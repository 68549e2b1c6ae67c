"""Layouts: a permutation, exact after a round trip, and its index arithmetic (CASES RM-09, SH-01, SH-06)."""

import math
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from ringattn import Layout, Ring
from ringattn.kernels.contract import KEY_BLOCK
from ringattn.ring.balance import CostModel
from ringattn.ring.chunks import Chunks, chunk_length
from ringattn.ring.layout import ALL_LAYOUTS, next_length, padded_length

quick = settings(max_examples=40, deadline=None)


def build(kind, s, w, ulysses=1, **kwargs):
    """A layout of any kind; ``balanced`` for documents of 5 tokens and kernel tiles of 4."""
    documents = torch.arange(s) // 5 if kind == "balanced" else None
    return Layout(kind, s, w, ulysses, documents, cost=CostModel(tile=4, state=8), **kwargs)


def part_of(ring_size, rank, ulysses, ulysses_rank, virtual=1):
    """The ring as one of many processes sees it, without the processes."""
    ring = Ring(virtual=virtual)
    ring.processes, ring.size, ring.rank = ring_size // virtual, ring_size, rank
    ring.shards = range(rank * virtual, (rank + 1) * virtual)
    ring.ulysses, ring.ulysses_rank = ulysses, ulysses_rank
    return ring


@pytest.mark.parametrize("kind", ALL_LAYOUTS)
@pytest.mark.parametrize("w", [1, 2, 3, 4, 5, 8])
def test_positions_are_a_permutation_and_round_trip(kind, w):
    s = next_length(kind, 48 * w - 1, w)
    layout, ring = build(kind, s, w), Ring(virtual=w)
    positions = layout.positions(ring)
    assert positions.dtype == torch.int64
    assert torch.equal(positions.sort().values, torch.arange(s))
    assert len(layout.owners) * layout.chunk_len == s
    for shard in range(w):
        rows = layout.shard_positions(shard)
        assert (np.diff(rows) > 0).all() and len(rows) == s // w
        assert np.array_equal(layout.owners[rows // layout.chunk_len], np.full(s // w, shard))
        # local index of any global position, against a search
        p = np.arange(s + 1)
        assert np.array_equal(layout.count_below(shard, p), np.searchsorted(rows, p))
        assert np.array_equal(layout.chunks.count_below(p)[:, shard], np.searchsorted(rows, p))
    x = torch.arange(2 * s * 3).view(2, s, 3)
    assert torch.equal(layout.unshard(layout.shard(x, ring), ring), x)
    assert torch.equal(layout.shard(torch.arange(s), ring, dim=0), positions)
    # side tensors split alike, over the sequence and not the batch
    index = torch.arange(s).expand(2, s)
    assert torch.equal(layout.shard(index, ring), positions.expand(2, s))


def test_owners_of_each_kind():
    assert Layout("contiguous", 12, 3).owners.tolist() == [0, 1, 2]
    assert Layout("zigzag", 12, 3).owners.tolist() == [0, 1, 2, 2, 1, 0]
    assert Layout("striped", 9, 3).owners.tolist() == [0, 1, 2] * 3
    assert Layout("chunk-striped", 48, 3).owners.tolist() == [0, 1, 2] * 4  # a shorter shard is cut in four
    assert Layout("chunk_striped", 48, 3).kind == "chunk-striped"
    long = Layout("chunk-striped", 3 * 4096, 3)
    assert long.owners.tolist() == [0, 1, 2] * 32 and long.chunk_len == KEY_BLOCK


@quick
@given(shard_len=st.integers(1, 5000), least=st.sampled_from([1, 7, 128]))
def test_chunk_lengths_divide_the_shard(shard_len, least):
    length = chunk_length(shard_len, least)
    assert shard_len % length == 0 and length >= min(least, shard_len / 4)
    assert all(shard_len % d for d in range(min(least, -(-shard_len // 4)), length))


@quick
@given(w=st.integers(1, 8), chunk_len=st.integers(1, 6), each=st.integers(1, 6), data=st.data())
def test_any_table_of_owners_counts_right(w, chunk_len, each, data):
    owners = np.array(data.draw(st.permutations([*range(w)] * each)))
    chunks = Chunks(owners, chunk_len, w)
    p = np.arange(chunks.seq_len + 1)
    for shard in range(w):
        rows = np.flatnonzero(np.repeat(owners, chunk_len) == shard)
        assert np.array_equal(chunks.positions(shard), rows)
        assert np.array_equal(chunks.count_below(p)[:, shard], np.searchsorted(rows, p))


@quick
@given(
    kind=st.sampled_from(ALL_LAYOUTS), w=st.integers(1, 4), virtual=st.integers(1, 3), ulysses=st.integers(1, 4), s=st.integers(1, 300),
)
def test_ulysses_parts_are_equal_contiguous_pieces_of_each_shard(kind, w, virtual, ulysses, s):
    w *= virtual
    s = next_length(kind, s, w, ulysses)
    layout, whole = build(kind, s, w, ulysses), build(kind, s, w)
    length, part = s // w, s // w // ulysses
    for rank in range(w // virtual):
        shards = whole.positions(part_of(w, rank, 1, 0, virtual)).view(virtual, length)
        for u in range(ulysses):
            ring = part_of(w, rank, ulysses, u, virtual)
            assert torch.equal(layout.positions(ring), shards[:, u * part : (u + 1) * part].flatten())
            assert torch.equal(layout.shard(torch.arange(s)[None], ring)[0], layout.positions(ring))


class Group:
    """Some threads that gather from each other, in the place of a process group."""

    def __init__(self, size):
        self.barrier, self.tensors = threading.Barrier(size, timeout=20), [None] * size

    def all_gather(self, parts, x, index):
        self.tensors[index] = x
        self.barrier.wait()
        for part, tensor in zip(parts, self.tensors, strict=True):
            part.copy_(tensor)
        self.barrier.wait()


@pytest.mark.parametrize("kind", ALL_LAYOUTS)
@pytest.mark.parametrize(("p", "ulysses", "virtual"), [(2, 2, 2), (3, 1, 1), (1, 4, 2), (2, 3, 1)])
def test_unshard_gathers_over_both_axes(kind, p, ulysses, virtual, monkeypatch):
    """unshard(shard(x)) of p * ulysses processes, which are threads here; test_exchange does it over gloo."""
    monkeypatch.setattr(dist, "all_gather", lambda parts, x, group: group[0].all_gather(parts, x, group[1]))
    w = p * virtual
    s = next_length(kind, 40 * w, w, ulysses)
    layout = build(kind, s, w, ulysses)
    inputs = [(torch.randn(3, s, 5), 1), (torch.randn(2, 3, s), -1)]
    rings, parts = [Group(p) for _ in range(ulysses)], [Group(ulysses) for _ in range(p)]

    def process(rank, u):
        ring = part_of(w, rank, ulysses, u, virtual)
        ring.group, ring.ulysses_group = (rings[u], rank), (parts[rank], u)
        return [layout.unshard(layout.shard(x, ring, dim), ring, dim) for x, dim in inputs]

    with ThreadPoolExecutor(p * ulysses) as pool:
        futures = [pool.submit(process, rank, u) for rank in range(p) for u in range(ulysses)]
        for future in futures:
            for (x, _), y in zip(inputs, future.result(), strict=True):
                assert torch.equal(x, y)


def test_balanced_causal_work_in_zigzag():
    w, s = 4, 64
    layout = Layout("zigzag", s, w)
    work = [int((layout.shard_positions(r) + 1).sum()) for r in range(w)]
    assert len(set(work)) == 1


@quick
@given(kind=st.sampled_from(ALL_LAYOUTS), w=st.integers(1, 9), ulysses=st.integers(1, 6), s=st.integers(1, 20000))
def test_next_length_is_the_least_and_padded_length_splits_well(kind, w, ulysses, s):
    def splits(n):
        halves = 2 if kind == "zigzag" else 1
        return n % (halves * w) == 0 and n // w % ulysses == 0

    least, padded = next_length(kind, s, w, ulysses), padded_length(kind, s, w, ulysses)
    assert splits(least) and least >= s and not any(splits(n) for n in range(s, least))
    assert splits(padded) and s <= padded < s + w * max(2 * ulysses, KEY_BLOCK * ulysses)
    if kind == "chunk-striped" and padded >= 4 * KEY_BLOCK * w:
        assert Layout(kind, padded, w, ulysses).chunk_len == KEY_BLOCK
    if padded == least == s and kind != "balanced":
        assert math.prod((Layout(kind, s, w, ulysses).chunk_len, len(Layout(kind, s, w).owners))) == s


def test_a_length_of_whole_tiles_is_not_padded():
    assert padded_length("chunk-striped", 8 * 1024, 8) == 8 * 1024
    assert padded_length("balanced", 8 * 1024 + 1, 8, 2) == 9 * 1024
    assert padded_length("zigzag", 8 * 1024 + 1, 8) == 8 * 1024 + 16
    assert padded_length("striped", 100, 8) == 104


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("zigzag", 30, 4), "next length that works is 32"),
        (("contiguous", 31, 4), "next length that works is 32"),
        (("striped", 0, 4), "next length that works is 4"),
        (("chunk-striped", 33, 4), "next length that works is 36"),
        (("zigzag", 32, 4, 3), "next length that works is 48"),
        (("contiguous", 36, 4, 2), "of ulysses=2 in every shard = 8; the next length that works is 40"),
        (("spiral", 32, 4), "contiguous, zigzag, striped, chunk-striped, balanced"),
        (("striped", 32, 0), "ring_size=0"),
        (("zigzag", 32, 4, 0), "ulysses=0"),
        (("zigzag", 32, 4, 1, torch.zeros(32)), "does not depend on documents"),
        (("balanced", 32, 4), "give documents"),
        (("balanced", 32, 4, 1, torch.zeros(31, dtype=torch.int64)), r"expected \[32\]"),
        (("balanced", 32, 4, 1, torch.arange(32).flip(0)), "never decreasing"),
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
    with pytest.raises(ValueError, match="layout is for ulysses=2 but the ring has ulysses=1"):
        Layout("zigzag", 32, 4, 2).positions(ring)
    with pytest.raises(ValueError, match="virtual=0"):
        Ring(virtual=0)


def test_keys_tell_layouts_apart():
    documents = torch.tensor([0] * 500 + [1] * 12)
    balanced = [Layout("balanced", 512, 4, documents=d, cost=CostModel(tile=8)) for d in (documents, documents.clone(), documents * 0)]
    layouts = [Layout("zigzag", 512, 4), Layout("zigzag", 512, 4, 2), Layout("striped", 512, 4), *balanced]
    assert balanced[0].key == balanced[1].key
    assert len({x.key for x in layouts}) >= 4 and Layout("zigzag", 512, 4).key == layouts[0].key
