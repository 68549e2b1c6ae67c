"""The forward kernel: one hop of FlashAttention-2 (arXiv 2307.08691, algorithm 1) that starts from and ends in carried state.

One program computes BM query rows of one head against all keys they see; see triton_common for the legend and contract.py for the
contract. The softmax over this hop starts afresh and is merged with the carried state at the end, as one more online step: the
carried accumulator then never sits in registers beside the loop.
"""

import triton
import triton.language as tl

from ringattn.kernels.triton_common import (
    LN_2,
    LOG2_E,
    NEGATIVE,
    dot_add,
    dot_nt,
    hull,
    load_part,
    load_tile,
    middle,
    next_run,
    row_bounds,
    store_part,
    tanh,
    tile_of,
    whole_tiles,
)


@triton.jit
def forward_tile(state, q, kv, at, n, bounds, masked, factor, cap, D: tl.constexpr, W0: tl.constexpr, W1: tl.constexpr,
                 BN: tl.constexpr, CAP: tl.constexpr, DESC: tl.constexpr, PRECISION: tl.constexpr, INTERPRET: tl.constexpr):  # fmt: skip
    """One step of the online softmax over keys n .. n + BN. ``masked``: whether some row does not see some of them."""
    acc0, acc1, m, l = state  # noqa: E741
    K0, K1, V0, V1 = kv
    batch, head, sk, k_s, v_s = at
    k0, k1 = load_tile(K0, K1, batch, head, n, sk, k_s, D, BN, W0, W1, DESC, INTERPRET)
    s = dot_nt(q[0], q[1], k0, k1, W1, PRECISION)
    if CAP:
        s = cap * tanh(s * factor, k0.dtype == tl.float32)
    if masked:
        j = n + tl.arange(0, BN)
        s = tl.where((j[None, :] >= bounds[0][:, None]) & (j[None, :] < bounds[1][:, None]), s, float("-inf"))
    if CAP:
        peak = tl.maximum(m, tl.max(s, 1))
        p = tl.exp2(s - peak[:, None])
    else:
        peak = tl.maximum(m, tl.max(s, 1) * factor)
        p = tl.exp2(s * factor - peak[:, None])
    shrink = tl.exp2(m - peak)
    l = l * shrink + tl.sum(p, 1)  # noqa: E741
    acc0 = acc0 * shrink[:, None]
    if W1 > 0:
        acc1 = acc1 * shrink[:, None]
    v0, v1 = load_tile(V0, V1, batch, head, n, sk, v_s, D, BN, W0, W1, DESC, INTERPRET)
    acc0, acc1 = dot_add(p, v0, v1, acc0, acc1, W1, PRECISION)
    return acc0, acc1, peak, l


@triton.jit
def forward_run(state, q, kv, at, bounds, a, e, f0, f1, factor, cap, EVEN: tl.constexpr, BRANCH: tl.constexpr,
                STAGES: tl.constexpr, NO_LICM: tl.constexpr, D: tl.constexpr, W0: tl.constexpr, W1: tl.constexpr,
                BN: tl.constexpr, CAP: tl.constexpr, DESC: tl.constexpr, PRECISION: tl.constexpr,
                INTERPRET: tl.constexpr):  # fmt: skip
    """All key tiles of [a, e); those within [f0, f1) need no mask (EVEN: none does)."""
    if EVEN:
        for n in tl.range(a, e, BN, num_stages=STAGES, disable_licm=NO_LICM):
            state = forward_tile(state, q, kv, at, n, 0, False, factor, cap, D, W0, W1, BN, CAP, DESC, PRECISION, INTERPRET)
    elif BRANCH:
        for n in tl.range(a, e, BN, num_stages=STAGES, disable_licm=NO_LICM):
            state = forward_tile(state, q, kv, at, n, bounds, (n < f0) | (n >= f1), factor, cap,
                                 D, W0, W1, BN, CAP, DESC, PRECISION, INTERPRET)  # fmt: skip
    else:
        # First the middle, then both ends in one loop that jumps over the middle.
        g0, g1 = middle(a, e, f0, f1)
        for n in tl.range(g0, g1, BN, num_stages=STAGES, disable_licm=NO_LICM):
            state = forward_tile(state, q, kv, at, n, 0, False, factor, cap, D, W0, W1, BN, CAP, DESC, PRECISION, INTERPRET)
        for t in tl.range(a, e - (g1 - g0), BN, num_stages=STAGES, disable_licm=NO_LICM):
            n = tl.where(t < g0, t, t + (g1 - g0))
            state = forward_tile(state, q, kv, at, n, bounds, True, factor, cap, D, W0, W1, BN, CAP, DESC, PRECISION, INTERPRET)
    return state


@triton.jit
def merge_part(acc, shrink, shrink0, inverse, ACC, OUT, row, rows, acc_s, o_s, FIRST: tl.constexpr, LAST: tl.constexpr,
               D: tl.constexpr, COL: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr):  # fmt: skip
    """Columns COL .. COL + WIDTH of the result: merged with what was carried, and normalised or carried on."""
    if WIDTH > 32 and not (FIRST and LAST):  # half by half: the carried tile and this one do not fit the registers together
        left, right = tl.split(acc.reshape([ROWS, 2, WIDTH // 2]).permute(0, 2, 1))
        merge_part(left, shrink, shrink0, inverse, ACC, OUT, row, rows, acc_s, o_s, FIRST, LAST, D, COL, ROWS, WIDTH // 2)
        merge_part(right, shrink, shrink0, inverse, ACC, OUT, row, rows, acc_s, o_s, FIRST, LAST, D, COL + WIDTH // 2, ROWS, WIDTH // 2)
    else:
        acc = acc * shrink[:, None]
        if not FIRST:
            acc += load_part(ACC, 0, 0, row, rows, acc_s, D, COL, ROWS, WIDTH, False, False) * shrink0[:, None]
        if LAST:
            store_part(OUT, acc * inverse[:, None], row, rows, o_s, False, D, COL, ROWS, WIDTH)
        else:
            store_part(ACC, acc, row, rows, acc_s, False, D, COL, ROWS, WIDTH)


@triton.jit(do_not_specialize=[
    "factor", "cap", "sq", "sk", "heads", "group", "section", "batches", "bounds_b",
    "q_b", "q_s", "q_h", "k_b", "k_s", "k_h", "v_b", "v_s", "v_h", "o_b", "o_s", "o_h", "acc_b", "acc_s", "acc_h",
    "lse_b", "lse_h", "m_b", "m_h",
], do_not_specialize_on_alignment=["LSE", "M", "L", "SINKS", "LO", "HI"])  # fmt: skip
def attention_forward(
    Q0, Q1, K0, K1, V0, V1, OUT, LSE, ACC, M, L, SINKS, LO, HI,
    factor: tl.float32, cap: tl.float32, sq: tl.int32, sk: tl.int32, heads: tl.int32, group: tl.int32, section: tl.int32,
    batches: tl.int32, bounds_b: tl.int64,
    q_b: tl.int64, q_s: tl.int64, q_h: tl.int64, k_b: tl.int64, k_s: tl.int64, k_h: tl.int64,
    v_b: tl.int64, v_s: tl.int64, v_h: tl.int64, o_b: tl.int64, o_s: tl.int64, o_h: tl.int64,
    acc_b: tl.int64, acc_s: tl.int64, acc_h: tl.int64, lse_b: tl.int64, lse_h: tl.int64, m_b: tl.int64, m_h: tl.int64,
    FIRST: tl.constexpr, LAST: tl.constexpr, SINK: tl.constexpr, FULL: tl.constexpr, EVEN: tl.constexpr, CAP: tl.constexpr,
    D: tl.constexpr, W0: tl.constexpr, W1: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr,
    BRANCH: tl.constexpr, NO_LICM: tl.constexpr, VEC: tl.constexpr, DESC: tl.constexpr, PRECISION: tl.constexpr,
    INTERPRET: tl.constexpr,
):  # fmt: skip
    """FIRST: no state comes in. LAST: normalise into OUT, LSE; else the state goes out. FULL: every row sees every key (EVEN: and
    they fill whole tiles). BRANCH: one loop that asks at every tile whether to mask, else a loop of unmasked tiles, then one of
    masked tiles. factor: scale * log2(e), or scale / softcap with CAP, when cap = softcap * log2(e). group: query heads a key head.
    """
    tile, bh = tile_of(tl.cdiv(sq, BM), batches * heads, section, not FULL)
    batch = bh // heads
    head = bh % heads
    kh = head // group
    row = tile * BM
    b64 = batch.to(tl.int64)
    h64 = head.to(tl.int64)
    kh64 = kh.to(tl.int64)
    if not DESC:
        Q0 += (b64 * q_b + h64 * q_h) * VEC
        K0 += (b64 * k_b + kh64 * k_h) * VEC
        V0 += (b64 * v_b + kh64 * v_h) * VEC
        Q1 = Q0
        K1 = K0
        V1 = V0
    q = load_tile(Q0, Q1, batch, head, row, sq, q_s * VEC, D, BM, W0, W1, DESC, INTERPRET)
    kv = (K0, K1, V0, V1)
    at = (batch, kh, sk, k_s * VEC, v_s * VEC)
    acc0 = tl.zeros([BM, W0], tl.float32)
    acc1 = acc0
    if W1 > 0:
        acc1 = tl.zeros([BM, W1], tl.float32)
    state = (acc0, acc1, tl.full([BM], NEGATIVE, tl.float32), tl.zeros([BM], tl.float32))

    if FULL:
        bounds = (tl.zeros([BM], tl.int32), tl.zeros([BM], tl.int32) + sk)
        state = forward_run(state, q, kv, at, bounds, 0, sk, 0, sk // BN * BN, factor, cap,
                            EVEN, BRANCH, STAGES, NO_LICM, D, W0, W1, BN, CAP, DESC, PRECISION, INTERPRET)  # fmt: skip
    else:
        rows = (LO + b64 * bounds_b, HI + b64 * bounds_b, row, sq)
        bounds = row_bounds(rows, BM)
        lo_first, lo_last, hi_first, end = hull(rows, BM)
        common = lo_last < hi_first
        if common:
            a = lo_first // BN * BN
            e = end
        else:
            a, e = next_run(rows, 0, end, BM, BN)
        f0, f1 = whole_tiles(lo_last, hi_first, BN)
        while a < e:  # once, but where rows have no key in common
            state = forward_run(state, q, kv, at, bounds, a, e, f0, f1, factor, cap,
                                False, BRANCH, STAGES, NO_LICM, D, W0, W1, BN, CAP, DESC, PRECISION, INTERPRET)  # fmt: skip
            if common:
                a = e
            else:
                a, e = next_run(rows, tl.cdiv(e, BN) * BN, end, BM, BN)

    acc0, acc1, m, l = state  # noqa: E741
    i = row + tl.arange(0, BM)
    live = i < sq
    shrink = tl.full([BM], 1.0, tl.float32)
    shrink0 = shrink
    M += b64 * m_b + h64 * m_h + i
    L += b64 * m_b + h64 * m_h + i
    if SINK or not FIRST:  # one more online step
        if FIRST:
            m0 = tl.zeros([BM], tl.float32) + tl.load(SINKS + head).to(tl.float32) * LOG2_E
            l0 = tl.full([BM], 1.0, tl.float32)
        else:
            m0 = tl.maximum(tl.load(M, mask=live, other=NEGATIVE), NEGATIVE)
            l0 = tl.load(L, mask=live, other=0.0)
        peak = tl.maximum(m, m0)
        shrink = tl.exp2(m - peak)
        shrink0 = tl.exp2(m0 - peak)
        l = l * shrink + l0 * shrink0  # noqa: E741
        m = peak
    inverse = tl.where(l > 0.0, 1.0 / l, 0.0)
    if LAST:
        tl.store(LSE + b64 * lse_b + h64 * lse_h + i, tl.where(l > 0.0, (m + tl.log2(l)) * LN_2, float("-inf")), mask=live)
    else:
        tl.store(M, tl.where(l > 0.0, m, float("-inf")), mask=live)
        tl.store(L, l, mask=live)
    ACC += (b64 * acc_b + h64 * acc_h) * VEC
    OUT += (b64 * o_b + h64 * o_h) * VEC
    merge_part(acc0, shrink, shrink0, inverse, ACC, OUT, row, sq, acc_s * VEC, o_s * VEC, FIRST, LAST, D, 0, BM, W0)
    if W1 > 0:
        merge_part(acc1, shrink, shrink0, inverse, ACC, OUT, row, sq, acc_s * VEC, o_s * VEC, FIRST, LAST, D, W0, BM, W1)
