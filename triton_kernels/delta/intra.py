"""Within one chunk of KDA: gates, pair matrices, triangular inverse, WY factors.

With G the in-chunk inclusive sum of the log gate (base 2), kb = beta k exp2(G), for rows i and
columns j:

    L_ij   = beta_i sum_d k_id k_jd exp2(G_id - G_jd),   i > j        A = (I + L)^-1
    Aqk_ij = scale  sum_d q_id k_jd exp2(G_id - G_jd),   i >= j
    W = A kb      U = A (beta v)      qg = scale q exp2(G)      kg = k exp2(G_last - G)
"""

import triton
import triton.language as tl

from .gates import L2NORM_EPS
from .pairs import (
    BLOCK_SUM,
    CENTRE,
    PREFIX_SUM,
    SUFFIX_SUM,
    block_mask,
    level_mask,
    split_gate,
    sum_gates,
    unit_lower_inverse,
)
from .rows import chunk_position, load_beta, load_gate, reciprocal_norm


@triton.jit
def add_pairs(
    b_q, b_k, b_row, b_col, b_Aqk, b_L, m_qk, m_kk, PRECISION: tl.constexpr, DTYPE: tl.constexpr
):
    """Adds one group of pairs; b_row, b_col [BT, BK] are the factors of rows and columns."""
    b_z = tl.trans((b_k * b_col).to(DTYPE))
    b_p = tl.dot((b_q * b_row).to(DTYPE), b_z, input_precision=PRECISION)
    b_Aqk += tl.where(m_qk, b_p, 0.0)
    b_p = tl.dot((b_k * b_row).to(DTYPE), b_z, input_precision=PRECISION)
    b_L += tl.where(m_kk, b_p, 0.0)
    return b_Aqk, b_L


@triton.jit(do_not_specialize=["scale", "lower_bound", "T", "B", "H", "HV", "row0"])
def chunk_kda_fwd_kernel_pairs(
    q,  # [B, T, H, K]
    k,  # [B, T, H, K]
    g,  # [B, T, HV, K]
    beta,  # [B, T, HV]
    A_log,  # [HV] or None
    dt_bias,  # [HV, K] or None
    sums,  # [9, BT, BT] fp16 or fp32, see pairs.sum_gates
    A,  # [B, T, HV, BT], written
    A_qk,  # [B, T, HV, BT], written
    bounds,  # [N+1] int64, read where B is 0
    table,  # [rows, 2] int32, the same
    scale,
    lower_bound,
    T,
    B,  # 0: packed sequences
    H,
    HV,
    row0,
    K: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
    USE_GATE: tl.constexpr,
    HAS_A_LOG: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_BOUND: tl.constexpr,
    USE_L2NORM: tl.constexpr,
    BETA_SIGMOID: tl.constexpr,
    NEG_EIGVAL: tl.constexpr,
    BOUNDED: tl.constexpr,
    SPLIT: tl.constexpr,
    PRECISION: tl.constexpr,
    INVERSE_DTYPE: tl.constexpr,
):
    """A and A_qk. One program per (chunk row, value head); K is walked in slabs of BK."""
    row, i_hv = row0 + tl.program_id(0) // HV, tl.program_id(0) % HV
    i_h = i_hv // (HV // H)
    t0, b_len = chunk_position(bounds, table, row, T, B, BT, B == 0)
    if b_len <= 0:
        return
    o_t = tl.arange(0, BT)
    m_t = o_t < b_len
    o_hv = (t0 + o_t) * HV + i_hv
    o_qk = ((t0 + o_t) * H + i_h) * K
    dtype = q.dtype.element_ty

    b_beta = load_beta(beta, o_hv, m_t, BETA_SIGMOID, NEG_EIGVAL)
    b_rq = tl.zeros([BT], dtype=tl.float32)
    b_rk = tl.zeros([BT], dtype=tl.float32)
    b_d = tl.zeros([BT], dtype=tl.float32)
    b_Aqk = tl.zeros([BT, BT], dtype=tl.float32)
    b_L = tl.zeros([BT, BT], dtype=tl.float32)
    for i_k in range(0, K, BK):
        o_k = i_k + tl.arange(0, BK)
        m_tk = m_t[:, None] & (o_k < K)[None, :]
        b_q = tl.load(q + o_qk[:, None] + o_k[None, :], mask=m_tk, other=0.0).to(tl.float32)
        b_k = tl.load(k + o_qk[:, None] + o_k[None, :], mask=m_tk, other=0.0).to(tl.float32)
        b_g = load_gate(
            g, A_log, dt_bias, o_hv * K, o_k, m_tk, i_hv, lower_bound, K,
            USE_GATE, HAS_A_LOG, HAS_BIAS, HAS_BOUND,
        )  # fmt: skip
        b_high, b_low = split_gate(b_g, SPLIT)
        if USE_L2NORM:
            b_rq += tl.sum(b_q * b_q, 1)
            b_rk += tl.sum(b_k * b_k, 1)
        for i_l in tl.static_range(6):
            if 32 >> i_l >= 16 or not BOUNDED:
                b_x = tl.exp2(sum_gates(sums, i_l, b_high, b_low, BT, SPLIT))
                m_pair = level_mask(32 >> i_l, BT)
                b_Aqk, b_L = add_pairs(
                    b_q, b_k, b_x, b_x, b_Aqk, b_L, m_pair, m_pair, PRECISION, dtype
                )
        if BOUNDED:
            b_e = sum_gates(sums, BLOCK_SUM, b_high, b_low, BT, SPLIT) + CENTRE
            m_pair = block_mask(16, BT)
            b_Aqk, b_L = add_pairs(
                b_q, b_k, tl.exp2(b_e), tl.exp2(-b_e), b_Aqk, b_L,
                m_pair, m_pair & (o_t[:, None] > o_t[None, :]), PRECISION, dtype,
            )  # fmt: skip
        else:
            b_d += tl.sum(b_q * b_k, 1)

    # the row norms of q and k are factors of whole rows and columns
    if not BOUNDED:
        b_Aqk += tl.where(o_t[:, None] == o_t[None, :], b_d[:, None], 0.0)
    if USE_L2NORM:
        b_rq = tl.rsqrt(b_rq + L2NORM_EPS)
        b_rk = tl.rsqrt(b_rk + L2NORM_EPS)
        b_Aqk *= b_rq[:, None] * b_rk[None, :]
        b_L *= b_rk[:, None] * b_rk[None, :]
    p_A = o_hv[:, None] * BT + o_t[None, :]
    tl.store(A_qk + p_A, (b_Aqk * scale).to(dtype), mask=m_t[:, None])
    b_A = unit_lower_inverse(b_L * b_beta[:, None], BT, INVERSE_DTYPE)
    tl.store(A + p_A, b_A.to(dtype), mask=m_t[:, None])


@triton.jit(do_not_specialize=["scale", "lower_bound", "T", "B", "H", "HV", "row0"])
def chunk_kda_fwd_kernel_wy(
    q,  # [B, T, H, K]
    k,  # [B, T, H, K]
    v,  # [B, T, HV, V]
    g,  # [B, T, HV, K]
    beta,  # [B, T, HV]
    A_log,  # [HV] or None
    dt_bias,  # [HV, K] or None
    sums,  # [9, BT, BT] fp16 or fp32, see pairs.sum_gates
    A,  # [B, T, HV, BT]
    w,  # [rows', HV, BT, K], written
    u,  # [B, T, HV, V], written
    qg,  # [rows', HV, BT, K], written
    kg,  # [rows', HV, BT, K], written
    decay,  # [rows', HV, K] fp32, written: exp2(G_last)
    bounds,  # [N+1] int64, read where B is 0
    table,  # [rows, 2] int32, the same
    scale,
    lower_bound,
    T,
    B,  # 0: packed sequences
    H,
    HV,
    row0,
    K: tl.constexpr,
    V: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    USE_GATE: tl.constexpr,
    HAS_A_LOG: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_BOUND: tl.constexpr,
    USE_L2NORM: tl.constexpr,
    BETA_SIGMOID: tl.constexpr,
    NEG_EIGVAL: tl.constexpr,
    SPLIT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """W, U, qg, kg.

    One program per (chunk row, value head, slab); slabs of K come first, then those of V.
    """
    NK: tl.constexpr = (K + BK - 1) // BK
    NV: tl.constexpr = (V + BV - 1) // BV
    i_s = tl.program_id(0) % (NK + NV)
    i_r = tl.program_id(0) // (NK + NV)
    i_local, i_hv = i_r // HV, i_r % HV
    i_h = i_hv // (HV // H)
    t0, b_len = chunk_position(bounds, table, row0 + i_local, T, B, BT, B == 0)
    if b_len <= 0:
        return
    o_t = tl.arange(0, BT)
    m_t = o_t < b_len
    o_hv = (t0 + o_t) * HV + i_hv
    dtype = q.dtype.element_ty
    p_A = A + o_hv[:, None] * BT + o_t[None, :]
    b_A = tl.load(p_A, mask=m_t[:, None], other=0.0)
    b_beta = load_beta(beta, o_hv, m_t, BETA_SIGMOID, NEG_EIGVAL)
    if i_s >= NK:
        o_v = (i_s - NK) * BV + tl.arange(0, BV)
        m_tv = m_t[:, None] & (o_v < V)[None, :]
        p_tv = o_hv[:, None] * V + o_v[None, :]
        b_v = tl.load(v + p_tv, mask=m_tv, other=0.0).to(tl.float32)
        b_u = tl.dot(b_A, (b_v * b_beta[:, None]).to(dtype), input_precision=PRECISION)
        tl.store(u + p_tv, b_u.to(dtype), mask=m_tv)
    else:
        o_k = i_s * BK + tl.arange(0, BK)
        m_k = o_k < K
        m_tk = m_t[:, None] & m_k[None, :]
        o_qk = ((t0 + o_t) * H + i_h) * K
        b_q = tl.load(q + o_qk[:, None] + o_k[None, :], mask=m_tk, other=0.0).to(tl.float32)
        b_k = tl.load(k + o_qk[:, None] + o_k[None, :], mask=m_tk, other=0.0).to(tl.float32)
        b_g = load_gate(
            g, A_log, dt_bias, o_hv * K, o_k, m_tk, i_hv, lower_bound, K,
            USE_GATE, HAS_A_LOG, HAS_BIAS, HAS_BOUND,
        )  # fmt: skip
        b_rq = reciprocal_norm(q, o_qk, m_t, K, BT, BK, USE_L2NORM)
        b_rk = reciprocal_norm(k, o_qk, m_t, K, BT, BK, USE_L2NORM)
        b_high, b_low = split_gate(b_g, SPLIT)
        b_k *= b_rk[:, None]
        b_eG = tl.exp2(sum_gates(sums, PREFIX_SUM, b_high, b_low, BT, SPLIT))
        b_eE = tl.exp2(sum_gates(sums, SUFFIX_SUM, b_high, b_low, BT, SPLIT))
        b_kb = (b_k * b_beta[:, None] * b_eG).to(dtype)
        b_w = tl.dot(b_A, b_kb, input_precision=PRECISION)
        # stores last: a product waits for every store before it
        o_w = (i_local.to(tl.int64) * HV + i_hv) * K
        p_ws = (o_w * BT + o_t * K)[:, None] + o_k[None, :]
        tl.store(qg + p_ws, (b_q * (b_rq * scale)[:, None] * b_eG).to(dtype), mask=m_k[None, :])
        tl.store(kg + p_ws, (b_k * b_eE).to(dtype), mask=m_k[None, :])
        tl.store(w + p_ws, b_w.to(dtype), mask=m_k[None, :])
        tl.store(decay + o_w + o_k, tl.exp2(tl.sum(b_g, 0)), mask=m_k)
