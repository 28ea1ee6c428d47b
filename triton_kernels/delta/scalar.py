"""Scalar gates of the delta families: one log gate per token and value head, or none.

What kernels need of a token beside its rows lies ready in `tokens` [rows, HV, PARTS, BT] fp32, one
line of BT numbers a part. Every decay is exp2 of a sum over the very tokens it spans, never of a
difference of longer sums: a gate of -1000 spoils no digit of the decays after it. Rows past the end
hold gates of 0 and factors of 0.
"""

import triton
import triton.language as tl

from ..configs import gdn as configs
from .gates import LOG2_GATE_FLOOR, LOG2E, beta_bwd, gate_bwd, gate_fwd, log2_gate
from .rows import chunk_position, load_beta

GATE = tl.constexpr(0)  # log gate in base 2
BETA = tl.constexpr(1)  # activated beta
BEFORE = tl.constexpr(2)  # decay from the chunk's start through the token
AFTER = tl.constexpr(3)  # decay after the token to the chunk's end
NORM_Q = tl.constexpr(4)  # reciprocal norms; not there without the L2 norm
NORM_K = tl.constexpr(5)
READ = tl.constexpr(6)  # scale BEFORE NORM_Q: of what q reads from the entering state
ERASE = tl.constexpr(7)  # BEFORE NORM_K: of what k reads from the entering state
WRITE = tl.constexpr(8)  # AFTER NORM_K: of what k writes to the leaving state
PARTS = tl.constexpr(configs.PARTS)

# parts of the gradients `d_tokens` [NK + 1, rows, HV, D_PARTS, BT] fp32: a set for each slab of
# channels, and one for what values make of D_BETA
D_GATE = tl.constexpr(0)  # of the decays a token is in as row, less those as column
D_BETA = tl.constexpr(1)  # of the activated beta
D_WRITE = tl.constexpr(2)  # of its write to the leaving state, times the write
D_PARTS = tl.constexpr(configs.D_PARTS)


@triton.jit
def load_raw(
    g, A_log, dt_bias, i_g, o_g, o_h, m_g, HV,
    USE_GATE: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """Raw gates [BT, BH], A_log and dt_bias [1, BH] of some heads, fp32; 0 where absent."""
    b_x = tl.load(g + i_g + o_g, mask=m_g, other=0.0).to(tl.float32)
    b_a = tl.zeros([1, o_h.shape[0]], dtype=tl.float32)
    b_bias = b_a
    if USE_GATE:
        b_a += tl.load(A_log + o_h, mask=o_h < HV, other=0.0).to(tl.float32)[None, :]
    if HAS_BIAS:
        b_bias += tl.load(dt_bias + o_h, mask=o_h < HV, other=0.0).to(tl.float32)[None, :]
    return b_x, b_a, b_bias


@triton.jit
def load_log2_gate(
    g, A_log, dt_bias, i_g, o_g, o_h, m_g, HV,
    USE_GATE: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """[BT, BH] fp32: log gates in base 2, floored; 0 where masked."""
    b_x, b_a, b_bias = load_raw(g, A_log, dt_bias, i_g, o_g, o_h, m_g, HV, USE_GATE, HAS_BIAS)
    if USE_GATE:
        b_x = gate_fwd(b_x, b_a, b_bias, 0.0, False)
    return tl.where(m_g, log2_gate(b_x), 0.0)


@triton.jit(do_not_specialize=["T", "B", "HV"])
def chunk_gdn_fwd_kernel_gates(
    g,  # [B, T, HV] or None
    beta,  # [B, T, HV]
    A_log,  # [HV] or None
    dt_bias,  # [HV] or None
    tokens,  # [rows, HV, PARTS, BT] fp32, parts GATE to AFTER written
    decay,  # [rows, HV] fp32, written: over whole chunks
    bounds,  # [N+1] int64, read where B is 0
    table,  # [rows, 2] int32, the same
    T,
    B,  # 0: packed sequences
    HV,
    BT: tl.constexpr,
    BH: tl.constexpr,
    USE_G: tl.constexpr,
    USE_GATE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BETA_SIGMOID: tl.constexpr,
    NEG_EIGVAL: tl.constexpr,
):
    """Activations and their sums. One program per (chunk row, BH value heads)."""
    NH = tl.cdiv(HV, BH)
    row, i_b = tl.program_id(0) // NH, tl.program_id(0) % NH
    t0, b_len = chunk_position(bounds, table, row, T, B, BT, B == 0)
    if b_len <= 0:
        return
    o_t = tl.arange(0, BT)
    o_h = i_b * BH + tl.arange(0, BH)
    m_h = o_h < HV
    m_t = (o_t < b_len)[:, None]
    i_g = t0 * HV
    o_g = o_t[:, None] * HV + o_h[None, :]
    b_g = tl.zeros([BT, BH], dtype=tl.float32)
    b_next = b_g
    if USE_G:
        b_g = load_log2_gate(
            g, A_log, dt_bias, i_g, o_g, o_h, m_t & m_h[None, :], HV, USE_GATE, HAS_BIAS
        )
        # gates of the tokens one later: their sums from behind leave a token's own gate out
        m_next = ((o_t + 1 < b_len) & (o_t + 1 < BT))[:, None] & m_h[None, :]
        b_next = load_log2_gate(
            g, A_log, dt_bias, i_g + HV, o_g, o_h, m_next, HV, USE_GATE, HAS_BIAS
        )
    b_beta = load_beta(beta, i_g + o_g, m_t & m_h[None, :], BETA_SIGMOID, NEG_EIGVAL)
    b_before = tl.where(m_t, tl.exp2(tl.cumsum(b_g, 0)), 0.0)
    b_after = tl.where(m_t, tl.exp2(tl.cumsum(b_next, 0, reverse=True)), 0.0)
    o_r = row.to(tl.int64) * HV
    p_x = tokens + o_r * (PARTS * BT) + o_h[None, :] * (PARTS * BT) + o_t[:, None]
    tl.store(p_x + GATE * BT, b_g, mask=m_h[None, :])
    tl.store(p_x + BETA * BT, b_beta, mask=m_h[None, :])
    tl.store(p_x + BEFORE * BT, b_before, mask=m_h[None, :])
    tl.store(p_x + AFTER * BT, b_after, mask=m_h[None, :])
    tl.store(decay + o_r + o_h, tl.exp2(tl.sum(b_g, 0)), mask=m_h)


@triton.jit(do_not_specialize=["T", "B", "HV", "rows"])
def chunk_gdn_bwd_kernel_gates(
    g,  # [B, T, HV] or None
    beta,  # [B, T, HV]
    A_log,  # [HV] or None
    dt_bias,  # [HV] or None
    decay,  # [rows, HV] fp32
    d_tokens,  # [NK + 1, rows, HV, D_PARTS, BT] fp32
    d_states,  # [NK, rows, HV] fp32: <S, dS> of the state that enters and the one that leaves
    dg,  # [B, T, HV] or None, written
    dbeta,  # [B, T, HV], written
    dA_log,  # [rows, HV] fp32 or None: sums over the chunk, written
    ddt_bias,  # [rows, HV] fp32 or None: sums over the chunk, written
    bounds,  # [N+1] int64, read where B is 0
    table,  # [rows, 2] int32, the same
    T,
    B,  # 0: packed sequences
    HV,
    rows,
    BT: tl.constexpr,
    BH: tl.constexpr,
    NK: tl.constexpr,
    USE_G: tl.constexpr,
    USE_GATE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BETA_SIGMOID: tl.constexpr,
    NEG_EIGVAL: tl.constexpr,
):
    """Gradients of gates and beta from their parts. One program per (chunk row, BH value heads)."""
    NH = tl.cdiv(HV, BH)
    row, i_b = tl.program_id(0) // NH, tl.program_id(0) % NH
    t0, b_len = chunk_position(bounds, table, row, T, B, BT, B == 0)
    o_t = tl.arange(0, BT)
    o_h = i_b * BH + tl.arange(0, BH)
    m_h = o_h < HV
    o_r = row.to(tl.int64) * HV
    if b_len <= 0:
        # partial sums of rows that hold no chunk
        if USE_GATE:
            tl.store(dA_log + o_r + o_h, tl.zeros([BH], dtype=tl.float32), mask=m_h)
        if HAS_BIAS:
            tl.store(ddt_bias + o_r + o_h, tl.zeros([BH], dtype=tl.float32), mask=m_h)
        return
    m_g = (o_t < b_len)[:, None] & m_h[None, :]
    i_g = t0 * HV
    o_g = o_t[:, None] * HV + o_h[None, :]
    p_x = d_tokens + o_r * (D_PARTS * BT) + o_h[None, :] * (D_PARTS * BT) + o_t[:, None]
    b_raw = tl.load(beta + i_g + o_g, mask=m_g, other=0.0).to(tl.float32)
    b_zero = tl.zeros([BT, BH], dtype=tl.float32)
    b_db, b_own, b_written = b_zero, b_zero, b_zero
    b_states = tl.zeros([BH], dtype=tl.float32)
    for i_s in tl.static_range(NK + 1):
        i_set = i_s * rows.to(tl.int64) * HV
        p_s = p_x + i_set * (D_PARTS * BT)
        b_db += tl.load(p_s + D_BETA * BT, mask=m_g, other=0.0)
        if USE_G and i_s < NK:
            b_own += tl.load(p_s + D_GATE * BT, mask=m_g, other=0.0)
            b_written += tl.load(p_s + D_WRITE * BT - 1, mask=m_g & (o_t > 0)[:, None], other=0.0)
            b_states += tl.load(d_states + i_set + o_r + o_h, mask=m_h, other=0.0)
    b_db = beta_bwd(b_db, b_raw, BETA_SIGMOID, NEG_EIGVAL)
    tl.store(dbeta + i_g + o_g, b_db.to(dbeta.dtype.element_ty), mask=m_g)
    if USE_G:
        # what a token's gate does to the leaving state: it decays what came before it. The total
        # minus a suffix sum would cancel
        b_dg = tl.cumsum(b_own, 0, reverse=True) + tl.cumsum(b_written, 0)
        b_dg += (b_states * tl.load(decay + o_r + o_h, mask=m_h, other=0.0))[None, :]
        b_x, b_a, b_bias = load_raw(g, A_log, dt_bias, i_g, o_g, o_h, m_g, HV, USE_GATE, HAS_BIAS)
        if USE_GATE:
            b_dg, b_da = gate_bwd(b_dg, b_x, b_a, b_bias, 0.0, False)
            tl.store(dA_log + o_r + o_h, tl.sum(tl.where(m_g, b_da, 0.0), 0), mask=m_h)
            if HAS_BIAS:
                tl.store(ddt_bias + o_r + o_h, tl.sum(tl.where(m_g, b_dg, 0.0), 0), mask=m_h)
        else:
            # a gate at its floor has no slope
            b_dg = tl.where(b_x * LOG2E > LOG2_GATE_FLOOR, b_dg, 0.0)
        tl.store(dg + i_g + o_g, b_dg.to(dg.dtype.element_ty), mask=m_g)


@triton.jit
def pair_decays(p_gate, m_pair, BT: tl.constexpr, USE_G: tl.constexpr):
    """[BT, BT] fp32: the decay from token j to token i >= j where m_pair holds, else 0.

    p_gate: the line GATE of `tokens`. Running sums down the columns of a matrix whose column j
    holds the gates after token j.
    """
    if USE_G:
        o_t = tl.arange(0, BT)
        m_after = o_t[:, None] > o_t[None, :]
        b_g = tl.load(p_gate + o_t)
        b_sum = tl.cumsum(tl.where(m_after, b_g[:, None], 0.0), 0)
        return tl.where(m_pair, tl.exp2(b_sum), 0.0)
    else:
        return tl.where(m_pair, 1.0, 0.0)


@triton.jit
def states_product(x, y, base, o_k, m_k, V: tl.constexpr, BV: tl.constexpr):
    """<X, Y> over the channels o_k of two states [K, V] that start at x + base and y + base.

    By loads of its own. Of a load that is summed up as well as multiplied, in a loop of several
    stages, triton 3.6 and 3.7 fetch the next tile into the place of one that a product still reads.
    """
    b_sum = 0.0
    for i_v in range(0, V, BV):
        o_v = i_v + tl.arange(0, BV)
        o_S = base + o_k[:, None] * V + o_v[None, :]
        m_S = m_k[:, None] & (o_v < V)[None, :]
        b_x = tl.load(x + o_S, mask=m_S, other=0.0).to(tl.float32)
        b_sum += tl.sum(b_x * tl.load(y + o_S, mask=m_S, other=0.0).to(tl.float32))
    return b_sum
