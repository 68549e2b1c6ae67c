"""Device code of the Hopper (sm_90) forward kernel, in Gluon. The host side, and the contract, are in ``gluon_kernel.py``.

One program computes a tile of 64 x CONSUMERS query rows of one head: a producer warpgroup fills shared memory by TMA, and each
consumer warpgroup owns 64 query rows and walks the key tiles from the right to the left (FlashAttention-2's online softmax,
arXiv 2307.08691, in base 2). Inside a consumer, the scores of tile i + 1 and the product P V of tile i are in flight together,
so the exponentials run beside the tensor cores.

Tensors are rank-4 TMA descriptors over (B, H, S, D) with block [1, 1, rows, D]: any strides of 16-byte multiples, and rows past
the end of a sequence are read as zeros and never written.

Three steps of the state between hops are compile-time choices:
    CARRY  0: this is the first hop, start from nothing; 1: continue from (acc, m, l) in memory; 2: first hop with a sink
    LAST   normalise and write out and lse; otherwise write (acc, m, l)
    MASKED False: every row sees every key and Sk is a multiple of the key tile; True: per-row intervals lo <= j < hi
The carried state enters at the end, as one more step of the online softmax: starting from it would keep D registers a thread
alive through the whole loop and spill.
"""

# Device code: types are the compiler's, and a constexpr test must stand alone to be decided at compile time.
# mypy: disable-error-code="no-untyped-def"
# ruff: noqa: SIM102, SIM108, RET505

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

# The first running maximum: low enough to lose to every score, finite so that (-inf) - (-inf) never happens in the loop.
LOWEST = gl.constexpr(-1e30)
LN_2 = gl.constexpr(0.6931471805599453)
LOG2_E = gl.constexpr(1.4426950408889634)
ROWS = gl.constexpr(64)  # query rows a consumer warpgroup owns: the M of one wgmma


SLACK = gl.constexpr(8.0)  # a stale maximum may be this much too small (base 2): P stays below 2^8, far from fp16's end


@gluon.jit
def _settle(l):
    """l, with everything that it is made of computed before any instruction with effects that follows.

    ptxas moves the wait for P V ahead of the exponentials that P V should run beside, whatever the order of the program. It does
    not move a wait over a volatile store, and this one, never executed, hangs on the sum of the exponentials (which is not
    negative).
    """
    return gl.inline_asm_elementwise(
        "{ .reg .pred p; .reg .b32 a; .reg .f32 x; mov.b32 a, 0; min.f32 x, $2, $3; setp.lt.f32 p, x, 0fBF800000;"
        " @p st.volatile.shared.f32 [a], x; mov.b32 $0, $2; mov.b32 $1, $3; }",
        "=f,=f,f,f", [l], dtype=gl.float32, is_pure=False, pack=2,
    )  # fmt: skip


@gluon.constexpr_function
def _rescale_asm(n):
    """PTX: multiply n accumulator registers (rows r, r, r + 8, r + 8, ...) unless every factor in the warp is 1."""
    keep = " ".join(f"mov.f32 ${i}, ${n + i};" for i in range(n))
    multiply = " ".join(f"mul.f32 ${i}, ${i}, ${2 * n + i};" for i in range(n))
    return (
        "{ .reg .pred p, q; " + keep + f" setp.ne.f32 p, ${2 * n}, 0f3F800000; setp.ne.f32 q, ${2 * n + 2}, 0f3F800000;"
        " or.pred p, p, q; vote.sync.any.pred p, p, 0xffffffff; @!p bra DONE; " + multiply + " DONE: }"
    )  # fmt: skip


@gluon.constexpr_function
def _rescale_operands(n):
    return ",".join(["=&f"] * n + ["f"] * (2 * n))


@gluon.jit
def _rescale(acc, shrink, D: gl.constexpr, layout: gl.constexpr, LAZY: gl.constexpr):
    """acc times shrink, row by row. LAZY: a warp whose factors are all 1 (nearly always, after the first tiles) skips it."""
    factor = gl.expand_dims(gl.convert_layout(shrink, gl.SliceLayout(1, layout)), 1)
    if LAZY:
        factor, acc = gl.broadcast(factor, acc)
        return gl.inline_asm_elementwise(
            _rescale_asm(D // 2), _rescale_operands(D // 2), [acc, factor], dtype=gl.float32, is_pure=False, pack=D // 2
        )
    else:
        return acc * factor


@gluon.jit
def _key_tile(live_ptr, hole, end, i, MASKED: gl.constexpr):
    """The i-th key tile to visit, from the right. ``hole`` >= 0: tiles in between are dead, so read the list of live ones."""
    tile = end - 1 - i
    if MASKED:
        if hole >= 0:
            tile = gl.load(live_ptr + (hole - i))
    return tile


@gluon.jit
def _producer(
    pipes, hk, q_desc, k_desc, v_desc,
    CONSUMERS: gl.constexpr, BN: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    q_s, k_s, v_s, q_full, k_full, k_empty, v_full, v_empty, live_ptr, b, hq, m0, end, hole, n_tiles = pipes
    # Nothing may be in flight when a program without tiles ends, or into the buffer that its epilogue reuses.
    if n_tiles > 0:
        for c in gl.static_range(CONSUMERS):
            mbarrier.expect(q_full.index(c), ROWS * D * 2)
            tma.async_copy_global_to_shared(q_desc, [b, hq, m0 + c * ROWS, 0], q_full.index(c), q_s.index(c))
    for i in range(n_tiles):
        stage = i % STAGES
        phase = (i // STAGES) & 1
        n = _key_tile(live_ptr, hole, end, i, MASKED) * BN
        mbarrier.wait(k_empty.index(stage), phase ^ 1)
        mbarrier.expect(k_full.index(stage), BN * D * 2)
        tma.async_copy_global_to_shared(k_desc, [b, hk, n, 0], k_full.index(stage), k_s.index(stage))
        mbarrier.wait(v_empty.index(stage), phase ^ 1)
        mbarrier.expect(v_full.index(stage), BN * D * 2)
        tma.async_copy_global_to_shared(v_desc, [b, hk, n, 0], v_full.index(stage), v_s.index(stage))


@gluon.jit
def _mask(s, lo, hi, n, BN: gl.constexpr, layout: gl.constexpr):
    # The column index is written arange + n: as hi - n the compiler hoists one register a column out of the loop, and spills.
    keys = gl.expand_dims(gl.arange(0, BN, layout=gl.SliceLayout(0, layout)) + n, 0)
    return gl.where((keys < gl.expand_dims(hi, 1)) & (keys >= gl.expand_dims(lo, 1)), s, float("-inf"))


@gluon.jit
def _consumer(
    pipes, outputs, c: gl.constexpr, BN: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, MASKED: gl.constexpr,
    CARRY: gl.constexpr, LAST: gl.constexpr, LATE: gl.constexpr, LAZY: gl.constexpr, SETTLE: gl.constexpr,
):  # fmt: skip
    q_s, k_s, v_s, q_full, k_full, k_empty, v_full, v_empty, live_ptr, b, hq, m0, end, hole, n_tiles = pipes
    out_desc, acc_ptr, m_ptr, l_ptr, lse_ptr, lo_ptr, hi_ptr, sq, sink, scale_log2, acc_stride = outputs
    s_layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BN, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=o_layout, k_width=2)
    row_layout: gl.constexpr = gl.SliceLayout(1, s_layout)
    out_row_layout: gl.constexpr = gl.SliceLayout(1, o_layout)
    dtype: gl.constexpr = q_s.dtype

    first = m0 + c * ROWS
    rows = gl.arange(0, ROWS, layout=row_layout)
    left = sq - first  # rows of this warpgroup that exist (may be <= 0)
    lo = rows
    hi = rows
    all_lo = 0
    all_hi = 0
    if MASKED:
        # Bounds never decrease along the rows, so the last lo and the first hi tell which tiles every row sees whole.
        # Rows that do not exist repeat the last one: they never force a mask.
        near = gl.minimum(first + rows, sq - 1)
        lo = gl.load(lo_ptr + near)
        hi = gl.load(hi_ptr + near)
        all_lo = gl.load(lo_ptr + gl.minimum(first + ROWS, sq) - 1)
        all_hi = gl.load(hi_ptr + gl.minimum(first, sq - 1))

    acc = gl.zeros([ROWS, D], gl.float32, layout=o_layout)
    m = gl.full([ROWS], LOWEST, gl.float32, layout=row_layout)
    l = gl.zeros([ROWS], gl.float32, layout=row_layout)
    if n_tiles > 0:
        zero = gl.zeros([ROWS, BN], gl.float32, layout=s_layout)
        q = q_s.index(c).reshape([ROWS, D])
        mbarrier.wait(q_full.index(c), 0)
        mbarrier.wait(k_full.index(0), 0)
        s_next = warpgroup_mma(q, k_s.index(0).reshape([BN, D]).permute((1, 0)), zero, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(0, deps=[s_next])
        mbarrier.arrive(k_empty.index(0), count=1)
        if MASKED:
            s = _mask(s, lo, hi, _key_tile(live_ptr, hole, end, 0, MASKED) * BN, BN, s_layout)
        m_new = gl.maximum(m, gl.max(s, 1) * scale_log2)
        p = gl.exp2(s * scale_log2 - gl.expand_dims(m_new, 1))
        l = gl.sum(p, 1)
        m = m_new
        p16 = gl.convert_layout(p.to(dtype), p_layout)
        for i in range(1, n_tiles):
            stage = i % STAGES
            before = (i - 1) % STAGES
            mbarrier.wait(k_full.index(stage), (i // STAGES) & 1)
            s_next = warpgroup_mma(q, k_s.index(stage).reshape([BN, D]).permute((1, 0)), zero, use_acc=False, is_async=True)
            mbarrier.wait(v_full.index(before), ((i - 1) // STAGES) & 1)
            acc_next = warpgroup_mma(p16, v_s.index(before).reshape([BN, D]), acc, is_async=True)
            s = warpgroup_mma_wait(1, deps=[s_next])
            mbarrier.arrive(k_empty.index(stage), count=1)
            if MASKED:
                n = _key_tile(live_ptr, hole, end, i, MASKED) * BN
                if (n + BN > all_hi) | (n < all_lo):
                    s = _mask(s, lo, hi, n, BN, s_layout)
            m_new = gl.max(s, 1) * scale_log2
            if LAZY:
                m_new = gl.where(m_new > m + SLACK, m_new, m)
            else:
                m_new = gl.maximum(m, m_new)
            p = gl.exp2(s * scale_log2 - gl.expand_dims(m_new, 1))
            shrink = gl.exp2(m - m_new)
            l = l * shrink + gl.sum(p, 1)
            m = m_new
            if SETTLE:
                l = _settle(l)
            # P is rounded after the wait for the previous P V, whose operand registers it can then reuse (LATE; 5 % fewer cycles).
            if LATE:
                acc, p, shrink = warpgroup_mma_wait(0, deps=[acc_next, p, shrink])
                p16 = gl.convert_layout(p.to(dtype), p_layout)
            else:
                p_new = gl.convert_layout(p.to(dtype), p_layout)
                acc, p16, shrink = warpgroup_mma_wait(0, deps=[acc_next, p_new, shrink])
            mbarrier.arrive(v_empty.index(before), count=1)
            acc = _rescale(acc, shrink, D, o_layout, LAZY)
        before = (n_tiles - 1) % STAGES
        mbarrier.wait(v_full.index(before), ((n_tiles - 1) // STAGES) & 1)
        acc_next = warpgroup_mma(p16, v_s.index(before).reshape([BN, D]), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc_next])

    # One more step of the online softmax brings in what came before this hop.
    exists = rows < left
    if CARRY > 0:
        if CARRY == 1:
            m_before = gl.load(m_ptr + first + rows, mask=exists, other=float("-inf"))
            l_before = gl.load(l_ptr + first + rows, mask=exists, other=0.0)
        else:
            m_before = gl.zeros([ROWS], gl.float32, layout=row_layout) + sink
            l_before = gl.full([ROWS], 1.0, gl.float32, layout=row_layout)
        m_new = gl.maximum(m, m_before)  # m >= LOWEST: finite even where nothing was seen
        keep = gl.exp2(m - m_new)
        keep_before = gl.exp2(m_before - m_new)
        l = l * keep + l_before * keep_before
        m = m_new
    out_rows = gl.arange(0, ROWS, layout=out_row_layout)
    out_cols = gl.arange(0, D, layout=gl.SliceLayout(0, o_layout))
    acc_mask = gl.expand_dims(out_rows < left, 1)
    acc_at = (acc_ptr + first.to(gl.int64) * acc_stride) + (gl.expand_dims(out_rows, 1) * acc_stride + gl.expand_dims(out_cols, 0))
    weight = l
    if LAST:
        weight = gl.where(l > 0, 1.0 / l, 0.0)
    if CARRY == 0:
        if LAST:
            acc = acc * gl.expand_dims(gl.convert_layout(weight, out_row_layout), 1)
    else:
        if LAST:
            keep = keep * weight
            keep_before = keep_before * weight
        acc = acc * gl.expand_dims(gl.convert_layout(keep, out_row_layout), 1)
        if CARRY == 1:
            acc_before = gl.load(acc_at, mask=acc_mask, other=0.0)
            acc = acc + acc_before * gl.expand_dims(gl.convert_layout(keep_before, out_row_layout), 1)
    if LAST:
        gl.store(lse_ptr + first + rows, gl.where(l > 0, (m + gl.log2(l)) * LN_2, float("-inf")), mask=exists)
        # Every read of Q is over: its buffer carries the output to TMA, which drops the rows that do not exist.
        out_s = q_s.index(c)
        out_s.reshape([ROWS, D]).store(acc.to(dtype))
        fence_async_shared()
        tma.async_copy_shared_to_global(out_desc, [b, hq, first, 0], out_s)
        tma.store_wait(0)
    else:
        gl.store(m_ptr + first + rows, gl.where(l > 0, m, float("-inf")), mask=exists)
        gl.store(l_ptr + first + rows, l, mask=exists)
        gl.store(acc_at, acc, mask=acc_mask)


@gluon.jit(
    do_not_specialize=["sq", "heads", "group", "section", "row_tiles", "key_tiles", "batched",
                       "stat_stride_b", "stat_stride_h", "lse_stride_b", "lse_stride_h"],
    do_not_specialize_on_alignment=["lo_ptr", "hi_ptr", "sink_ptr", "m_ptr", "l_ptr", "lse_ptr"],
)  # fmt: skip
def forward_kernel(
    q_desc, k_desc, v_desc, out_desc, acc_ptr, m_ptr, l_ptr, lse_ptr, sink_ptr, lo_ptr, hi_ptr, plan_ptr, live_ptr, scale_log2,
    sq, heads, group, section, row_tiles, key_tiles, batched,
    acc_stride_b, acc_stride_s, acc_stride_h, stat_stride_b, stat_stride_h, lse_stride_b, lse_stride_h,
    CONSUMERS: gl.constexpr, BN: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, REGISTERS: gl.constexpr,
    MASKED: gl.constexpr, CARRY: gl.constexpr, LAST: gl.constexpr, LATE: gl.constexpr, LAZY: gl.constexpr, SETTLE: gl.constexpr,
):  # fmt: skip
    """One hop, forward. Grid: [row_tiles * B * heads]; ``section`` divides B * heads.

    ``section`` heads are worked on side by side, so that their keys stay in L2; within a section the last row tiles, the
    heaviest under a causal mask, go first. ``lo_ptr``, ``hi_ptr`` int32 [Bb, sq]; ``plan_ptr`` int32 [Bb, row_tiles, 4]: tiles to
    visit, end of the tile range, place of its last tile in ``live_ptr`` int32 [Bb, key_tiles], or -1 where the range has no dead
    tile (see gluon_helpers.py). ``batched``: 1 if Bb = B, 0 if Bb = 1. Pointers that a variant does not use may be anything.
    """
    BM: gl.constexpr = ROWS * CONSUMERS
    dtype: gl.constexpr = q_desc.dtype
    pid = gl.program_id(0)
    within = pid % (section * row_tiles)
    head = pid // (section * row_tiles) * section + within % section
    row_tile = row_tiles - 1 - within // section
    b = head // heads
    hq = head % heads
    hk = hq // group
    m0 = row_tile * BM

    q_s = gl.allocate_shared_memory(dtype, [CONSUMERS, 1, 1, ROWS, D], q_desc.layout)
    k_s = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BN, D], k_desc.layout)
    v_s = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BN, D], v_desc.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(CONSUMERS):
        mbarrier.init(q_full.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=CONSUMERS)
        mbarrier.init(v_empty.index(i), count=CONSUMERS)

    n_tiles = key_tiles
    end = key_tiles
    hole = -1
    if MASKED:
        bb = b * batched
        plan_ptr += (bb * row_tiles + row_tile) * 4
        n_tiles = gl.load(plan_ptr)
        end = gl.load(plan_ptr + 1)
        hole = gl.load(plan_ptr + 2)
        live_ptr += bb * key_tiles
        lo_ptr += bb * sq
        hi_ptr += bb * sq
    b64 = b.to(gl.int64)
    h64 = hq.to(gl.int64)
    if (CARRY == 1) or (not LAST):
        acc_ptr += b64 * acc_stride_b + h64 * acc_stride_h
        m_ptr += b64 * stat_stride_b + h64 * stat_stride_h
        l_ptr += b64 * stat_stride_b + h64 * stat_stride_h
    if LAST:
        lse_ptr += b64 * lse_stride_b + h64 * lse_stride_h
    sink = 0.0
    if CARRY == 2:
        sink = gl.load(sink_ptr + hq).to(gl.float32) * LOG2_E
    # A tuple held in a variable turns constexprs into tensors: those are named in the call itself.
    pipes = (q_s, k_s, v_s, q_full, k_full, k_empty, v_full, v_empty, live_ptr, b, hq, m0, end, hole, n_tiles)
    outputs = (out_desc, acc_ptr, m_ptr, l_ptr, lse_ptr, lo_ptr, hi_ptr, sq, sink, scale_log2, acc_stride_s)
    if CONSUMERS == 2:
        gl.warp_specialize([
            (_producer, (pipes, hk, q_desc, k_desc, v_desc, CONSUMERS, BN, D, STAGES, MASKED)),
            (_consumer, (pipes, outputs, 0, BN, D, STAGES, MASKED, CARRY, LAST, LATE, LAZY, SETTLE)),
            (_consumer, (pipes, outputs, 1, BN, D, STAGES, MASKED, CARRY, LAST, LATE, LAZY, SETTLE)),
        ], [4, 4], [REGISTERS, REGISTERS])  # fmt: skip
    else:
        gl.warp_specialize([
            (_producer, (pipes, hk, q_desc, k_desc, v_desc, CONSUMERS, BN, D, STAGES, MASKED)),
            (_consumer, (pipes, outputs, 0, BN, D, STAGES, MASKED, CARRY, LAST, LATE, LAZY, SETTLE)),
            (_consumer, (pipes, outputs, 1, BN, D, STAGES, MASKED, CARRY, LAST, LATE, LAZY, SETTLE)),
            (_consumer, (pipes, outputs, 2, BN, D, STAGES, MASKED, CARRY, LAST, LATE, LAZY, SETTLE)),
        ], [4, 4, 4], [REGISTERS, REGISTERS, REGISTERS])  # fmt: skip
