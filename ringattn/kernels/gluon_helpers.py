"""Small Triton kernels around the Hopper kernels: the plan of a mask, the per-row terms of the backward, the way out of dq's workspace.

Plain Triton, so they run anywhere and in the interpreter. Legend: B batch, S rows, H heads, D head dim, Bb = 1 or B rows of bounds.
"""

# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
FAR = tl.constexpr(2147483647)  # beyond every row


@triton.jit(do_not_specialize=["sq", "sk", "row_tiles", "key_tiles"],
            do_not_specialize_on_alignment=["lo_ptr", "hi_ptr", "q_lo_ptr", "q_hi_ptr"])  # fmt: skip
def plan_kernel(
    lo_ptr, hi_ptr, q_lo_ptr, q_hi_ptr, query_ptr, live_ptr, rank_ptr, rows_ptr, key_ptr, sq, sk, row_tiles, key_tiles,
    BM: tl.constexpr, KEYS: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Tables that tell the forward and backward kernels which tiles to visit. Grid: [Bb]; all tables int32.

    lo, hi [Bb, sq]; q_lo, q_hi [Bb, sk]. A key tile is live if some row sees one of its keys; dead tiles may hold NaN.
    key_ptr [Bb, key_tiles, 2, KEYS]: q_lo and q_hi, padded with keys that nobody sees.
    rows_ptr [Bb, key_tiles, 2]: first and last + 1 row that sees a key of the tile (0, 0 if dead).
    rank_ptr [Bb, key_tiles + 1]: live tiles before this one. live_ptr [Bb, key_tiles]: the live tiles in order.
    query_ptr [Bb, row_tiles, 4]: live key tiles of the range that a tile of BM rows spans, end of the range, and the place of its
    last live tile in live_ptr, or -1 if the whole range is live (then the list is not needed).
    """
    b = tl.program_id(0).to(tl.int64)
    lo_ptr += b * sq
    hi_ptr += b * sq
    q_lo_ptr += b * sk
    q_hi_ptr += b * sk
    query_ptr += b * row_tiles * 4
    live_ptr += b * key_tiles
    rank_ptr += b * (key_tiles + 1)
    rows_ptr += b * key_tiles * 2
    key_ptr += b * key_tiles * 2 * KEYS

    before = tl.zeros([1], tl.int32)
    start = 0
    while start < key_tiles:
        tile = start + tl.arange(0, TILES)
        inside = tile < key_tiles
        at = tl.arange(0, KEYS)[None, :]
        key = tile[:, None] * KEYS + at
        q_lo = tl.load(q_lo_ptr + key, mask=key < sk, other=FAR)
        q_hi = tl.load(q_hi_ptr + key, mask=key < sk, other=0)
        tl.store(key_ptr + tile[:, None] * (2 * KEYS) + at, q_lo, mask=inside[:, None])
        tl.store(key_ptr + tile[:, None] * (2 * KEYS) + (KEYS + at), q_hi, mask=inside[:, None])
        seen = q_lo < q_hi
        row_lo = tl.min(tl.where(seen, q_lo, FAR), 1)
        row_hi = tl.max(tl.where(seen, q_hi, 0), 1)
        live = row_lo < row_hi
        tl.store(rows_ptr + tile * 2, tl.where(live, row_lo, 0), mask=inside)
        tl.store(rows_ptr + tile * 2 + 1, tl.where(live, row_hi, 0), mask=inside)
        one = live.to(tl.int32)
        rank = before + tl.cumsum(one, 0) - one
        tl.store(rank_ptr + tile, rank, mask=inside)
        tl.store(live_ptr + rank, tile, mask=live)
        before += tl.sum(one, 0)
        start += TILES
    tl.store(rank_ptr + key_tiles + tl.arange(0, 1), before)
    tl.debug_barrier()  # the ranks are read again by other threads

    start = 0
    while start < row_tiles:
        tile = start + tl.arange(0, KEYS)
        inside = tile < row_tiles
        # Bounds never decrease: the first row has the smallest lo, the last one the largest hi.
        lo = tl.load(lo_ptr + tile * BM, mask=inside, other=0)
        hi = tl.load(hi_ptr + tl.minimum(tile * BM + BM, sq) - 1, mask=inside, other=0)
        begin = lo // KEYS
        end = tl.maximum((hi + KEYS - 1) // KEYS, begin)
        first = tl.load(rank_ptr + begin, mask=inside, other=0)
        after = tl.load(rank_ptr + end, mask=inside, other=0)
        tl.store(query_ptr + tile * 4, after - first, mask=inside)
        tl.store(query_ptr + tile * 4 + 1, end, mask=inside)
        tl.store(query_ptr + tile * 4 + 2, tl.where(after - first == end - begin, -1, after - 1), mask=inside)
        start += KEYS


@triton.jit(do_not_specialize=["sq", "rows", "heads", "lse_stride_b", "lse_stride_h", "dlse_stride_b", "dlse_stride_h"],
            do_not_specialize_on_alignment=["lse_ptr", "dlse_ptr"])  # fmt: skip
def rows_kernel(
    out_ptr, dout_ptr, lse_ptr, dlse_ptr, lse2_ptr, delta_ptr, workspace_ptr, sq, rows, heads,
    out_stride_b, out_stride_s, out_stride_h, out_stride_d, dout_stride_b, dout_stride_s, dout_stride_h, dout_stride_d,
    lse_stride_b, lse_stride_h, lse_stride_s, dlse_stride_b, dlse_stride_h, dlse_stride_s,
    D: tl.constexpr, TILE: tl.constexpr, WITH_DLSE: tl.constexpr,
):  # fmt: skip
    """delta = rowsum(dout * out) - dlse, lse in base 2 with -inf turned into +inf, and a workspace of zeros.

    Grid: [rows / TILE, B * heads]; out, dout [B, sq, heads, D]; lse, dlse [B, heads, sq]; lse2, delta fp32 [B, heads, rows] and
    workspace fp32 [B, heads, rows, D] with rows >= sq: rows beyond sq get lse +inf, delta 0.
    """
    head = tl.program_id(1)
    b = (head // heads).to(tl.int64)
    h = (head % heads).to(tl.int64)
    row = tl.program_id(0) * TILE + tl.arange(0, TILE)
    exists = row < sq
    row64 = row.to(tl.int64)[:, None]
    col = tl.arange(0, D)[None, :]
    out_at = out_ptr + b * out_stride_b + h * out_stride_h + row64 * out_stride_s + col * out_stride_d
    dout_at = dout_ptr + b * dout_stride_b + h * dout_stride_h + row64 * dout_stride_s + col * dout_stride_d
    out = tl.load(out_at, mask=exists[:, None], other=0.0).to(tl.float32)
    dout = tl.load(dout_at, mask=exists[:, None], other=0.0).to(tl.float32)
    delta = tl.sum(out * dout, 1)
    if WITH_DLSE:
        delta -= tl.load(dlse_ptr + b * dlse_stride_b + h * dlse_stride_h + row * dlse_stride_s, mask=exists, other=0.0)
    lse = tl.load(lse_ptr + b * lse_stride_b + h * lse_stride_h + row * lse_stride_s, mask=exists, other=float("-inf"))
    at = head.to(tl.int64) * rows + row
    tl.store(delta_ptr + at, delta)
    tl.store(lse2_ptr + at, tl.where(lse == float("-inf"), float("inf"), lse * LOG2_E))
    tl.store(workspace_ptr + at[:, None] * D + col, tl.zeros([TILE, D], tl.float32))


@triton.jit(do_not_specialize=["sq", "rows", "heads"])
def finish_dq(
    workspace_ptr, dq_ptr, scale, sq, rows, heads, dq_stride_b, dq_stride_s, dq_stride_h,
    D: tl.constexpr, TILE: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """Write or add the workspace to dq, scaled, its columns in order again (see gluon_backward.py), and set it to zero.

    Grid: [rows / TILE, B * heads]; workspace fp32 [B, heads, rows, D]; dq [B, sq, heads, D].
    """
    head = tl.program_id(1)
    row = tl.program_id(0) * TILE + tl.arange(0, TILE)
    col = tl.arange(0, D)[None, :]
    at = workspace_ptr + (head.to(tl.int64) * rows + row)[:, None] * D + col
    x = tl.load(at)
    # The compiler may load in another layout than it stores in (it does where dq has 16 bit): all must have read before any writes.
    tl.debug_barrier()
    tl.store(at, tl.zeros([TILE, D], tl.float32))
    x = tl.reshape(x, [TILE, D // 32, 4, 4, 2])
    x = tl.reshape(tl.permute(x, [0, 1, 3, 2, 4]), [TILE, D]) * scale
    dq_ptr += (head // heads).to(tl.int64) * dq_stride_b + (head % heads).to(tl.int64) * dq_stride_h
    dq_at = dq_ptr + row.to(tl.int64)[:, None] * dq_stride_s + col
    exists = (row < sq)[:, None]
    if ADD:
        x += tl.load(dq_at, mask=exists, other=0.0)
    tl.store(dq_at, x.to(dq_ptr.dtype.element_ty), mask=exists)
