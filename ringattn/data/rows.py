"""From documents to rows: the pipeline's stages as pure functions on numpy arrays.

    3. split     documents -> training and validation documents, by content
    4. shuffle   (seed, epoch) -> the epoch's token stream: documents in a new order, end to end, and the order of its rows
    5. cut       row -> the pieces of documents that it holds
    6. gather    pieces -> tokens and labels
    7. mark      pieces -> document ids and RoPE positions

(Stages 1 and 2, find and read, are in `corpus`.) Lengths: D documents, R rows an epoch, S tokens a row, K pieces in a row.

An epoch's stream holds each token of its documents exactly once and is chopped every S tokens, so R = ceil(tokens / S). The rest at
the end makes one more row, filled up with padding (token 0, no label, document -1): nothing is dropped and nothing is repeated.
A document may go on in the next row of the stream. Its last token in the first row still predicts its first token in the second, so
every (token, next token) pair within a document is trained on exactly once an epoch, and no pair reaches across two documents.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ringattn.data.config import DataError
from ringattn.data.corpus import Corpus

IGNORE = -100  # the label of a token that predicts nothing
DOCUMENTS, ROWS = 0, 1  # what an order is for: the two orders of an epoch are independent


# 3. Split.


def split(corpus: Corpus, fraction: float) -> tuple[np.ndarray, np.ndarray]:
    """Training and validation documents (int64 indices, ascending), decided by each document's content alone.

    So copies of one document stay on one side, and a document stays on its side when others come or go. The fraction is met in
    expectation; each side gets at least one document. Fraction 0 holds out none.
    """
    if fraction == 0:
        return np.arange(len(corpus.identities)), np.empty(0, np.int64)
    held_out = corpus.identities.astype(np.float64) / 2.0**64 < fraction
    if held_out.all() or not held_out.any():
        lowest, highest = corpus.identities.min(), corpus.identities.max()
        if lowest == highest:
            message = "cannot hold out a document, the corpus has only one (copies count as one); set 0, or add documents"
            raise DataError("data.val_fraction", fraction, message)
        held_out = corpus.identities == lowest if not held_out.any() else corpus.identities != highest
    return np.flatnonzero(~held_out), np.flatnonzero(held_out)


# 4. Shuffle.


@dataclass(frozen=True, eq=False)
class Stream:
    """The token stream of one epoch.

    ``documents``: int64 [D], the corpus document at each place. ``starts``: int64 [D + 1], where each place starts in the stream, and the
    stream's length. ``rows``: int64 [R], which stretch of S tokens the epoch's row i reads.
    """

    documents: np.ndarray
    starts: np.ndarray
    rows: np.ndarray


def order(count: int, seed: int, epoch: int, purpose: int) -> np.ndarray:
    """A permutation of ``count``, int64: the sort of raw Philox words. numpy promises to keep those; `Generator.permutation` may change."""
    bits = np.random.Philox(np.random.SeedSequence(seed, spawn_key=(purpose, epoch)))
    return np.argsort(bits.random_raw(count), kind="stable")


def shuffle(documents: np.ndarray, lengths: np.ndarray, seq_len: int, seed: int, epoch: int) -> Stream:
    """The epoch's stream of the given documents; ``lengths`` are those of the whole corpus."""
    documents = documents[order(len(documents), seed, epoch, DOCUMENTS)]
    starts = np.concatenate([[0], np.cumsum(lengths[documents])])
    rows = -(-int(starts[-1]) // seq_len)
    return Stream(documents, starts, order(rows, seed, epoch, ROWS))


# 5. Cut.


@dataclass(frozen=True, eq=False)
class Pieces:
    """What a row is made of, in order. ``begins``, ``lengths``: int64 [K], corpus tokens. ``goes_on``: the last document has more."""

    begins: np.ndarray
    lengths: np.ndarray
    goes_on: bool


NOTHING = Pieces(np.empty(0, np.int64), np.empty(0, np.int64), False)  # a row of padding only


def cut(stream: Stream, offsets: np.ndarray, row: int, seq_len: int) -> Pieces:
    """The pieces of the epoch's row ``row``: one binary search among the documents."""
    begin = int(stream.rows[row]) * seq_len
    end = min(begin + seq_len, int(stream.starts[-1]))
    first = int(np.searchsorted(stream.starts, begin, side="right")) - 1
    last = int(np.searchsorted(stream.starts, end, side="left"))
    starts, ends = stream.starts[first:last], stream.starts[first + 1 : last + 1]
    inside = np.maximum(starts, begin)
    begins = offsets[stream.documents[first:last]] + (inside - starts)
    return Pieces(begins, np.minimum(ends, end) - inside, bool(ends[-1] > end))


# 6. Gather.


def gather(corpus: Corpus, pieces: Pieces, seq_len: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and labels of a row, int64 [S]; the label of a token is the next token of its document.

    IGNORE for a document's last token, for a next token that the loss mask leaves out, and for padding.
    """
    tokens, labels = np.zeros(seq_len, np.int64), np.full(seq_len, IGNORE, np.int64)
    ends = np.cumsum(pieces.lengths)
    if len(ends) == 0:
        return tokens, labels
    count = int(ends[-1])
    where = np.repeat(pieces.begins - (ends - pieces.lengths), pieces.lengths) + np.arange(count)
    if pieces.goes_on:  # one token more: the target of the row's last token
        where = np.append(where, where[-1] + 1)
    read = corpus.tokens[where].astype(np.int64)
    if read.max() >= corpus.vocab_size:
        message = f"must be below {corpus.vocab_size}, the vocabulary; the corpus is damaged (data.verify=full looks at all of it first)"
        raise DataError(f"a token of {corpus.name}", int(read.max()), message)
    tokens[:count] = read[:count]
    labels[: len(read) - 1] = read[1:]
    if corpus.mask is not None:
        labels[: len(read) - 1][corpus.mask[where[1:]] == 0] = IGNORE
    labels[(ends[:-1] if pieces.goes_on else ends) - 1] = IGNORE
    return tokens, labels


# 7. Mark.


def mark(pieces: Pieces, seq_len: int, *, positions: str, mask_documents: bool) -> tuple[np.ndarray, np.ndarray]:
    """Document ids, int32 [S], and RoPE positions, int64 [S].

    Documents count 0, 1, 2, ... along the row, padding at the tail is -1; without ``mask_documents`` the row is one document, 0.
    Positions ``restart`` at 0 with each piece and with the padding, ``continue`` along the row. A document that goes on from another
    row starts at 0 again: what came before is out of its sight.
    """
    count = int(pieces.lengths.sum())
    documents, at = np.full(seq_len, -1, np.int32), np.arange(seq_len)
    documents[:count] = np.repeat(np.arange(len(pieces.lengths)), pieces.lengths) if mask_documents else 0
    if positions == "restart":
        at[:count] -= np.repeat(np.cumsum(pieces.lengths) - pieces.lengths, pieces.lengths)
        at[count:] -= count
    return documents, at
