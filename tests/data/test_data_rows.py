"""Rows and batches: labels, positions, documents, epochs, the split, and that a row depends on nothing but its number."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

from ringattn.data import IGNORE, Batch, Corpus, DataConfig, DataError, Dataset
from ringattn.data.rows import Stream, cut, gather, mark, order, split

Documents = Callable[..., list[list[int]]]
FIELDS = ("tokens", "labels", "documents", "positions")


def make_corpus(documents: list[list[int]], masks: list[list[int]] | None = None, vocab_size: int = 2**16) -> Corpus:
    """A corpus of the given documents, its identities from their content."""
    identities = [int.from_bytes(hashlib.sha256(repr(d).encode()).digest()[:8], "little") for d in documents]
    return Corpus(
        name="test",
        tokens=np.concatenate([np.asarray(d, np.uint16) for d in documents]),
        offsets=np.cumsum([0] + [len(d) for d in documents]),
        identities=np.asarray(identities, np.uint64),
        mask=None if masks is None else np.concatenate([np.asarray(m, np.uint8) for m in masks]),
        vocab_size=vocab_size,
        bytes_per_token=1.0,
        fingerprint=hashlib.sha256(repr((documents, masks)).encode()).hexdigest(),
    )


@pytest.fixture
def random_documents(rng: np.random.Generator) -> Callable[..., list[list[int]]]:
    """Documents of 1 to ``longest`` tokens. All tokens differ while they last, so that a token names its place in the corpus."""

    def make(count: int, longest: int = 30) -> list[list[int]]:
        lengths = rng.integers(1, longest + 1, count)
        tokens = rng.permutation(int(lengths.sum()))
        return [part.tolist() for part in np.split(tokens, np.cumsum(lengths)[:-1])]

    return make


def stream_in_order(lengths: list[int], seq_len: int) -> Stream:
    starts = np.cumsum([0] + lengths)
    return Stream(np.arange(len(lengths)), starts, np.arange(-(-int(starts[-1]) // seq_len)))


def equal(a: Batch, b: Batch) -> bool:
    return all(torch.equal(getattr(a, f), getattr(b, f)) for f in FIELDS)


def digests(batch: Batch) -> list[str]:
    """A hash for each row of the unsplit batch."""
    count = len(batch.tokens)
    return [hashlib.sha256(b"".join(getattr(batch, f)[i].numpy().tobytes() for f in FIELDS)).hexdigest() for i in range(count)]


def whole_epoch(data: Dataset, epoch: int) -> Batch:
    return data.batch(epoch, range(data.rows_per_epoch), data.rows_per_epoch)


def dataset(documents: list[list[int]], seq_len: int, seed: int = 0, masks: Any = None, **cfg: Any) -> Dataset:
    return Dataset(make_corpus(documents, masks), DataConfig(**{"val_fraction": 0.0, **cfg}), seq_len=seq_len, seed=seed)


# Labels, positions, documents


@pytest.mark.parametrize(
    "seq_len, labels",
    [
        (6, [[1, 2, IGNORE, 11, 12, IGNORE]]),
        (3, [[1, 2, IGNORE], [11, 12, IGNORE]]),
        (2, [[1, 2], [IGNORE, 11], [12, IGNORE]]),
        (4, [[1, 2, IGNORE, 11], [12, IGNORE, IGNORE, IGNORE]]),
        (1, [[1], [2], [IGNORE], [11], [12], [IGNORE]]),
    ],
)
def test_labels_stop_at_document_borders(seq_len: int, labels: list[list[int]]) -> None:
    corpus = make_corpus([[0, 1, 2], [10, 11, 12]])
    stream = stream_in_order([3, 3], seq_len)
    got = [gather(corpus, cut(stream, corpus.offsets, row, seq_len), seq_len)[1].tolist() for row in range(len(stream.rows))]
    assert got == labels


@pytest.mark.parametrize(
    "positions, first, second",
    [
        ("restart", [0, 1, 2, 3, 0, 1, 2, 3, 0, 1], [0, 1, 0, 1, 2, 3, 4, 5, 6, 7]),
        ("continue", list(range(10)), list(range(10))),
    ],
)
def test_positions_on_whole_rows(positions: str, first: list[int], second: list[int]) -> None:
    """Documents at offsets 0, 4, 8; the third goes on in the second row, whose rest is padding."""
    corpus, stream = make_corpus([[1] * 4] * 3), stream_in_order([4, 4, 4], 10)
    got = [mark(cut(stream, corpus.offsets, row, 10), 10, positions=positions, mask_documents=True) for row in (0, 1)]
    assert [at.tolist() for _, at in got] == [first, second]
    assert [documents.tolist() for documents, _ in got] == [[0] * 4 + [1] * 4 + [2] * 2, [0] * 2 + [-1] * 8]


def test_unmasked_rows_are_one_document_with_the_same_labels(random_documents: Documents) -> None:
    documents = random_documents(12)
    on, off = (whole_epoch(dataset(documents, 16, mask_documents=mask), 0) for mask in (True, False))
    assert torch.equal(on.labels, off.labels) and torch.equal(on.tokens, off.tokens) and torch.equal(on.positions, off.positions)
    assert torch.equal(off.documents, torch.where(on.documents < 0, -1, 0).int())


@pytest.mark.parametrize("seq_len", [1, 7, 64, 10_000])
@pytest.mark.parametrize("positions", ["restart", "continue"])
def test_every_row_equals_the_naive_pipeline(random_documents: Documents, rng: np.random.Generator, seq_len: int, positions: str) -> None:
    documents = random_documents(25)
    masks = [rng.integers(0, 2, len(d)).tolist() for d in documents]
    data = dataset(documents, seq_len, seed=int(rng.integers(1000)), masks=masks, positions=positions)
    for epoch in (0, 3):
        batch, stream = whole_epoch(data, epoch), data._epoch(epoch)
        flat = [(d, i) for d in stream.documents for i in range(len(documents[d]))]
        for row in range(data.rows_per_epoch):
            begin = int(stream.rows[row]) * seq_len
            here = flat[begin : begin + seq_len]
            expected: list[tuple[int, ...]] = []
            seen: list[int] = []
            for d, i in here:
                seen += [] if d in seen else [d]
                at = i - min(j for e, j in here if e == d) if positions == "restart" else len(expected)
                label = documents[d][i + 1] if i + 1 < len(documents[d]) and masks[d][i + 1] else IGNORE
                expected.append((documents[d][i], label, seen.index(d), at))
            for i in range(seq_len - len(here)):
                expected.append((0, IGNORE, -1, i + (0 if positions == "restart" else len(here))))
            assert list(zip(*(getattr(batch, f)[row].tolist() for f in FIELDS), strict=True)) == expected


def test_dtypes_and_shapes(random_documents: Documents) -> None:
    batch = dataset(random_documents(5), 8).batch(0, [1, 0, 2], 3)
    assert all(getattr(batch, f).shape == (3, 8) for f in FIELDS)
    assert [getattr(batch, f).dtype for f in FIELDS] == [torch.int64, torch.int64, torch.int32, torch.int64]


# Epochs


@pytest.mark.parametrize("seq_len", [1, 5, 32, 1000])
def test_an_epoch_is_the_corpus_exactly(random_documents: Documents, seq_len: int) -> None:
    """Every token once, every (token, next token) pair within a document once, nothing else; padding in one row at most."""
    documents = random_documents(30)
    data = dataset(documents, seq_len)
    for epoch in range(3):
        batch = whole_epoch(data, epoch)
        real, valid = batch.documents >= 0, batch.labels != IGNORE
        assert Counter(batch.tokens[real].tolist()) == Counter(t for d in documents for t in d)
        pairs = Counter(zip(batch.tokens[valid].tolist(), batch.labels[valid].tolist(), strict=True))
        assert pairs == Counter(pair for d in documents for pair in zip(d, d[1:], strict=False))
        assert (~real).any(1).sum() <= 1 and not (valid & ~real).any()
        assert data.tokens == real.sum() and (~real).sum() < seq_len


def test_masked_tokens_are_read_but_never_predicted(random_documents: Documents, rng: np.random.Generator) -> None:
    documents = random_documents(30)
    masks = [rng.integers(0, 2, len(d)).tolist() for d in documents]
    batch = whole_epoch(dataset(documents, 11, masks=masks), 0)
    assert Counter(batch.tokens[batch.documents >= 0].tolist()) == Counter(t for d in documents for t in d)
    targets = Counter(t for d, m in zip(documents, masks, strict=True) for t, keep in zip(d[1:], m[1:], strict=True) if keep)
    assert Counter(batch.labels[batch.labels != IGNORE].tolist()) == targets


def test_orders_differ_by_epoch_and_seed(random_documents: Documents) -> None:
    documents = random_documents(40)
    streams = [dataset(documents, 8, seed=seed)._epoch(epoch) for seed in (0, 1) for epoch in (0, 1)]
    assert len({s.documents.tobytes() for s in streams}) == len({s.rows.tobytes() for s in streams}) == 4


def test_orders_never_change_between_versions() -> None:
    """Pinned: another value here means that resumed runs would read other tokens (raise STREAM_VERSION then)."""
    assert order(8, 1234, 5, 0).tolist() == ORDER_DOCUMENTS
    assert order(8, 1234, 5, 1).tolist() == ORDER_ROWS


ORDER_DOCUMENTS = [1, 5, 0, 2, 6, 7, 4, 3]
ORDER_ROWS = [1, 4, 7, 0, 2, 3, 5, 6]


# A pure function of the row's number


def test_equal_rows_from_independent_instances_in_any_order(random_documents: Documents, rng: np.random.Generator) -> None:
    """20 steps over several epoch borders: in order, in a random order, one row at a time, and from threads."""
    documents, rows_per_step = random_documents(12), 4
    a, b, c = (dataset(documents, 16, seed=7) for _ in range(3))
    assert 20 * rows_per_step > 2 * a.rows_per_epoch
    straight = [a.batch(step, range(rows_per_step), rows_per_step) for step in range(20)]
    for step in rng.permutation(20).tolist():
        assert equal(b.batch(step, range(rows_per_step), rows_per_step), straight[step])
        row = int(rng.integers(rows_per_step))
        assert torch.equal(b.batch(step, [row], rows_per_step).tokens[0], straight[step].tokens[row])
    with ThreadPoolExecutor(2) as pool:
        threaded = pool.map(lambda step: c.batch(step, range(rows_per_step), rows_per_step), range(20))
        assert all(equal(x, y) for x, y in zip(threaded, straight, strict=True))


def test_ring_peers_agree_and_rings_differ(random_documents: Documents) -> None:
    """Data 2 x ring 2: the peers of a ring ask for the same rows, each from its own instance."""
    documents = random_documents(60)
    ranks = [dataset(documents, 16, seed=3) for _ in range(4)]
    assert len(set(digests(whole_epoch(ranks[0], 0)))) == ranks[0].rows_per_epoch > 8
    for step in range(20):
        hashes = [digests(data.batch(step, [rank // 2], 2))[0] for rank, data in enumerate(ranks)]
        assert hashes[0] == hashes[1] and hashes[2] == hashes[3] and hashes[0] != hashes[2]


@pytest.mark.parametrize("ways", [1, 2, 3, 4, 6])
def test_rows_do_not_depend_on_the_split_over_ranks(random_documents: Documents, ways: int) -> None:
    """Rows per step is the global number; how many ranks share them changes nothing, padding included."""
    documents, rows = random_documents(9), 12
    whole = dataset(documents, 16, seed=1).batch(2, range(rows), rows)
    parts = [dataset(documents, 16, seed=1).batch(2, range(i, rows, ways), rows) for i in range(ways)]
    for i, part in enumerate(parts):
        assert all(torch.equal(getattr(part, f), getattr(whole, f)[i::ways]) for f in FIELDS)


def test_resumed_twice_reads_what_the_straight_run_reads(random_documents: Documents) -> None:
    """Stop at 3, at 6, and in the second epoch; a new instance each time, as a new process has."""
    documents = random_documents(15)
    straight = dataset(documents, 16, seed=5)
    per_epoch = straight.rows_per_epoch // 2
    stops = [0, 3, 6, per_epoch + 2, 2 * per_epoch + 3]
    expected = [digest for step in range(stops[-1]) for digest in digests(straight.batch(step, range(2), 2))]
    resumed = []
    for start, stop in zip(sorted(stops), sorted(stops)[1:], strict=False):
        data = dataset(documents, 16, seed=5)
        resumed += [digest for step in range(start, stop) for digest in digests(data.batch(step, range(2), 2))]
    assert resumed == expected


def test_few_epochs_are_kept(random_documents: Documents) -> None:
    data = dataset(random_documents(3), 8)
    for epoch in range(6):
        whole_epoch(data, epoch)
    assert set(data._epochs) == {4, 5}


@pytest.mark.parametrize(
    "change", [{"seq_len": 9}, {"seed": 1}, {"positions": "continue"}, {"mask_documents": False}, {"val_fraction": 0.5}]
)
def test_stream_fingerprint_tells_other_rows(random_documents: Documents, change: dict[str, Any]) -> None:
    documents = random_documents(20)
    base = {"seq_len": 8, "seed": 0}
    a, b, c = dataset(documents, **base), dataset(documents, **base), dataset(documents, **{**base, **change})
    assert a.stream_fingerprint == b.stream_fingerprint != c.stream_fingerprint
    assert a.fingerprint == c.fingerprint != dataset(documents[1:], **base).fingerprint


# Validation


def test_validation_is_disjoint_and_complete(random_documents: Documents) -> None:
    documents = random_documents(50)
    data = dataset(documents, 16, val_fraction=0.3)
    steps = -(-data.val_rows // 4)
    val = [data.batch(step, range(4), 4, "val") for step in range(steps)]
    val_tokens = Counter(t for b in val for t in b.tokens[b.documents >= 0].tolist())
    train = whole_epoch(data, 0)
    train_tokens = Counter(train.tokens[train.documents >= 0].tolist())
    assert val_tokens and train_tokens and not set(val_tokens) & set(train_tokens)
    assert val_tokens + train_tokens == Counter(t for d in documents for t in d)
    assert (data.tokens, data.val_tokens) == (train_tokens.total(), val_tokens.total())


def test_validation_rows_are_fixed_and_end_in_padding(random_documents: Documents) -> None:
    documents = random_documents(50)
    a, b = (dataset(documents, 16, seed=seed, val_fraction=0.3) for seed in (0, 99))
    rows = a.val_rows
    assert rows == b.val_rows and equal(a.batch(0, range(rows), rows, "val"), b.batch(0, range(rows), rows, "val"))
    past = a.batch(1, range(rows), rows, "val")
    assert (past.documents == -1).all() and (past.labels == IGNORE).all()


def test_copies_stay_on_one_side_and_sides_are_stable(random_documents: Documents) -> None:
    documents = random_documents(40)
    train, val = split(make_corpus(documents + documents), 0.3)
    assert {d % 40 for d in train}.isdisjoint({d % 40 for d in val})
    assert set(val) == {d + k for d in split(make_corpus(documents), 0.3)[1] for k in (0, 40)}


@pytest.mark.parametrize("fraction", [1e-9, 0.999999999])
def test_each_side_gets_a_document(random_documents: Documents, fraction: float) -> None:
    sides = split(make_corpus(random_documents(2)), fraction)
    assert [len(side) for side in sides] == [1, 1]


def test_one_document_cannot_be_split() -> None:
    for documents in ([[1, 2]], [[1, 2], [1, 2]]):
        with pytest.raises(DataError, match=r"data\.val_fraction=0\.1: cannot hold out.*set 0"):
            dataset(documents, 4, val_fraction=0.1)
    data = dataset([[1, 2]], 4)
    assert data.val_rows == 0
    with pytest.raises(DataError, match="holds out no documents"):
        data.batch(0, [0], 1, "val")


# Bad calls


@pytest.mark.parametrize(
    "call, message",
    [
        ((-1, [0], 1), "step=-1"),
        ((0, [0], 0), "rows_per_step=0"),
        ((0, [2], 2), "row=2: must be from 0 to 1"),
        ((0, [-1], 2), "row=-1"),
        ((0, [], 2), "rows: must name"),
        ((0, [0], 1, "test"), "split=test"),
    ],
)
def test_bad_calls_are_refused(call: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataset([[1, 2], [3]], 2).batch(*call)


def test_bad_lengths_seeds_and_tokens_are_refused() -> None:
    with pytest.raises(DataError, match=r"train\.seq_len=0"):
        dataset([[1]], 0)
    with pytest.raises(DataError, match="seed=-1"):
        dataset([[1]], 1, seed=-1)
    data = Dataset(make_corpus([[1, 2, 9]], vocab_size=9), DataConfig(val_fraction=0.0), seq_len=3, seed=0)
    with pytest.raises(DataError, match="a token of test=9: must be below 9"):
        data.batch(0, [0], 1)
