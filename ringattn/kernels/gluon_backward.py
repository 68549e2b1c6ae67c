"""Device code of the Hopper (sm_90) backward kernel, in Gluon: dq, dk and dv of one hop with five matrix products a tile.

One program owns 128 keys of one key head; each of its two consumer warpgroups owns 64 of them and keeps their dk and dv in
registers, while a producer warpgroup brings the query tiles of every query head of the group by TMA. Scores are computed
transposed, S^T = K Q^T and dP^T = V dO^T, so that P^T and dS^T are already the left operands of dv += P^T dO and dk += dS^T Q.
dS is also written to shared memory, where both halves together give dq = dS K; its tile is added to an fp32 workspace in global
memory by the copy engine (TMA reduce), so programs never wait for each other. The order of these additions is not fixed: dq
differs in the last bits from run to run.

The workspace [B * H, rows, D] holds dq / scale with permuted columns: in each group of 32, place 8 a + 2 b + e holds column
8 b + 2 a + e. That is the order in which the registers of a wgmma accumulator can be stored without bank conflicts. The kernel
``finish_dq`` in gluon_helpers.py undoes it.

Masks come as the transposed bounds: key j is seen by rows q_lo[j] <= i < q_hi[j]. A thread holds the scores of two keys only, so
a mask is four values and one comparison pair a score.
"""

# Device code: types are the compiler's, and a constexpr test must stand alone to be decided at compile time.
# mypy: disable-error-code="no-untyped-def"
# ruff: noqa: SIM102, SIM108, RET505

from triton._C.libtriton import ir as _ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

KEYS = gl.constexpr(128)  # keys of one program
HALF = gl.constexpr(64)  # keys of one consumer warpgroup: the M of one wgmma
LN_2 = gl.constexpr(0.6931471805599453)
FAR = gl.constexpr(2147483647)  # beyond every row


@builtin
def _reduce_add(desc, coord, src, _semantic=None):
    """Add a shared-memory tile to global memory by TMA. Triton 3.6 has the instruction but no Python name for it."""
    coord = _semantic._convert_to_ir_values(coord, require_i64=False)
    _semantic.builder.create_async_tma_reduce(_ir.DESCRIPTOR_REDUCE_KIND.ADD, desc.handle, coord, src.handle)


@gluon.jit
def _meet():
    """Both consumer warpgroups wait for each other (named barriers from 8 on are free)."""
    t = gl.arange(0, 128, layout=gl.BlockedLayout([1], [32], [4], [0]))
    gl.inline_asm_elementwise("bar.sync 8, 256; mov.b32 $0, $1;", "=r,r", [t], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _producer(
    pipes, q_desc, k_desc, v_desc, do_desc, lse_desc, delta_desc, b, hk, heads, group, n0, rows,
    q_empty_only: gl.constexpr, BM: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    q_s, k_s, v_s, do_s, lse_s, delta_s, kv_full, q_full, q_empty, do_full, do_empty, first, n_tiles, total = pipes
    TILE: gl.constexpr = BM * D * 2 + BM * 4
    # Nothing may be in flight when a program without tiles ends.
    if total > 0:
        mbarrier.expect(kv_full.index(0), KEYS * D * 2)
        tma.async_copy_global_to_shared(k_desc, [b, hk, n0, 0], kv_full.index(0), k_s.index(0))
        mbarrier.expect(kv_full.index(1), KEYS * D * 2)
        tma.async_copy_global_to_shared(v_desc, [b, hk, n0, 0], kv_full.index(1), v_s.index(0))
    j = 0
    hq = hk * group
    at = (b * heads + hq) * rows
    for it in range(total):
        stage = it % STAGES
        free = ((it // STAGES) & 1) ^ 1
        m0 = (first + j) * BM
        mbarrier.wait(q_empty.index(stage), free)
        mbarrier.expect(q_full.index(stage), TILE)
        tma.async_copy_global_to_shared(q_desc, [b, hq, m0, 0], q_full.index(stage), q_s.index(stage))
        tma.async_copy_global_to_shared(lse_desc, [at + m0], q_full.index(stage), lse_s.index(stage))
        if not q_empty_only:
            mbarrier.wait(do_empty.index(stage), free)
        mbarrier.expect(do_full.index(stage), TILE)
        tma.async_copy_global_to_shared(do_desc, [b, hq, m0, 0], do_full.index(stage), do_s.index(stage))
        tma.async_copy_global_to_shared(delta_desc, [at + m0], do_full.index(stage), delta_s.index(stage))
        j += 1
        if j == n_tiles:
            j = 0
            hq += 1
            at += rows


@gluon.jit
def _visible(key_ptr, z, m0, BM: gl.constexpr, layout: gl.constexpr):
    """Which of the queries m0 .. m0 + BM see which of this warpgroup's keys: bool [HALF, BM].

    A thread needs the bounds of two keys only. They are read again for each masked tile: there are few of those, and four
    registers held through the loop are too many.
    """
    keys = gl.arange(0, HALF, layout=gl.SliceLayout(1, layout)) + z
    q_lo = gl.load(key_ptr + keys)
    q_hi = gl.load(key_ptr + KEYS + keys)
    queries = gl.expand_dims(gl.arange(0, BM, layout=gl.SliceLayout(0, layout)) + m0, 0)
    return (queries >= gl.expand_dims(q_lo, 1)) & (queries < gl.expand_dims(q_hi, 1))


@gluon.jit
def _consumer(
    pipes, outputs, ds_s, dq_s, dq_desc, c: gl.constexpr,
    BM: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, MASKED: gl.constexpr, AHEAD: gl.constexpr,
):  # fmt: skip
    q_s, k_s, v_s, do_s, lse_s, delta_s, kv_full, q_full, q_empty, do_full, do_empty, first, n_tiles, total = pipes
    dk_ptr, dv_ptr, key_ptr, head, left, sq, scale_log2, dk_stride, dv_stride = outputs
    dtype: gl.constexpr = q_s.dtype
    # A dq tile is BM x D: the warpgroups share its columns (BM = 64) or its rows (BM = 128).
    DQ_COLS: gl.constexpr = D // 2 if BM == 64 else D
    s_layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BM, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    dq_layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, DQ_COLS, 16])
    a_layout: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=o_layout, k_width=2)
    query_layout: gl.constexpr = gl.SliceLayout(0, s_layout)

    all_lo = 0
    all_hi = 0
    if MASKED:
        # Bounds never decrease along the keys: the last q_lo and the first q_hi tell which query tiles see all 64 keys.
        # Keys that do not exist are seen by nobody; rows that do not exist have lse +inf and never ask for a mask.
        key_ptr += c * HALF
        all_lo = gl.load(key_ptr + HALF - 1)
        all_hi = gl.load(key_ptr + KEYS)
        if all_hi >= sq:
            all_hi = FAR

    dk = gl.zeros([HALF, D], gl.float32, layout=o_layout)
    dv = gl.zeros([HALF, D], gl.float32, layout=o_layout)
    zero_s = gl.zeros([HALF, BM], gl.float32, layout=s_layout)
    zero_dq = gl.zeros([HALF, DQ_COLS], gl.float32, layout=dq_layout)
    k_half = k_s.index(0).reshape([KEYS, D]).slice(c * HALF, HALF, 0)
    if total > 0:
        mbarrier.wait(kv_full.index(0), 0)
        mbarrier.wait(kv_full.index(1), 0)
        # Pin the zeros in registers before any wgmma is in flight, or ptxas serialises them all (C7515).
        dk, dv = warpgroup_mma_wait(0, deps=[dk, dv])
        j = 0
        if AHEAD:
            mbarrier.wait(q_full.index(0), 0)
            s_next = warpgroup_mma(k_half, q_s.index(0).reshape([BM, D]).permute((1, 0)), zero_s, use_acc=False, is_async=True)
            s = warpgroup_mma_wait(0, deps=[s_next])
        else:
            dk = warpgroup_mma_init(dk)
        for it in range(total):
            stage = it % STAGES
            phase = (it // STAGES) & 1
            m0 = (first + j) * BM
            # An index that is always 0, which the compiler cannot know: otherwise it hoists the operand descriptors out of the
            # loop and spills them.
            z = it >> 30
            k_all = k_s.index(z).reshape([KEYS, D])
            k_half = k_all.slice(c * HALF, HALF, 0)
            v_half = v_s.index(z).reshape([KEYS, D]).slice(c * HALF, HALF, 0)
            q = q_s.index(stage).reshape([BM, D])
            do = do_s.index(stage).reshape([BM, D])
            masked = False
            if MASKED:
                masked = (m0 < all_lo) | (m0 + BM > all_hi)
            if AHEAD:
                if MASKED:
                    if masked:
                        s = gl.where(_visible(key_ptr, z, m0, BM, s_layout), s, float("-inf"))
            else:
                mbarrier.wait(q_full.index(stage), phase)
                s_next = warpgroup_mma(k_half, q.permute((1, 0)), zero_s, use_acc=False, is_async=True)
            mbarrier.wait(do_full.index(stage), phase)
            dp_next = warpgroup_mma(v_half, do.permute((1, 0)), zero_s, use_acc=False, is_async=True)
            if not AHEAD:
                # Leaves dP in flight; the dk of the tile before is done as well.
                s, dk = warpgroup_mma_wait(1, deps=[s_next, dk])
                mbarrier.arrive(q_empty.index((it + STAGES - 1) % STAGES), count=1, pred=it > 0)
            lse = lse_s.index(stage).load(query_layout)
            p = gl.exp2(s * scale_log2 - gl.expand_dims(lse, 0))
            if not AHEAD:
                if MASKED:
                    if masked:
                        p = gl.where(_visible(key_ptr, z, m0, BM, s_layout), p, 0.0)
            dv_next = warpgroup_mma(gl.convert_layout(p.to(dtype), a_layout), do, dv, is_async=True)
            if AHEAD:
                # Leaves dv in flight; the dk of the tile before is done as well.
                dp, dk = warpgroup_mma_wait(1, deps=[dp_next, dk])
            else:
                dp = warpgroup_mma_wait(1, deps=[dp_next])
            delta = delta_s.index(stage).load(query_layout)
            ds = (p * (dp - gl.expand_dims(delta, 0))).to(dtype)
            # Two buffers for dS: with one barrier a tile, a warpgroup may be writing the next while the other still reads this one.
            ds_tile = ds_s.index(it & 1)
            ds_tile.slice(c * HALF, HALF, 0).store(ds)
            fence_async_shared()
            _meet()
            if AHEAD:
                # Both warpgroups have waited for dk and dv of the tile before ahead of this barrier: one arrival frees its buffers.
                if c == 0:
                    mbarrier.arrive(q_empty.index((it + STAGES - 1) % STAGES), count=1, pred=it > 0)
            else:
                dv = warpgroup_mma_wait(0, deps=[dv_next])
            ds_all = ds_tile.permute((1, 0))
            if BM == 64:
                dq_next = warpgroup_mma(ds_all, k_all.slice(c * DQ_COLS, DQ_COLS, 1), zero_dq, use_acc=False, is_async=True)
            else:
                dq_next = warpgroup_mma(ds_all.slice(c * HALF, HALF, 0), k_all, zero_dq, use_acc=False, is_async=True)
            if AHEAD:
                # The scores of the next tile start here, so that its exponentials overlap dk and the next dP. After the last tile
                # they come from an old buffer and are not used.
                following = (it + 1) % STAGES
                mbarrier.wait(q_full.index(following), ((it + 1) // STAGES) & 1, pred=it + 1 < total)
                s_next = warpgroup_mma(k_half, q_s.index(following).reshape([BM, D]).permute((1, 0)), zero_s, use_acc=False, is_async=True)
            dk_next = warpgroup_mma(ds_tile.slice(c * HALF, HALF, 0), q, dk, is_async=True)
            if AHEAD:
                dq, dv = warpgroup_mma_wait(2, deps=[dq_next, dv_next])
            else:
                dq = warpgroup_mma_wait(1, deps=[dq_next])
                mbarrier.arrive(do_empty.index(stage), count=1)
            # The copy engine must have read the tile before from shared memory.
            tma.store_wait(0)
            by_pair = gl.permute(gl.reshape(dq, (HALF, DQ_COLS // 32, 4, 4, 2)), (0, 1, 3, 2, 4))
            dq_s.index(c).reshape([HALF, DQ_COLS]).store(gl.reshape(by_pair, (HALF, DQ_COLS)))
            fence_async_shared()
            if BM == 64:
                _reduce_add(dq_desc, [head, m0, c * DQ_COLS], dq_s.index(c))
            else:
                _reduce_add(dq_desc, [head, m0 + c * HALF, 0], dq_s.index(c))
            if AHEAD:
                s, dk = warpgroup_mma_wait(1, deps=[s_next, dk_next])
            else:
                dk = dk_next
            j += 1
            if j == n_tiles:
                j = 0
                head += 1
        dk = warpgroup_mma_wait(0, deps=[dk])
        tma.store_wait(0)
    rows = gl.arange(0, HALF, layout=gl.SliceLayout(1, o_layout)) + c * HALF
    cols = gl.expand_dims(gl.arange(0, D, layout=gl.SliceLayout(0, o_layout)), 0)
    exists = gl.expand_dims(rows < left, 1)
    gl.store(dv_ptr + (gl.expand_dims(rows, 1) * dv_stride + cols), dv.to(dv_ptr.dtype.element_ty), mask=exists)
    gl.store(dk_ptr + (gl.expand_dims(rows, 1) * dk_stride + cols), (dk * (scale_log2 * LN_2)).to(dk_ptr.dtype.element_ty), mask=exists)


@gluon.jit(
    do_not_specialize=["sq", "sk", "rows", "heads", "kv_heads", "group", "section", "key_tiles", "batched"],
)
def backward_kernel(
    q_desc, k_desc, v_desc, do_desc, lse_desc, delta_desc, dq_desc, dk_ptr, dv_ptr, key_ptr, plan_ptr, scale_log2,
    sq, sk, rows, heads, kv_heads, group, section, key_tiles, batched,
    dk_stride_b, dk_stride_s, dk_stride_h, dv_stride_b, dv_stride_s, dv_stride_h,
    BM: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, REGISTERS: gl.constexpr, MASKED: gl.constexpr, AHEAD: gl.constexpr,
):  # fmt: skip
    """Gradients of one hop. Grid: [key_tiles * B * kv_heads]; ``section`` divides B * kv_heads.

    ``lse_desc``, ``delta_desc``: fp32, 1-D over [B, heads, rows] (rows: sq padded), lse in base 2 with +inf for dead rows.
    ``dq_desc``: the workspace, added to. dk, dv are written. ``plan_ptr`` int32 [Bb, key_tiles, 2]: first and last + 1 query row
    that sees a key of the tile, equal if none does; ``key_ptr`` int32 [Bb, key_tiles, 2, KEYS]: the keys' q_lo and q_hi (see
    gluon_helpers.py). ``batched``: 1 if Bb = B, else 0.
    AHEAD: start the next tile's scores before this tile's dk (pays where registers are left for both, D = 128).
    """
    dtype: gl.constexpr = q_desc.dtype
    pid = gl.program_id(0)
    within = pid % (section * key_tiles)
    head = pid // (section * key_tiles) * section + within % section
    # Key tile 0 first: under a causal mask every row sees it.
    key_tile = within // section
    n0 = key_tile * KEYS
    b = head // kv_heads
    hk = head % kv_heads
    DQ_COLS: gl.constexpr = D // 2 if BM == 64 else D

    q_s = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BM, D], q_desc.layout)
    do_s = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BM, D], do_desc.layout)
    k_s = gl.allocate_shared_memory(dtype, [1, 1, 1, KEYS, D], k_desc.layout)
    v_s = gl.allocate_shared_memory(dtype, [1, 1, 1, KEYS, D], v_desc.layout)
    lse_s = gl.allocate_shared_memory(gl.float32, [STAGES, BM], lse_desc.layout)
    delta_s = gl.allocate_shared_memory(gl.float32, [STAGES, BM], delta_desc.layout)
    ds_layout: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    ds_s = gl.allocate_shared_memory(dtype, [2, KEYS, BM], ds_layout)
    dq_s = gl.allocate_shared_memory(gl.float32, [2, 1, HALF, DQ_COLS], dq_desc.layout)
    kv_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    q_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    do_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    do_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(kv_full.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(do_full.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=1 if AHEAD else 2)
        mbarrier.init(do_empty.index(i), count=1 if AHEAD else 2)

    first = 0
    n_tiles = gl.cdiv(sq, BM)
    if MASKED:
        bb = b * batched
        plan_ptr += (bb * key_tiles + key_tile) * 2
        row_lo = gl.load(plan_ptr)
        row_hi = gl.load(plan_ptr + 1)
        first = row_lo // BM
        n_tiles = gl.where(row_hi > row_lo, gl.cdiv(row_hi, BM) - first, 0)
        key_ptr += (bb * key_tiles + key_tile) * 2 * KEYS
    b64 = b.to(gl.int64)
    h64 = hk.to(gl.int64)
    dk_ptr += b64 * dk_stride_b + h64 * dk_stride_h + n0.to(gl.int64) * dk_stride_s
    dv_ptr += b64 * dv_stride_b + h64 * dv_stride_h + n0.to(gl.int64) * dv_stride_s
    # A tuple held in a variable turns constexprs into tensors: those are named in the call itself.
    pipes = (q_s, k_s, v_s, do_s, lse_s, delta_s, kv_full, q_full, q_empty, do_full, do_empty, first, n_tiles, group * n_tiles)
    # Each of these costs the consumers a register for the whole loop.
    outputs = (dk_ptr, dv_ptr, key_ptr, b * heads + hk * group, sk - n0, sq, scale_log2, dk_stride_s, dv_stride_s)
    gl.warp_specialize([
        (_producer, (pipes, q_desc, k_desc, v_desc, do_desc, lse_desc, delta_desc, b, hk, heads, group, n0, rows, AHEAD, BM, D, STAGES)),
        (_consumer, (pipes, outputs, ds_s, dq_s, dq_desc, 0, BM, D, STAGES, MASKED, AHEAD)),
        (_consumer, (pipes, outputs, ds_s, dq_s, dq_desc, 1, BM, D, STAGES, MASKED, AHEAD)),
    ], [4, 4], [REGISTERS, REGISTERS])  # fmt: skip
