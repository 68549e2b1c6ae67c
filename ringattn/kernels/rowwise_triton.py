"""Triton kernels of everything between the matrix products: SwiGLU, RMSNorm's backward, RoPE, the softmax of the loss.

All are limited by memory bandwidth. Each reads its inputs once (the loss twice, the second time mostly from the L2 cache), computes
in fp32 and rounds once; sums over rows are taken in a fixed order, without atomics. :mod:`ringattn.kernels.rowwise` launches them.
Loads are cast to fp32 before any arithmetic, since the interpreter computes bf16 from the bit patterns. Offsets are int64.
"""

import triton
import triton.language as tl


@triton.jit
def swiglu_forward(GATE_UP, HIDDEN, F, BLOCK: tl.constexpr):
    """HIDDEN[n] = silu(gate) * up of one row [2F]. Grid (rows, blocks of F)."""
    row = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = col < F
    gate = tl.load(GATE_UP + row * 2 * F + col, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(GATE_UP + row * 2 * F + F + col, mask=mask, other=0.0).to(tl.float32)
    tl.store(HIDDEN + row * F + col, (gate * tl.sigmoid(gate) * up).to(HIDDEN.dtype.element_ty), mask=mask)


@triton.jit
def swiglu_backward(GATE_UP, D_HIDDEN, F, BLOCK: tl.constexpr):
    """In place: GATE_UP becomes its own gradient, D_HIDDEN becomes the hidden values that the forward pass made."""
    row = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = col < F
    at_gate, at_hidden = GATE_UP + row * 2 * F + col, D_HIDDEN + row * F + col
    gate = tl.load(at_gate, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(at_gate + F, mask=mask, other=0.0).to(tl.float32)
    d_hidden = tl.load(at_hidden, mask=mask, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    silu = gate * sigmoid
    d_gate = d_hidden * up * (sigmoid + silu * (1.0 - sigmoid))
    tl.store(at_hidden, (silu * up).to(D_HIDDEN.dtype.element_ty), mask=mask)
    tl.store(at_gate, d_gate.to(GATE_UP.dtype.element_ty), mask=mask)
    tl.store(at_gate + F, (d_hidden * silu).to(GATE_UP.dtype.element_ty), mask=mask)


@triton.jit
def rms_norm_backward(D_NORMED, X, WEIGHT, D_RESIDUAL, D_X, D_WEIGHT, rows, E, eps, RESIDUAL: tl.constexpr,
                      BLOCK: tl.constexpr):  # fmt: skip
    """D_X = D_RESIDUAL (if RESIDUAL) + gradient through ``x * rsqrt(mean(x^2) + eps) * weight``; may be written over either.

    D_WEIGHT fp32 [programs, E]: each program's sum over its rows. Grid (programs,).
    """
    program = tl.program_id(0)
    col = tl.arange(0, BLOCK)
    mask = col < E
    weight = tl.load(WEIGHT + col, mask=mask, other=0.0).to(tl.float32)
    d_weight = tl.zeros([BLOCK], tl.float32)
    for first in range(0, rows, tl.num_programs(0)):
        row = first + program
        at = row.to(tl.int64) * E + col
        inside = mask & (row < rows)
        x = tl.load(X + at, mask=inside, other=0.0).to(tl.float32)
        d_normed = tl.load(D_NORMED + at, mask=inside, other=0.0).to(tl.float32)
        inv_rms = 1.0 / tl.sqrt(tl.sum(x * x, 0) / E + eps)
        x_hat = x * inv_rms
        d_weight += d_normed * x_hat
        d_hat = d_normed * weight
        d_x = inv_rms * (d_hat - x_hat * (tl.sum(d_hat * x_hat, 0) / E))
        if RESIDUAL:
            d_x += tl.load(D_RESIDUAL + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(D_X + at, d_x.to(D_X.dtype.element_ty), mask=inside)
    tl.store(D_WEIGHT + program.to(tl.int64) * E + col, d_weight, mask=mask)


@triton.jit
def _turn(SOURCE, TARGET, cos, sin, mask, HALF: tl.constexpr, ROTATE: tl.constexpr):
    first = tl.load(SOURCE, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(SOURCE + HALF, mask=mask, other=0.0).to(tl.float32)
    if ROTATE:
        turned = first * cos - second * sin
        second = second * cos + first * sin
        first = turned
    tl.store(TARGET, first.to(TARGET.dtype.element_ty), mask=mask)
    tl.store(TARGET + HALF, second.to(TARGET.dtype.element_ty), mask=mask)


@triton.jit
def split_rotate(QKV, Q, K, V, COS, SIN, rows, first_row, phase_rows, H: tl.constexpr, HKV: tl.constexpr, HALF: tl.constexpr,
                 BACKWARD: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr):  # fmt: skip
    """Rows of QKV [rows, (H + 2 HKV) * D] to Q, K (turned by their phase) and V, each [rows, heads, D]; BACKWARD: the other way,
    turned back. Row i has the phase (first_row + i) mod phase_rows. Grid (blocks of ROWS rows, H + 2 HKV)."""
    head = tl.program_id(1)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    pair = tl.arange(0, WIDTH)[None, :]
    mask = (row < rows) & (pair < HALF)
    at_phase = ((first_row + row) % phase_rows) * HALF + pair
    packed = QKV + row * ((H + 2 * HKV) * 2 * HALF) + head * 2 * HALF + pair
    if head < H + HKV:
        cos = tl.load(COS + at_phase, mask=mask, other=0.0)
        sin = tl.load(SIN + at_phase, mask=mask, other=0.0)
        if head < H:
            own = Q + row * (H * 2 * HALF) + head * 2 * HALF + pair
            if BACKWARD:
                _turn(own, packed, cos, -sin, mask, HALF, True)
            else:
                _turn(packed, own, cos, sin, mask, HALF, True)
        else:
            own = K + row * (HKV * 2 * HALF) + (head - H) * 2 * HALF + pair
            if BACKWARD:
                _turn(own, packed, cos, -sin, mask, HALF, True)
            else:
                _turn(packed, own, cos, sin, mask, HALF, True)
    else:
        own = V + row * (HKV * 2 * HALF) + (head - H - HKV) * 2 * HALF + pair
        if BACKWARD:
            _turn(own, packed, 0.0, 0.0, mask, HALF, False)
        else:
            _turn(packed, own, 0.0, 0.0, mask, HALF, False)


@triton.jit
def _capped(x, cap, CAP: tl.constexpr):
    """``cap * tanh(x / cap)`` and its derivative. tanh by exp of a negative number: exact enough and never infinite."""
    if CAP:
        e = tl.exp(-2.0 * tl.abs(x) / cap)
        t = (1.0 - e) / (1.0 + e)
        t = tl.where(x < 0, -t, t)
        y = cap * t
        slope = 1.0 - t * t
    else:
        y = x
        slope = 1.0
    return y, slope


@triton.jit
def cross_entropy(LOGITS, GRADIENT, LABELS, LOSS, V, cap, z_loss, CAP: tl.constexpr, IGNORE: tl.constexpr, WANT: tl.constexpr,
                  RATIO: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """One row of fp32 LOGITS [rows, V]: its loss, and its gradient written over it. Grid (rows,).

    GRADIENT is the same memory seen as the gradient's dtype, RATIO of whose numbers fit one fp32: block j's gradient lands at or
    before the place where block j was read, never on a block that is still to come. Within the program a barrier separates reading
    from writing.
    """
    row = tl.program_id(0).to(tl.int64)
    label = tl.load(LABELS + row)
    col = tl.arange(0, BLOCK)
    logits, gradient = LOGITS + row * V, GRADIENT + row * V * RATIO
    if label == IGNORE:
        tl.store(LOSS + row, 0.0)
        if WANT:
            for start in range(0, V, BLOCK):
                at = start + col
                tl.store(gradient + at, tl.zeros([BLOCK], GRADIENT.dtype.element_ty), mask=at < V)
    else:
        m, l = -float("inf"), 0.0
        for start in range(0, V, BLOCK):
            at = start + col
            x = tl.load(logits + at, mask=at < V, other=0.0)
            x, _ = _capped(x, cap, CAP)
            x = tl.where(at < V, x, -float("inf"))
            new = tl.maximum(m, tl.max(x, 0))
            l = l * tl.exp(m - new) + tl.sum(tl.exp(x - new), 0)
            m = new
        lse = m + tl.log(l)
        inside = (label >= 0) & (label < V)
        target, _ = _capped(tl.load(logits + label, mask=inside, other=0.0), cap, CAP)
        loss = lse - target + z_loss * lse * lse
        tl.store(LOSS + row, tl.where(inside, loss, float("nan")))  # a label that is no token: seen as a loss that is no number
        if WANT:
            scale = 1.0 + 2.0 * z_loss * lse
            for start in range(0, V, BLOCK):
                at = start + col
                x, slope = _capped(tl.load(logits + at, mask=at < V, other=0.0), cap, CAP)
                g = (tl.exp(x - lse) * scale - tl.where(at == label, 1.0, 0.0)) * slope
                tl.debug_barrier()
                tl.store(gradient + at, g.to(GRADIENT.dtype.element_ty), mask=at < V)
