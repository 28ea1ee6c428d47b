"""Gradients within one chunk of KDA, given the states and their gradients (notation of intra.py and
scan.py).

S enters the chunk, dS is the gradient of the state that leaves it. Through the state and the
inverse, with V' = A R, R = beta (v - (k exp2(G)) S) and dR = A^T dV':

    dL   = -dR V'^T, strictly lower: -A^T (dV' R^T) A^T        dAqk = do V'^T, lower
    dq  += scale exp2(G) do S^T                                dv = beta dR
    dk_erase = -beta exp2(G) dR S^T                            dk_write = exp2(G_last - G) V' dS^T

and through the pairs, level by level with the factors X of pairs.py (rows i, columns j <= i):

    dq_i += X_i sum_j dAqk_ij k_j X_j        dk_erase_i += beta_i X_i sum_j dL_ij k_j X_j
    dk_write_j += X_j (sum_i dAqk_ij q_i X_i + sum_i dL_ij beta_i k_i X_i)

The gate of a token reaches every pair that straddles it: its gradient is the suffix sum over the
chunk of q dq + k (dk_erase - dk_write), plus <exp2(G_last) S, dS> + sum_j k_j dk_write_j of the
leaving state. All terms come from the very products that make dq and dk, rounded operands included,
so that pairs which lie wholly after a token cancel to fp32 accuracy.
"""

import triton
import triton.language as tl

from .gates import beta_bwd, gate_bwd, l2norm_bwd
from .pairs import (
    BLOCK_SUM,
    CENTRE,
    PREFIX_SUM,
    SUFFIX_SUM,
    block_mask,
    level_mask,
    split_gate,
    sum_gates,
)
from .rows import chunk_position, load_beta, load_gate, load_raw_gate, reciprocal_norm


@triton.jit(do_not_specialize=["scale", "T", "B", "HV", "part"])
def chunk_kda_bwd_kernel_values(
    v,  # [B, T, HV, V]
    beta,  # [B, T, HV]
    A,  # [B, T, HV, BT]
    v_new,  # [B, T, HV, V]
    do,  # [B, T, HV, V] or None
    dv_new,  # [B, T, HV, V]
    dR,  # [B, T, HV, V], written; may be dv_new itself
    dv,  # [B, T, HV, V], written
    dA_qk,  # [B, T, HV, BT], written with HAS_DO
    dL,  # [B, T, HV, BT], written
    dbeta,  # [parts, B, T, HV] fp32, the one at `part` written: through beta v
    bounds,  # [N+1] int64, read where B is 0
    table,  # [rows, 2] int32, the same
    scale,
    T,
    B,  # 0: packed sequences
    HV,
    part,
    V: tl.constexpr,
    BT: tl.constexpr,
    BV: tl.constexpr,
    HAS_DO: tl.constexpr,
    BETA_SIGMOID: tl.constexpr,
    NEG_EIGVAL: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """dR, dv, gradients of the two pair matrices. One program per (chunk row, value head)."""
    row, i_hv = tl.program_id(0) // HV, tl.program_id(0) % HV
    t0, b_len = chunk_position(bounds, table, row, T, B, BT, B == 0)
    if b_len <= 0:
        return
    o_t = tl.arange(0, BT)
    m_t = o_t < b_len
    o_hv = (t0 + o_t) * HV + i_hv
    dtype = v.dtype.element_ty

    b_beta = load_beta(beta, o_hv, m_t, BETA_SIGMOID, NEG_EIGVAL)
    p_A = o_hv[:, None] * BT + o_t[None, :]
    b_AT = tl.trans(tl.load(A + p_A, mask=m_t[:, None], other=0.0))
    b_dAqk = tl.zeros([BT, BT], dtype=tl.float32)
    b_dL = tl.zeros([BT, BT], dtype=tl.float32)
    b_db = tl.zeros([BT], dtype=tl.float32)
    for i_v in range(0, V, BV):
        o_v = i_v + tl.arange(0, BV)
        p_tv = o_hv[:, None] * V + o_v[None, :]
        m_tv = m_t[:, None] & (o_v < V)[None, :]
        b_dvn = tl.load(dv_new + p_tv, mask=m_tv, other=0.0)
        b_v = tl.load(v + p_tv, mask=m_tv, other=0.0).to(tl.float32)
        b_vn = tl.trans(tl.load(v_new + p_tv, mask=m_tv, other=0.0))
        b_dR = tl.dot(b_AT, b_dvn, input_precision=PRECISION)
        tl.store(dv + p_tv, (b_dR * b_beta[:, None]).to(dv.dtype.element_ty), mask=m_tv)
        b_db += tl.sum(b_dR * b_v, 1)
        b_dRd = b_dR.to(dtype)
        tl.store(dR + p_tv, b_dRd, mask=m_tv)
        b_dL = tl.dot(b_dRd, b_vn, b_dL, input_precision=PRECISION)
        if HAS_DO:
            b_do = tl.load(do + p_tv, mask=m_tv, other=0.0)
            b_dAqk = tl.dot(b_do, b_vn, b_dAqk, input_precision=PRECISION)
    p_dbeta = dbeta + part.to(tl.int64) * tl.maximum(B, 1) * T * HV + o_hv
    tl.store(p_dbeta, b_db, mask=m_t)
    b_dL = tl.where(o_t[:, None] > o_t[None, :], -b_dL, 0.0)
    tl.store(dL + p_A, b_dL.to(dtype), mask=m_t[:, None])
    if HAS_DO:
        b_dAqk = tl.where(o_t[:, None] >= o_t[None, :], b_dAqk * scale, 0.0)
        tl.store(dA_qk + p_A, b_dAqk.to(dtype), mask=m_t[:, None])


@triton.jit
def pair_gradients(
    b_q, b_k, b_beta, b_row, b_col, dA_qk, dL, p_A, m_t, b_dq, b_de, b_dw, b_dG,
    m_qk, m_kk, HAS_DO: tl.constexpr, PRECISION: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Adds the gradients of one group of pairs; b_row, b_col [BT, BK] are the factors of rows and
    columns.

    The pair gradients are read anew for every group: the masks differ, and registers are short.
    """
    b_y = (b_k * b_row * b_beta[:, None]).to(DTYPE)
    b_z = (b_k * b_col).to(DTYPE)
    b_zero = tl.zeros([1, 1], dtype=DTYPE)
    b_R = tl.where(m_kk, tl.load(dL + p_A, mask=m_t[:, None], other=0.0), b_zero)
    b_rk = tl.dot(b_R, b_z, input_precision=PRECISION)
    b_c = tl.dot(tl.trans(b_R), b_y, input_precision=PRECISION)
    b_de += b_row * b_rk
    b_dG += b_y.to(tl.float32) * b_rk
    if HAS_DO:
        b_x = (b_q * b_row).to(DTYPE)
        b_P = tl.where(m_qk, tl.load(dA_qk + p_A, mask=m_t[:, None], other=0.0), b_zero)
        b_rq = tl.dot(b_P, b_z, input_precision=PRECISION)
        b_c = tl.dot(tl.trans(b_P), b_x, b_c, input_precision=PRECISION)
        b_dq += b_row * b_rq
        b_dG += b_x.to(tl.float32) * b_rq
    b_dw += b_col * b_c
    b_dG -= b_z.to(tl.float32) * b_c
    return b_dq, b_de, b_dw, b_dG


@triton.jit(do_not_specialize=["scale", "lower_bound", "T", "B", "H", "HV"])
def chunk_kda_bwd_kernel_intra(
    q,  # [B, T, H, K]
    k,  # [B, T, H, K]
    g,  # [B, T, HV, K]
    beta,  # [B, T, HV]
    A_log,  # [HV] or None
    dt_bias,  # [HV, K] or None
    sums,  # [9, BT, BT], see pairs.sum_gates
    v_new,  # [B, T, HV, V]
    h,  # [rows, HV, K, V]
    do,  # [B, T, HV, V] or None
    dR,  # [B, T, HV, V]
    dh,  # [rows, HV, K, V]
    dA_qk,  # [B, T, HV, BT] or None
    dL,  # [B, T, HV, BT]
    dq,  # [B, T, HV, K], written
    dk,  # [B, T, HV, K], written
    dg,  # [B, T, HV, K], written
    dbeta,  # [NK, B, T, HV] fp32, written: the part of each slab of channels
    dA_log,  # [rows, HV, NK] fp32 or None: sums over the chunk, written
    ddt_bias,  # [rows, HV, K] fp32 or None: sums over the chunk, written
    bounds,  # [N+1] int64, read where B is 0
    table,  # [rows, 2] int32, the same
    scale,
    lower_bound,
    T,
    B,  # 0: packed sequences
    H,
    HV,
    K: tl.constexpr,
    V: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    HAS_DO: tl.constexpr,
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
    STATE_DTYPE: tl.constexpr,
):
    """dq, dk (of the normalised rows), dg, dbeta.

    One program per (chunk row, value head, slab of BK channels).
    """
    NK: tl.constexpr = (K + BK - 1) // BK
    i_s = tl.program_id(0) % NK
    i_r = tl.program_id(0) // NK
    row, i_hv = i_r // HV, i_r % HV
    i_h = i_hv // (HV // H)
    t0, b_len = chunk_position(bounds, table, row, T, B, BT, B == 0)
    o_r = row.to(tl.int64) * HV + i_hv
    o_k = i_s * BK + tl.arange(0, BK)
    m_k = o_k < K
    if b_len <= 0:
        # partial sums of rows that hold no chunk
        if HAS_A_LOG:
            tl.store(dA_log + o_r * NK + i_s, 0.0)
        if HAS_BIAS:
            tl.store(ddt_bias + o_r * K + o_k, tl.zeros([BK], dtype=tl.float32), mask=m_k)
        return
    o_t = tl.arange(0, BT)
    m_t = o_t < b_len
    m_tk = m_t[:, None] & m_k[None, :]
    o_hv = (t0 + o_t) * HV + i_hv
    o_qk = ((t0 + o_t) * H + i_h) * K
    p_gk = o_hv[:, None] * K + o_k[None, :]
    dtype = q.dtype.element_ty

    b_beta = load_beta(beta, o_hv, m_t, BETA_SIGMOID, NEG_EIGVAL)
    b_rq = reciprocal_norm(q, o_qk, m_t, K, BT, BK, USE_L2NORM)
    b_rk = reciprocal_norm(k, o_qk, m_t, K, BT, BK, USE_L2NORM)

    # through the states
    b_dq = tl.zeros([BT, BK], dtype=tl.float32)
    b_de = tl.zeros([BT, BK], dtype=tl.float32)
    b_dw = tl.zeros([BT, BK], dtype=tl.float32)
    b_dlast = tl.zeros([BK], dtype=tl.float32)
    for i_v in range(0, V, BV):
        o_v = i_v + tl.arange(0, BV)
        p_tv = o_hv[:, None] * V + o_v[None, :]
        m_tv = m_t[:, None] & (o_v < V)[None, :]
        p_S = o_r * K * V + o_k[:, None] * V + o_v[None, :]
        m_S = m_k[:, None] & (o_v < V)[None, :]
        b_S = tl.load(h + p_S, mask=m_S, other=0.0)
        b_dS = tl.load(dh + p_S, mask=m_S, other=0.0)
        b_dlast += tl.sum(b_S.to(tl.float32) * b_dS.to(tl.float32), 1)
        b_S = tl.trans(b_S.to(STATE_DTYPE))
        b_dS = tl.trans(b_dS.to(STATE_DTYPE))
        b_dR = tl.load(dR + p_tv, mask=m_tv, other=0.0).to(STATE_DTYPE)
        b_vn = tl.load(v_new + p_tv, mask=m_tv, other=0.0).to(STATE_DTYPE)
        b_de = tl.dot(b_dR, b_S, b_de, input_precision=PRECISION)
        b_dw = tl.dot(b_vn, b_dS, b_dw, input_precision=PRECISION)
        if HAS_DO:
            b_do = tl.load(do + p_tv, mask=m_tv, other=0.0).to(STATE_DTYPE)
            b_dq = tl.dot(b_do, b_S, b_dq, input_precision=PRECISION)

    b_q = tl.load(q + o_qk[:, None] + o_k[None, :], mask=m_tk, other=0.0).to(tl.float32)
    b_k = tl.load(k + o_qk[:, None] + o_k[None, :], mask=m_tk, other=0.0).to(tl.float32)
    b_q *= b_rq[:, None]
    b_k *= b_rk[:, None]
    b_g = load_gate(
        g, A_log, dt_bias, o_hv * K, o_k, m_tk, i_hv, lower_bound, K,
        USE_GATE, HAS_A_LOG, HAS_BIAS, HAS_BOUND,
    )  # fmt: skip
    b_high, b_low = split_gate(b_g, SPLIT)
    b_eG = tl.exp2(sum_gates(sums, PREFIX_SUM, b_high, b_low, BT, SPLIT))
    # dk_erase / beta: its product with k is the gradient of beta
    b_de *= -b_eG
    b_dw *= tl.exp2(sum_gates(sums, SUFFIX_SUM, b_high, b_low, BT, SPLIT))
    b_dq *= b_eG * scale
    b_dG = b_q * b_dq + b_k * b_de * b_beta[:, None]
    # what a token's gate does to the state that leaves: it decays the tokens before it
    b_written = b_k * b_dw
    b_leaving = (b_dlast * tl.exp2(tl.sum(b_g, 0)))[None, :]
    if PRECISION == "tf32x3":
        m_before = (o_t[:, None] > o_t[None, :]).to(tl.float32)
        b_leaving += tl.dot(m_before, b_written, input_precision=PRECISION)
    else:
        # the total minus a suffix sum cancels to fp32, which is enough beside 16-bit products
        b_leaving += tl.sum(b_written, 0)[None, :]
        b_dG -= b_written

    # through the pairs
    p_A = o_hv[:, None] * BT + o_t[None, :]
    for i_l in tl.static_range(6):
        if 32 >> i_l >= 16 or not BOUNDED:
            b_x = tl.exp2(sum_gates(sums, i_l, b_high, b_low, BT, SPLIT))
            m_pair = level_mask(32 >> i_l, BT)
            b_dq, b_de, b_dw, b_dG = pair_gradients(
                b_q, b_k, b_beta, b_x, b_x, dA_qk, dL, p_A, m_t,
                b_dq, b_de, b_dw, b_dG, m_pair, m_pair, HAS_DO, PRECISION, dtype,
            )  # fmt: skip
    if BOUNDED:
        b_e = sum_gates(sums, BLOCK_SUM, b_high, b_low, BT, SPLIT) + CENTRE
        m_pair = block_mask(16, BT)
        m_lower = m_pair & (o_t[:, None] > o_t[None, :])
        b_dq, b_de, b_dw, b_dG = pair_gradients(
            b_q, b_k, b_beta, tl.exp2(b_e), tl.exp2(-b_e), dA_qk, dL, p_A, m_t,
            b_dq, b_de, b_dw, b_dG, m_pair, m_lower, HAS_DO, PRECISION, dtype,
        )  # fmt: skip
    elif HAS_DO:
        p_diagonal = dA_qk + o_hv * BT + o_t
        b_d = tl.load(p_diagonal, mask=m_t, other=0.0).to(tl.float32)[:, None]
        b_dq += b_d * b_k
        b_dw += b_d * b_q

    tl.store(dq + p_gk, b_dq.to(dq.dtype.element_ty), mask=m_tk)
    b_dk = b_de * b_beta[:, None] + b_dw
    tl.store(dk + p_gk, b_dk.to(dk.dtype.element_ty), mask=m_tk)
    p_dbeta = dbeta + i_s.to(tl.int64) * tl.maximum(B, 1) * T * HV + o_hv
    tl.store(p_dbeta, tl.sum(b_k * b_de, 1), mask=m_t)

    b_dG = tl.cumsum(b_dG, 0, reverse=True) + b_leaving
    if USE_GATE:
        b_x, b_a, b_bias = load_raw_gate(
            g, A_log, dt_bias, o_hv * K, o_k, m_tk, i_hv, K, HAS_A_LOG, HAS_BIAS
        )
        b_dG, b_da = gate_bwd(b_dG, b_x, b_a, b_bias, lower_bound, HAS_BOUND)
        if HAS_A_LOG:
            tl.store(dA_log + o_r * NK + i_s, tl.sum(tl.where(m_tk, b_da, 0.0)))
        if HAS_BIAS:
            b_sum = tl.sum(tl.where(m_tk, b_dG, 0.0), 0)
            tl.store(ddt_bias + o_r * K + o_k, b_sum, mask=m_k)
    tl.store(dg + p_gk, b_dG.to(dg.dtype.element_ty), mask=m_tk)


@triton.jit(do_not_specialize=["n"])
def kda_bwd_kernel_beta(
    beta,  # [n] raw
    parts,  # [PARTS, n] fp32: gradient of the activated beta, in parts
    dbeta,  # [n], written
    n,
    PARTS: tl.constexpr,
    BN: tl.constexpr,
    BETA_SIGMOID: tl.constexpr,
    NEG_EIGVAL: tl.constexpr,
):
    """Sums the parts and goes through the activation of beta."""
    o_n = tl.program_id(0).to(tl.int64) * BN + tl.arange(0, BN)
    m_n = o_n < n
    b_db = tl.zeros([BN], dtype=tl.float32)
    for i_p in tl.static_range(PARTS):
        b_db += tl.load(parts + i_p * n.to(tl.int64) + o_n, mask=m_n, other=0.0)
    b_raw = tl.load(beta + o_n, mask=m_n, other=0.0).to(tl.float32)
    b_db = beta_bwd(b_db, b_raw, BETA_SIGMOID, NEG_EIGVAL)
    tl.store(dbeta + o_n, b_db.to(dbeta.dtype.element_ty), mask=m_n)


@triton.jit(do_not_specialize=["tokens", "H", "HV"])
def kda_bwd_kernel_qk(
    x,  # [tokens, H, K]: q or k
    dy,  # [tokens, HV, K] fp32: gradient of the normalised rows, per value head
    dx,  # [tokens, H, K], written
    tokens,
    H,
    HV,
    K: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    USE_L2NORM: tl.constexpr,
):
    """Sums over the value heads of a group in fp32, then through the L2 norm. BN rows a program."""
    o_n = tl.program_id(0).to(tl.int64) * BN + tl.arange(0, BN)
    m_n = o_n < tokens * H
    o_k = tl.arange(0, BK)
    m_nk = m_n[:, None] & (o_k < K)[None, :]
    G = HV // H
    b_dy = tl.zeros([BN, BK], dtype=tl.float32)
    for i_g in range(0, G):
        o_y = ((o_n // H) * HV + (o_n % H) * G + i_g) * K
        b_dy += tl.load(dy + o_y[:, None] + o_k[None, :], mask=m_nk, other=0.0).to(tl.float32)
    p_x = o_n[:, None] * K + o_k[None, :]
    if USE_L2NORM:
        b_x = tl.load(x + p_x, mask=m_nk, other=0.0).to(tl.float32)
        b_dy = l2norm_bwd(b_dy, b_x, 1)
    tl.store(dx + p_x, b_dy.to(dx.dtype.element_ty), mask=m_nk)
