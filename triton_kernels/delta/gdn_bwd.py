"""Gradients within one chunk of the delta families with a scalar gate or none, given the states and
their gradients (notation of gdn_intra.py and gdn_scan.py, q and k normalised, d_ij the decay from j
to i).

    Mqk_ij = scale d_ij do_i . V'_j, j <= i         dq_i = sum_j Mqk_ij k_j + scale 2^G do_i S^T
    Mkk_ij = -d_ij dR_i . V'_j, j < i               de_i = sum_j Mkk_ij k_j - 2^G dR_i S^T
    dk_j = beta_j de_j + sum_i Mqk_ij q_i + sum_i beta_i Mkk_ij k_i + 2^(G_last - G) V'_j dS^T
    dv = beta dR                                    dbeta = dR . v + k . de

(the gradient of the inverse, -A^T (dV' R^T) A^T, is -dR V'^T). The gate of a token reaches every
pair that straddles it, every later read of the entering state and every earlier write to the
leaving one: its gradient is the suffix sum over the chunk of q dq + beta k de - k (what pairs give
dk as a column), plus the exclusive prefix sum of k dk_write, plus <2^G_last S, dS>: sums that
scalar.py takes. All terms come from the very products that make dq and dk, rounded operands
included, so that pairs which lie wholly after a token cancel to fp32 accuracy.
"""

import triton
import triton.language as tl

from .rows import chunk_position
from .scalar import (
    AFTER,
    BEFORE,
    BETA,
    D_BETA,
    D_GATE,
    D_PARTS,
    D_WRITE,
    GATE,
    NORM_K,
    NORM_Q,
    PARTS,
    pair_decays,
    states_product,
)


@triton.jit(do_not_specialize=["scale", "T", "B", "HV", "rows"])
def chunk_gdn_bwd_kernel_values(
    v,  # [B, T, HV, V]
    tokens,  # [rows, HV, PARTS, BT] fp32
    v_new,  # [B, T, HV, V]
    do,  # [B, T, HV, V] or None
    dR,  # [B, T, HV, V]
    dv,  # [B, T, HV, V], written
    M_qk,  # [B, T, HV, BT], written with HAS_DO
    M_kk,  # [B, T, HV, BT], written
    d_tokens,  # [NK + 1, rows, HV, D_PARTS, BT] fp32, of the last D_BETA written: through beta v
    bounds,  # [N+1] int64, read where B is 0
    table,  # [rows, 2] int32, the same
    scale,
    T,
    B,  # 0: packed sequences
    HV,
    rows,
    V: tl.constexpr,
    BT: tl.constexpr,
    BV: tl.constexpr,
    NK: tl.constexpr,
    HAS_DO: tl.constexpr,
    USE_G: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """dv and the matrices of the pairs. One program per (chunk row, value head)."""
    row, i_hv = tl.program_id(0) // HV, tl.program_id(0) % HV
    t0, b_len = chunk_position(bounds, table, row, T, B, BT, B == 0)
    if b_len <= 0:
        return
    o_r = row.to(tl.int64) * HV + i_hv
    o_t = tl.arange(0, BT)
    m_t = o_t < b_len
    # offsets within a chunk in 32 bits, on a base that a scalar holds
    i_thv = t0 * HV + i_hv
    dtype = v.dtype.element_ty

    p_x = tokens + o_r * (PARTS * BT)
    b_beta = tl.load(p_x + BETA * BT + o_t)
    b_Mkk = tl.zeros([BT, BT], dtype=tl.float32)
    b_Mqk = tl.zeros([BT, BT], dtype=tl.float32)
    b_dbeta = tl.zeros([BT], dtype=tl.float32)
    for i_v in range(0, V, BV):
        o_v = i_v + tl.arange(0, BV)
        o_tv = o_t[:, None] * (HV * V) + o_v[None, :]
        m_tv = m_t[:, None] & (o_v < V)[None, :]
        b_vn = tl.trans(tl.load(v_new + i_thv * V + o_tv, mask=m_tv, other=0.0))
        b_dR = tl.load(dR + i_thv * V + o_tv, mask=m_tv, other=0.0)
        b_v = tl.load(v + i_thv * V + o_tv, mask=m_tv, other=0.0).to(tl.float32)
        b_Mkk = tl.dot(b_dR, b_vn, b_Mkk, input_precision=PRECISION)
        if HAS_DO:
            b_do = tl.load(do + i_thv * V + o_tv, mask=m_tv, other=0.0)
            b_Mqk = tl.dot(b_do, b_vn, b_Mqk, input_precision=PRECISION)
        b_dR32 = b_dR.to(tl.float32)
        b_dbeta += tl.sum(b_dR32 * b_v, 1)
        b_dv = b_dR32 * b_beta[:, None]
        tl.store(dv + i_thv * V + o_tv, b_dv.to(dv.dtype.element_ty), mask=m_tv)
    o_d = (NK * rows.to(tl.int64) * HV + o_r) * (D_PARTS * BT)
    tl.store(d_tokens + o_d + D_BETA * BT + o_t, b_dbeta)
    b_d = pair_decays(p_x + GATE * BT, o_t[:, None] >= o_t[None, :], BT, USE_G)
    b_Mkk = tl.where(o_t[:, None] > o_t[None, :], -b_Mkk * b_d, 0.0)
    o_M = o_t[:, None] * (HV * BT) + o_t[None, :]
    tl.store(M_kk + i_thv * BT + o_M, b_Mkk.to(dtype), mask=m_t[:, None])
    if HAS_DO:
        b_Mqk *= b_d * scale
        tl.store(M_qk + i_thv * BT + o_M, b_Mqk.to(dtype), mask=m_t[:, None])


@triton.jit(do_not_specialize=["scale", "T", "B", "H", "HV", "rows"])
def chunk_gdn_bwd_kernel_intra(
    q,  # [B, T, H, K]
    k,  # [B, T, H, K]
    tokens,  # [rows, HV, PARTS, BT] fp32
    v_new,  # [B, T, HV, V]
    h,  # [rows, HV, K, V]
    do,  # [B, T, HV, V] or None
    dR,  # [B, T, HV, V]
    dh,  # [rows, HV, K, V]
    M_qk,  # [B, T, HV, BT] or None
    M_kk,  # [B, T, HV, BT]
    dq,  # [B, T, HV, K], written: of the normalised rows
    dk,  # [B, T, HV, K], written: of the normalised rows
    d_tokens,  # [NK + 1, rows, HV, D_PARTS, BT] fp32, written but for the last: parts of a slab
    d_states,  # [NK, rows, HV] fp32, written with USE_G: <S, dS> of a slab
    bounds,  # [N+1] int64, read where B is 0
    table,  # [rows, 2] int32, the same
    scale,
    T,
    B,  # 0: packed sequences
    H,
    HV,
    rows,
    K: tl.constexpr,
    V: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    HAS_DO: tl.constexpr,
    USE_G: tl.constexpr,
    USE_L2NORM: tl.constexpr,
    PRECISION: tl.constexpr,
    STATE_DTYPE: tl.constexpr,
):
    """dq, dk and what the gradients of gates and beta are made of.

    One program per (chunk row, value head, slab of BK channels); V is walked in slabs.
    """
    NK: tl.constexpr = (K + BK - 1) // BK
    i_s = tl.program_id(0) % NK
    i_r = tl.program_id(0) // NK
    row, i_hv = i_r // HV, i_r % HV
    i_h = i_hv // (HV // H)
    t0, b_len = chunk_position(bounds, table, row, T, B, BT, B == 0)
    if b_len <= 0:
        return
    o_r = row.to(tl.int64) * HV + i_hv
    o_t = tl.arange(0, BT)
    o_k = i_s * BK + tl.arange(0, BK)
    m_t = o_t < b_len
    m_k = o_k < K
    m_tk = m_t[:, None] & m_k[None, :]
    # offsets within a chunk in 32 bits, on a base that a scalar holds
    i_thv = t0 * HV + i_hv
    i_qk = (t0 * H + i_h) * K
    i_S = o_r * K * V
    o_qk = o_t[:, None] * (H * K) + o_k[None, :]
    o_gk = o_t[:, None] * (HV * K) + o_k[None, :]
    o_M = o_t[:, None] * (HV * BT) + o_t[None, :]
    p_x = tokens + o_r * (PARTS * BT) + o_t
    dtype = q.dtype.element_ty

    # keys: what they read and write of the states, then as rows and columns of M_kk
    b_de = tl.zeros([BT, BK], dtype=tl.float32)
    b_dk = tl.zeros([BT, BK], dtype=tl.float32)
    if USE_G:
        b_states = states_product(h, dh, i_S, o_k, m_k, V, BV)
    for i_v in range(0, V, BV):
        o_v = i_v + tl.arange(0, BV)
        o_tv = o_t[:, None] * (HV * V) + o_v[None, :]
        m_tv = m_t[:, None] & (o_v < V)[None, :]
        o_S = o_k[:, None] * V + o_v[None, :]
        m_S = m_k[:, None] & (o_v < V)[None, :]
        b_S = tl.load(h + i_S + o_S, mask=m_S, other=0.0)
        b_dS = tl.load(dh + i_S + o_S, mask=m_S, other=0.0)
        b_dR = tl.load(dR + i_thv * V + o_tv, mask=m_tv, other=0.0).to(STATE_DTYPE)
        b_S = tl.trans(b_S.to(STATE_DTYPE))
        b_de = tl.dot(b_dR, b_S, b_de, input_precision=PRECISION)
        b_vn = tl.load(v_new + i_thv * V + o_tv, mask=m_tv, other=0.0).to(STATE_DTYPE)
        b_dS = tl.trans(b_dS.to(STATE_DTYPE))
        b_dk = tl.dot(b_vn, b_dS, b_dk, input_precision=PRECISION)
    b_z = tl.load(k + i_qk + o_qk, mask=m_tk, other=0.0)
    if USE_L2NORM:
        b_z = (b_z.to(tl.float32) * tl.load(p_x + NORM_K * BT)[:, None]).to(dtype)
    b_beta = tl.load(p_x + BETA * BT)
    b_y = (b_z.to(tl.float32) * b_beta[:, None]).to(dtype)
    b_de *= -tl.load(p_x + BEFORE * BT)[:, None]
    b_dk *= tl.load(p_x + AFTER * BT)[:, None]
    b_dwrite = tl.sum(b_z.to(tl.float32) * b_dk, 1)
    b_M = tl.load(M_kk + i_thv * BT + o_M, mask=m_t[:, None], other=0.0)
    b_de = tl.dot(b_M, b_z, b_de, input_precision=PRECISION)
    b_dbeta = tl.sum(b_z.to(tl.float32) * b_de, 1)
    b_dG = tl.sum(b_y.to(tl.float32) * b_de, 1)
    b_dk += b_de * b_beta[:, None]
    b_column = tl.dot(tl.trans(b_M), b_y, input_precision=PRECISION)

    # queries, and keys as columns of M_qk
    b_dq = tl.zeros([BT, BK], dtype=tl.float32)
    if HAS_DO:
        for i_v in range(0, V, BV):
            o_v = i_v + tl.arange(0, BV)
            o_tv = o_t[:, None] * (HV * V) + o_v[None, :]
            m_tv = m_t[:, None] & (o_v < V)[None, :]
            o_S = o_k[:, None] * V + o_v[None, :]
            m_S = m_k[:, None] & (o_v < V)[None, :]
            b_do = tl.load(do + i_thv * V + o_tv, mask=m_tv, other=0.0).to(STATE_DTYPE)
            b_S = tl.trans(tl.load(h + i_S + o_S, mask=m_S, other=0.0).to(STATE_DTYPE))
            b_dq = tl.dot(b_do, b_S, b_dq, input_precision=PRECISION)
        b_x = tl.load(q + i_qk + o_qk, mask=m_tk, other=0.0)
        if USE_L2NORM:
            b_x = (b_x.to(tl.float32) * tl.load(p_x + NORM_Q * BT)[:, None]).to(dtype)
        b_dq *= (tl.load(p_x + BEFORE * BT) * scale)[:, None]
        p_M = M_qk + i_thv * BT
        # a token's pair with itself has no gate, and is all there is under strong decay
        m_M = m_t[:, None] & (o_t[:, None] != o_t[None, :])
        b_M = tl.load(p_M + o_M, mask=m_M, other=0.0)
        b_dq = tl.dot(b_M, b_z, b_dq, input_precision=PRECISION)
        b_dG += tl.sum(b_x.to(tl.float32) * b_dq, 1)
        b_column = tl.dot(tl.trans(b_M), b_x, b_column, input_precision=PRECISION)
    b_dG -= tl.sum(b_z.to(tl.float32) * b_column, 1)
    if HAS_DO:
        b_own = tl.load(p_M + o_t * (HV * BT + 1), mask=m_t, other=0.0).to(tl.float32)[:, None]
        b_dq += b_own * b_z.to(tl.float32)
        b_column += b_own * b_x.to(tl.float32)
    tl.store(dq + i_thv * K + o_gk, b_dq.to(dq.dtype.element_ty), mask=m_tk)
    tl.store(dk + i_thv * K + o_gk, (b_dk + b_column).to(dk.dtype.element_ty), mask=m_tk)

    o_d = i_s * rows.to(tl.int64) * HV + o_r
    p_d = d_tokens + o_d * (D_PARTS * BT) + o_t
    tl.store(p_d + D_BETA * BT, b_dbeta)
    if USE_G:
        tl.store(p_d + D_GATE * BT, b_dG)
        tl.store(p_d + D_WRITE * BT, b_dwrite)
        tl.store(d_states + o_d, b_states)
