"""The backward kernels: rows of delta and lse, dK and dV by key tiles, dQ by query tiles (FlashAttention-2, algorithm 2, split).

Two kernels of 4 and 3 matrix products instead of one of 5: nothing is added atomically, so the bits do not depend on timing.
See triton_common for the legend and contract.py for the contract. Rows of lse and delta are fp32 [B, H, padded], ``padded`` a
multiple of ROW_BLOCK, in base 2, with +inf as the lse of dead and of padding rows: their p = exp2(s - inf) is 0 without a mask.
"""

import triton
import triton.language as tl

from ringattn.kernels.triton_common import (
    LOG2_E,
    dot_add,
    dot_nt,
    hull,
    load_part,
    load_tile,
    middle,
    next_run,
    row_bounds,
    store_tile,
    tanh,
    tile_of,
    whole_tiles,
)


@triton.jit(do_not_specialize=[
    "sq", "padded", "heads", "o_b", "o_s", "o_h", "do_b", "do_s", "do_h", "lse_b", "lse_h", "dlse_b", "dlse_h",
], do_not_specialize_on_alignment=["LSE", "DLSE", "LSE2", "DELTA"])  # fmt: skip
def attention_rows(
    OUT, DOUT, LSE, DLSE, LSE2, DELTA, sq: tl.int32, padded: tl.int32, heads: tl.int32,
    o_b: tl.int64, o_s: tl.int64, o_h: tl.int64, do_b: tl.int64, do_s: tl.int64, do_h: tl.int64,
    lse_b: tl.int64, lse_h: tl.int64, dlse_b: tl.int64, dlse_h: tl.int64,
    HAS_DLSE: tl.constexpr, D: tl.constexpr, W: tl.constexpr, BM: tl.constexpr, VEC: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """delta = rowsum(dout * out) - dlse and lse * log2(e), for BM rows of one head."""
    tiles = padded // BM
    pid = tl.program_id(0)
    row = pid % tiles * BM
    bh = (pid // tiles).to(tl.int64)
    b = bh // heads
    h = bh % heads
    i = row + tl.arange(0, BM)
    live = i < sq
    out = load_part(OUT + (b * o_b + h * o_h) * VEC, 0, 0, row, sq, o_s * VEC, D, 0, BM, W, False, INTERPRET)
    dout = load_part(DOUT + (b * do_b + h * do_h) * VEC, 0, 0, row, sq, do_s * VEC, D, 0, BM, W, False, INTERPRET)
    delta = tl.sum(out.to(tl.float32) * dout.to(tl.float32), 1)
    lse = tl.load(LSE + b * lse_b + h * lse_h + i, mask=live, other=float("-inf"))
    if HAS_DLSE:
        delta -= tl.load(DLSE + b * dlse_b + h * dlse_h + i, mask=live, other=0.0)
    tl.store(LSE2 + bh * padded + i, tl.where(lse == float("-inf"), float("inf"), lse * LOG2_E))
    tl.store(DELTA + bh * padded + i, delta)


@triton.jit
def load_line(T, line, n, BM: tl.constexpr, DESC: tl.constexpr):
    """fp32 [BM] of lse or delta. Through a descriptor: a plain load takes the layout of the scores' columns, 16 loads a thread."""
    return T.load([line, n]).reshape([BM]) if DESC else tl.load(T + n + tl.arange(0, BM))


@triton.jit
def dkdv_tile(state, kv, qdo, at, n, bounds, masked, factor, cap, D: tl.constexpr, W0: tl.constexpr, W1: tl.constexpr,
              BM: tl.constexpr, CAP: tl.constexpr, DESC: tl.constexpr, PRECISION: tl.constexpr, INTERPRET: tl.constexpr):  # fmt: skip
    """What query rows n .. n + BM of one head add to a key tile's dk (without scale) and dv. bounds: the rows that see each key."""
    dk0, dk1, dv0, dv1 = state
    k0, k1, v0, v1 = kv
    Q0, Q1, DO0, DO1, LSE2, DELTA = qdo
    batch, head, line, sq, q_s, do_s = at
    i = n + tl.arange(0, BM)
    q0, q1 = load_tile(Q0, Q1, batch, head, n, sq, q_s, D, BM, W0, W1, DESC, INTERPRET)
    s = dot_nt(k0, k1, q0, q1, W1, PRECISION)
    lse = load_line(LSE2, line, n, BM, DESC)
    if CAP:
        t = tanh(s * factor, q0.dtype == tl.float32)
        p = tl.exp2(cap * t - lse[None, :])
    else:
        p = tl.exp2(s * factor - lse[None, :])
    if masked:
        p = tl.where((i[None, :] >= bounds[0][:, None]) & (i[None, :] < bounds[1][:, None]), p, 0.0)
    slope = p * (1.0 - t * t) if CAP else p
    do0, do1 = load_tile(DO0, DO1, batch, head, n, sq, do_s, D, BM, W0, W1, DESC, INTERPRET)
    dv0, dv1 = dot_add(p, do0, do1, dv0, dv1, W1, PRECISION)
    dp = dot_nt(v0, v1, do0, do1, W1, PRECISION)
    delta = load_line(DELTA, line, n, BM, DESC)
    ds = slope * (dp - delta[None, :])
    dk0, dk1 = dot_add(ds, q0, q1, dk0, dk1, W1, PRECISION)
    return dk0, dk1, dv0, dv1


@triton.jit
def dkdv_run(state, kv, qdo, at, bounds, a, e, f0, f1, factor, cap, EVEN: tl.constexpr, BRANCH: tl.constexpr, STAGES: tl.constexpr,
             NO_LICM: tl.constexpr, D: tl.constexpr, W0: tl.constexpr, W1: tl.constexpr, BM: tl.constexpr, CAP: tl.constexpr,
             DESC: tl.constexpr, PRECISION: tl.constexpr, INTERPRET: tl.constexpr):  # fmt: skip
    """All query tiles of [a, e); those within [f0, f1) need no mask (EVEN: none does; rows beyond the end have p = 0)."""
    if EVEN:
        for n in tl.range(a, e, BM, num_stages=STAGES, disable_licm=NO_LICM):
            state = dkdv_tile(state, kv, qdo, at, n, bounds, False, factor, cap, D, W0, W1, BM, CAP, DESC, PRECISION, INTERPRET)
    elif BRANCH:
        for n in tl.range(a, e, BM, num_stages=STAGES, disable_licm=NO_LICM):
            state = dkdv_tile(state, kv, qdo, at, n, bounds, (n < f0) | (n >= f1), factor, cap,
                              D, W0, W1, BM, CAP, DESC, PRECISION, INTERPRET)  # fmt: skip
    else:
        g0, g1 = middle(a, e, f0, f1)
        for n in tl.range(g0, g1, BM, num_stages=STAGES, disable_licm=NO_LICM):
            state = dkdv_tile(state, kv, qdo, at, n, bounds, False, factor, cap, D, W0, W1, BM, CAP, DESC, PRECISION, INTERPRET)
        for t in tl.range(a, e - (g1 - g0), BM, num_stages=STAGES, disable_licm=NO_LICM):
            n = tl.where(t < g0, t, t + (g1 - g0))
            state = dkdv_tile(state, kv, qdo, at, n, bounds, True, factor, cap, D, W0, W1, BM, CAP, DESC, PRECISION, INTERPRET)
    return state


@triton.jit(do_not_specialize=[
    "factor", "cap", "scale", "sq", "sk", "padded", "heads", "group", "section", "batches", "bounds_b",
    "q_b", "q_s", "q_h", "k_b", "k_s", "k_h", "v_b", "v_s", "v_h", "do_b", "do_s", "do_h",
    "dk_b", "dk_s", "dk_h", "dv_b", "dv_s", "dv_h",
], do_not_specialize_on_alignment=["LSE2", "DELTA", "LO", "HI"])  # fmt: skip
def attention_dkdv(
    Q0, Q1, K0, K1, V0, V1, DO0, DO1, LSE2, DELTA, DK, DV, LO, HI,
    factor: tl.float32, cap: tl.float32, scale: tl.float32, sq: tl.int32, sk: tl.int32, padded: tl.int32, heads: tl.int32,
    group: tl.int32, section: tl.int32, batches: tl.int32, bounds_b: tl.int64,
    q_b: tl.int64, q_s: tl.int64, q_h: tl.int64, k_b: tl.int64, k_s: tl.int64, k_h: tl.int64,
    v_b: tl.int64, v_s: tl.int64, v_h: tl.int64, do_b: tl.int64, do_s: tl.int64, do_h: tl.int64,
    dk_b: tl.int64, dk_s: tl.int64, dk_h: tl.int64, dv_b: tl.int64, dv_s: tl.int64, dv_h: tl.int64,
    FULL: tl.constexpr, CAP: tl.constexpr, D: tl.constexpr, W0: tl.constexpr, W1: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    STAGES: tl.constexpr, BRANCH: tl.constexpr, NO_LICM: tl.constexpr, VEC: tl.constexpr, DESC: tl.constexpr,
    PRECISION: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """dK, dV of BN keys of one key head, over its ``group`` query heads. LO, HI: the rows that see each key. scale: the softmax
    scale, applied to dk at the end. LSE2, DELTA: with DESC descriptors over [B * H, padded]. Other arguments as in attention_forward.
    """
    key_heads = heads // group
    tile, bh = tile_of(tl.cdiv(sk, BN), batches * key_heads, section, False)
    batch = bh // key_heads
    kh = bh % key_heads
    row = tile * BN
    b64 = batch.to(tl.int64)
    kh64 = kh.to(tl.int64)
    if not DESC:
        K0 += (b64 * k_b + kh64 * k_h) * VEC
        V0 += (b64 * v_b + kh64 * v_h) * VEC
        K1 = K0
        V1 = V0
    k0, k1 = load_tile(K0, K1, batch, kh, row, sk, k_s * VEC, D, BN, W0, W1, DESC, INTERPRET)
    v0, v1 = load_tile(V0, V1, batch, kh, row, sk, v_s * VEC, D, BN, W0, W1, DESC, INTERPRET)
    kv = (k0, k1, v0, v1)
    zero0 = tl.zeros([BN, W0], tl.float32)
    zero1 = zero0
    if W1 > 0:
        zero1 = tl.zeros([BN, W1], tl.float32)
    state = (zero0, zero1, zero0, zero1)
    if FULL:
        bounds = (0, 0)
    else:
        rows = (LO + b64 * bounds_b, HI + b64 * bounds_b, row, sk)
        bounds = row_bounds(rows, BN)
        lo_first, lo_last, hi_first, end = hull(rows, BN)
        common = lo_last < hi_first
        if common:
            start = lo_first // BM * BM
            stop = end
        else:
            start, stop = next_run(rows, 0, end, BN, BM)
        f0, f1 = whole_tiles(lo_last, hi_first, BM)

    for g in range(group):
        head = kh * group + g
        h64 = head.to(tl.int64)
        at = (batch, head, batch * heads + head, sq, q_s * VEC, do_s * VEC)
        if DESC:
            qdo = (Q0, Q1, DO0, DO1, LSE2, DELTA)
        else:
            line = (b64 * heads + h64) * padded
            q0 = Q0 + (b64 * q_b + h64 * q_h) * VEC
            do0 = DO0 + (b64 * do_b + h64 * do_h) * VEC
            qdo = (q0, q0, do0, do0, LSE2 + line, DELTA + line)
        if FULL:
            state = dkdv_run(state, kv, qdo, at, bounds, 0, sq, 0, sq, factor, cap,
                             True, BRANCH, STAGES, NO_LICM, D, W0, W1, BM, CAP, DESC, PRECISION, INTERPRET)  # fmt: skip
        else:
            a = start
            e = stop
            while a < e:  # once, but where the keys have no row in common
                state = dkdv_run(state, kv, qdo, at, bounds, a, e, f0, f1, factor, cap,
                                 False, BRANCH, STAGES, NO_LICM, D, W0, W1, BM, CAP, DESC, PRECISION, INTERPRET)  # fmt: skip
                if common:
                    a = e
                else:
                    a, e = next_run(rows, tl.cdiv(e, BM) * BM, end, BN, BM)

    dk0, dk1, dv0, dv1 = state
    dk0 = dk0 * scale
    if W1 > 0:
        dk1 = dk1 * scale
    store_tile(DK + (b64 * dk_b + kh64 * dk_h) * VEC, dk0, dk1, row, sk, dk_s * VEC, False, D, BN, W0, W1)
    store_tile(DV + (b64 * dv_b + kh64 * dv_h) * VEC, dv0, dv1, row, sk, dv_s * VEC, False, D, BN, W0, W1)


@triton.jit
def dq_tile(state, qdo, kv, at, n, bounds, masked, factor, cap, D: tl.constexpr, W0: tl.constexpr, W1: tl.constexpr,
            BN: tl.constexpr, CAP: tl.constexpr, DESC: tl.constexpr, PRECISION: tl.constexpr, INTERPRET: tl.constexpr):  # fmt: skip
    """What keys n .. n + BN add to a query tile's dq (without scale)."""
    dq0, dq1 = state
    q0, q1, do0, do1, lse, delta = qdo
    K0, K1, V0, V1 = kv
    batch, head, sk, k_s, v_s = at
    k0, k1 = load_tile(K0, K1, batch, head, n, sk, k_s, D, BN, W0, W1, DESC, INTERPRET)
    v0, v1 = load_tile(V0, V1, batch, head, n, sk, v_s, D, BN, W0, W1, DESC, INTERPRET)
    s = dot_nt(q0, q1, k0, k1, W1, PRECISION)
    if CAP:
        t = tanh(s * factor, k0.dtype == tl.float32)
        p = tl.exp2(cap * t - lse[:, None])
    else:
        p = tl.exp2(s * factor - lse[:, None])
    if masked:
        j = n + tl.arange(0, BN)
        p = tl.where((j[None, :] >= bounds[0][:, None]) & (j[None, :] < bounds[1][:, None]), p, 0.0)
    slope = p * (1.0 - t * t) if CAP else p
    dp = dot_nt(do0, do1, v0, v1, W1, PRECISION)
    ds = slope * (dp - delta[:, None])
    dq0, dq1 = dot_add(ds, k0, k1, dq0, dq1, W1, PRECISION)
    return dq0, dq1


@triton.jit
def dq_run(state, qdo, kv, at, bounds, a, e, f0, f1, factor, cap, EVEN: tl.constexpr, BRANCH: tl.constexpr, STAGES: tl.constexpr,
           NO_LICM: tl.constexpr, D: tl.constexpr, W0: tl.constexpr, W1: tl.constexpr, BN: tl.constexpr, CAP: tl.constexpr,
           DESC: tl.constexpr, PRECISION: tl.constexpr, INTERPRET: tl.constexpr):  # fmt: skip
    """All key tiles of [a, e); those within [f0, f1) need no mask (EVEN: none does)."""
    if EVEN:
        for n in tl.range(a, e, BN, num_stages=STAGES, disable_licm=NO_LICM):
            state = dq_tile(state, qdo, kv, at, n, bounds, False, factor, cap, D, W0, W1, BN, CAP, DESC, PRECISION, INTERPRET)
    elif BRANCH:
        for n in tl.range(a, e, BN, num_stages=STAGES, disable_licm=NO_LICM):
            state = dq_tile(state, qdo, kv, at, n, bounds, (n < f0) | (n >= f1), factor, cap,
                            D, W0, W1, BN, CAP, DESC, PRECISION, INTERPRET)  # fmt: skip
    else:
        g0, g1 = middle(a, e, f0, f1)
        for n in tl.range(g0, g1, BN, num_stages=STAGES, disable_licm=NO_LICM):
            state = dq_tile(state, qdo, kv, at, n, bounds, False, factor, cap, D, W0, W1, BN, CAP, DESC, PRECISION, INTERPRET)
        for t in tl.range(a, e - (g1 - g0), BN, num_stages=STAGES, disable_licm=NO_LICM):
            n = tl.where(t < g0, t, t + (g1 - g0))
            state = dq_tile(state, qdo, kv, at, n, bounds, True, factor, cap, D, W0, W1, BN, CAP, DESC, PRECISION, INTERPRET)
    return state


@triton.jit(do_not_specialize=[
    "factor", "cap", "scale", "sq", "sk", "padded", "heads", "group", "section", "batches", "bounds_b",
    "q_b", "q_s", "q_h", "k_b", "k_s", "k_h", "v_b", "v_s", "v_h", "do_b", "do_s", "do_h", "dq_b", "dq_s", "dq_h",
], do_not_specialize_on_alignment=["LSE2", "DELTA", "LO", "HI"])  # fmt: skip
def attention_dq(
    Q0, Q1, K0, K1, V0, V1, DO0, DO1, LSE2, DELTA, DQ, LO, HI,
    factor: tl.float32, cap: tl.float32, scale: tl.float32, sq: tl.int32, sk: tl.int32, padded: tl.int32, heads: tl.int32,
    group: tl.int32, section: tl.int32, batches: tl.int32, bounds_b: tl.int64,
    q_b: tl.int64, q_s: tl.int64, q_h: tl.int64, k_b: tl.int64, k_s: tl.int64, k_h: tl.int64,
    v_b: tl.int64, v_s: tl.int64, v_h: tl.int64, do_b: tl.int64, do_s: tl.int64, do_h: tl.int64,
    dq_b: tl.int64, dq_s: tl.int64, dq_h: tl.int64,
    ADD: tl.constexpr, FULL: tl.constexpr, EVEN: tl.constexpr, CAP: tl.constexpr, D: tl.constexpr, W0: tl.constexpr,
    W1: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr, BRANCH: tl.constexpr, NO_LICM: tl.constexpr,
    VEC: tl.constexpr, DESC: tl.constexpr, PRECISION: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """dQ of BM rows of one head, added to DQ or written. Arguments as in attention_forward and attention_dkdv."""
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
        DO0 += (b64 * do_b + h64 * do_h) * VEC
        K0 += (b64 * k_b + kh64 * k_h) * VEC
        V0 += (b64 * v_b + kh64 * v_h) * VEC
        Q1 = Q0
        DO1 = DO0
        K1 = K0
        V1 = V0
    q0, q1 = load_tile(Q0, Q1, batch, head, row, sq, q_s * VEC, D, BM, W0, W1, DESC, INTERPRET)
    do0, do1 = load_tile(DO0, DO1, batch, head, row, sq, do_s * VEC, D, BM, W0, W1, DESC, INTERPRET)
    line = (b64 * heads + h64) * padded + row + tl.arange(0, BM)
    qdo = (q0, q1, do0, do1, tl.load(LSE2 + line), tl.load(DELTA + line))
    kv = (K0, K1, V0, V1)
    at = (batch, kh, sk, k_s * VEC, v_s * VEC)
    zero0 = tl.zeros([BM, W0], tl.float32)
    zero1 = zero0
    if W1 > 0:
        zero1 = tl.zeros([BM, W1], tl.float32)
    state = (zero0, zero1)
    if FULL:
        bounds = (tl.zeros([BM], tl.int32), tl.zeros([BM], tl.int32) + sk)
        state = dq_run(state, qdo, kv, at, bounds, 0, sk, 0, sk // BN * BN, factor, cap,
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
            state = dq_run(state, qdo, kv, at, bounds, a, e, f0, f1, factor, cap,
                           False, BRANCH, STAGES, NO_LICM, D, W0, W1, BN, CAP, DESC, PRECISION, INTERPRET)  # fmt: skip
            if common:
                a = e
            else:
                a, e = next_run(rows, tl.cdiv(e, BN) * BN, end, BM, BN)

    dq0, dq1 = state
    dq0 = dq0 * scale
    if W1 > 0:
        dq1 = dq1 * scale
    store_tile(DQ + (b64 * dq_b + h64 * dq_h) * VEC, dq0, dq1, row, sq, dq_s * VEC, ADD, D, BM, W0, W1)
