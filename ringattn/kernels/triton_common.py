"""Device code shared by the Triton kernels: loading tiles, walking over the tiles that matter, tanh.

Legend: B batch, S rows (queries or keys), H heads, D head dim. A head dim that is not a power of two is held in two parts of
widths W0 + W1 >= D, both powers of two (96 = 64 + 32), or padded with zeros where that is no smaller (112 -> 128); W1 = 0 says
that there is one part, and then the second of each pair of tiles is the first again, never used.

A tile is loaded either through a descriptor made on the host over [B, H, S, D] (DESC, sm_90 and later: the copy engine fills
rows and columns beyond the end with zeros) or through pointers with masks. Pointers point at the first row of the right head.
Strides count VEC elements: the compiler then knows that rows are aligned without a variant of the kernel for each value.
"""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
NEGATIVE = tl.constexpr(-1.0e30)  # stands for -inf as a running maximum: differences stay finite, so the loop needs no guard
FAR = tl.constexpr(2147483647)


@triton.jit
def load_part(T, batch, head, row, rows, stride, D: tl.constexpr, COL: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
              DESC: tl.constexpr, INTERPRET: tl.constexpr):  # fmt: skip
    """Rows row .. row + ROWS, columns COL .. COL + WIDTH of one head as [ROWS, WIDTH], zeros outside [rows, D]."""
    if DESC:
        x = T.load([batch, head, row, COL]).reshape([ROWS, WIDTH])
    else:
        i = tl.arange(0, ROWS)
        c = COL + tl.arange(0, WIDTH)
        at = T + row * stride + (i[:, None] * stride.to(tl.int32) + c[None, :])
        if COL + WIDTH > D:
            x = tl.load(at, mask=(row + i < rows)[:, None] & (c < D)[None, :], other=0.0)
        else:
            x = tl.load(at, mask=(row + i < rows)[:, None], other=0.0)
    if INTERPRET:  # the interpreter computes bf16 products from the bit patterns
        x = x.to(tl.float32)
    return x


@triton.jit
def load_tile(T0, T1, batch, head, row, rows, stride, D: tl.constexpr, ROWS: tl.constexpr, W0: tl.constexpr, W1: tl.constexpr,
              DESC: tl.constexpr, INTERPRET: tl.constexpr):  # fmt: skip
    """Both parts of a tile. T0, T1: the parts' descriptors, or the same pointer twice."""
    x0 = load_part(T0, batch, head, row, rows, stride, D, 0, ROWS, W0, DESC, INTERPRET)
    x1 = load_part(T1, batch, head, row, rows, stride, D, W0, ROWS, W1, DESC, INTERPRET) if W1 > 0 else x0
    return x0, x1


@triton.jit
def store_part(T, x, row, rows, stride, ADD: tl.constexpr, D: tl.constexpr, COL: tl.constexpr, ROWS: tl.constexpr,
               WIDTH: tl.constexpr):  # fmt: skip
    """Write (or add) x [ROWS, WIDTH] to rows row .. row + ROWS, columns COL .. COL + WIDTH of one head."""
    i = tl.arange(0, ROWS)
    c = COL + tl.arange(0, WIDTH)
    at = T + row * stride + (i[:, None] * stride.to(tl.int32) + c[None, :])
    mask = (row + i < rows)[:, None] & (c < D)[None, :]
    if ADD:
        x += tl.load(at, mask=mask, other=0.0)
    tl.store(at, x.to(T.dtype.element_ty), mask=mask)


@triton.jit
def store_tile(T, x0, x1, row, rows, stride, ADD: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, W0: tl.constexpr,
               W1: tl.constexpr):  # fmt: skip
    store_part(T, x0, row, rows, stride, ADD, D, 0, ROWS, W0)
    if W1 > 0:
        store_part(T, x1, row, rows, stride, ADD, D, W0, ROWS, W1)


@triton.jit
def dot_nt(a0, a1, b0, b1, W1: tl.constexpr, PRECISION: tl.constexpr):
    """a @ b^T over the whole head dim: [M, D] x [N, D] -> fp32 [M, N]."""
    s = tl.dot(a0, tl.trans(b0), input_precision=PRECISION)
    if W1 > 0:
        s = tl.dot(a1, tl.trans(b1), s, input_precision=PRECISION)
    return s


@triton.jit
def dot_add(a, b0, b1, c0, c1, W1: tl.constexpr, PRECISION: tl.constexpr):
    """c + a @ b in both parts: [M, N] x [N, D] -> fp32 [M, D]."""
    c0 = tl.dot(a.to(b0.dtype), b0, c0, input_precision=PRECISION)
    if W1 > 0:
        c1 = tl.dot(a.to(b1.dtype), b1, c1, input_precision=PRECISION)
    return c0, c1


@triton.jit
def tile_of(tiles, heads, section, LAST_FIRST: tl.constexpr):
    """This program's (tile, head of all B * H).

    Heads go in sections whose keys and values fit the L2 cache together; within a section all heads take their first tile, then
    all the next: with the heaviest tiles first (LAST_FIRST under a causal mask) the light ones fill the end of the launch.
    """
    pid = tl.program_id(0)
    part = pid // (section * tiles)
    wide = tl.minimum(section, heads - part * section)
    rest = pid - part * section * tiles
    tile = rest // wide
    if LAST_FIRST:
        tile = tiles - 1 - tile
    return tile, part * section + rest % wide


@triton.jit
def hull(rows, ROWS: tl.constexpr):
    """The bounds of a tile's first and last row: (lo of the first, lo of the last, hi of the first, hi of the last).

    ``rows``: (LO, HI, first row, number of rows). Both bounds never decrease, so [lo of first, hi of last) holds all that any row
    of the tile sees, and [lo of last, hi of first) what every row sees.
    """
    LO, HI, first, count = rows
    last = tl.minimum(first + ROWS, count) - 1
    return tl.load(LO + first), tl.load(LO + last), tl.load(HI + first), tl.load(HI + last)


@triton.jit
def row_bounds(rows, ROWS: tl.constexpr):
    """(lo, hi) of each row of a tile, int32 [ROWS]."""
    LO, HI, first, count = rows
    i = first + tl.arange(0, ROWS)
    return tl.load(LO + i, mask=i < count, other=0), tl.load(HI + i, mask=i < count, other=0)


@triton.jit
def whole_tiles(lo_last, hi_first, TILE: tl.constexpr):
    """The tiles [f0, f1) that need no mask: they lie within [lo_last, hi_first). f0 > f1 is possible, then none does."""
    return (lo_last + TILE - 1) // TILE * TILE, hi_first // TILE * TILE


@triton.jit
def middle(a, e, f0, f1):
    """The unmasked tiles [g0, g1) of a run [a, e): a <= g0 <= g1, and both ends together are e - (g1 - g0) - a long."""
    g0 = tl.minimum(tl.maximum(f0, a), e)
    return g0, tl.maximum(tl.minimum(f1, e), g0)


@triton.jit
def next_run(rows, at, end, ROWS: tl.constexpr, TILE: tl.constexpr):
    """The next stretch [a, e) without a hole, from position ``at`` (a multiple of TILE) on, of what a tile's rows see.

    a is a multiple of TILE; a >= e if nothing is left. ``end`` is the hi of the last row. Needed only where the rows have nothing
    in common (a document border): the hull may then hold tiles that no row sees, which cost time and may even be poisoned.
    """
    LO, HI, first, count = rows
    i = first + tl.arange(0, ROWS)
    lo = tl.load(LO + i, mask=i < count, other=0)
    hi = tl.load(HI + i, mask=i < count, other=0)
    following = tl.load(LO + i + 1, mask=(i + 1 < count) & (i + 1 < first + ROWS), other=0)
    a = tl.min(tl.where((hi > lo) & (hi > at), tl.maximum(lo, at), FAR), 0)
    e = tl.minimum(tl.min(tl.where((hi > a) & (following > hi), hi, FAR), 0), end)
    return a // TILE * TILE, e


@triton.jit
def tanh(x, EXACT: tl.constexpr):
    """tanh by exp2. EXACT: within a few fp32 units also near 0, where 1 - 2 / (e^2x + 1) cancels."""
    t = 1.0 - 2.0 / (tl.exp2(x * (2.0 * LOG2_E)) + 1.0)
    if EXACT:
        y = x * x
        near = x * (1.0 + y * (-1.0 / 3.0 + y * (2.0 / 15.0 + y * (-17.0 / 315.0 + y * (62.0 / 2835.0)))))
        t = tl.where(y < 0.09, near, t)
    return t
